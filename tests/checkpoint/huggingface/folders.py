"""Folders as transformers itself writes them, with random weights."""

from pathlib import Path

import torch
from safetensors.torch import load, load_file, save
from transformers import AutoModelForCausalLM

from canzona_cli.core.setup import ModelConfig
from tests.dist.ranks import run_ranks
from tests.dist.reference import random_model

Weights = dict[str, torch.Tensor]


def random_folder(
    path: Path, shape: ModelConfig, *, dtype: torch.dtype = torch.float32, max_length: int = 64, shard: str = "50GB"
) -> Weights:
    """Save a random Qwen3 or Llama there; its weights by name, each once.

    They are ten times the usual and norms are not 1, so that a wrong rotation, head or norm shows. In a process of its
    own: transformers begins threads.
    """

    @torch.no_grad()
    def write() -> None:
        torch.manual_seed(7)
        model = random_model(shape, max_length=max_length)
        for parameter in model.parameters():
            parameter.mul_(10) if parameter.dim() > 1 else parameter.mul_(1 + 0.3 * torch.randn(parameter.shape))
        model.to(dtype).save_pretrained(path, max_shard_size=shard)

    run_ranks(1, write)
    return stored(path)


def stored(folder: Path) -> Weights:
    """Returns the weights in a folder's files, read by the safetensors library."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def read_by_transformers(folder: Path) -> Weights:
    """Returns the weights that `AutoModelForCausalLM` reads from a folder, each once.

    Raises:
        AssertionError: something was missing, or one too many.
    """

    def read() -> bytes:
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        return save({name: parameter.detach() for name, parameter in model.named_parameters()})

    [found] = run_ranks(1, read)
    return load(found)
