"""Megatron-LM's own `pretrain`, from the installed wheel, on gloo ranks without CUDA.

What its loop asks of CUDA beside Megatron-core, whose stand-ins are the product's CPU backend, stands in here: nothing
of it moves or computes anything.
"""

import contextlib
import io
import logging
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.tokenizers.text  # noqa: F401 # with transformers, which every rank would import anew
import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import argument_utils, arguments, initialize, training
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from canzona_cli import use_in_megatron_lm
from canzona_cli.core.megatron import cpu_backend, experts
from canzona_cli.core.megatron.matrix_buffers import global_parameters
from tests.cli.commands.support import ready_to_fork
from tests.dist.ranks import run_ranks

STEPS, LENGTH, VOCABULARY = 8, 64, 128
QWEN3 = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "192", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "16", "--qk-layernorm", "--swiglu"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--seq-length", str(LENGTH), "--max-position-embeddings", str(LENGTH)),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--transformer-impl", "local"),
    *("--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--attention-backend", "unfused"),
)
GPT = (
    *(flag for flag in QWEN3 if flag not in ("--swiglu", "--disable-bias-linear", "--qk-layernorm")),
    *("--normalization", "LayerNorm", "--position-embedding-type", "learned_absolute", "--adam-eps", "1e-3"),
)
"""A model with LayerNorm, biases, learned positions, and GELU without a gate. Gradients of the biases of keys are only
rounding, and at its usual eps AdamW would make whole steps of it."""
LOOP = (
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--lr", "0.01", "--min-lr", "0.001", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2"),
    *("--clip-grad", "1.0"),
    *("--weight-decay", "0.1", "--eval-interval", "1000", "--eval-iters", "0", "--log-interval", "100", "--seed", "7"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY - 1), "--make-vocab-size-divisible-by", "64"),
    *("--mock-data", "--num-workers", "0", "--distributed-backend", "gloo", "--no-check-for-nan-in-loss-and-grad"),
)
MUON = (
    *("--optimizer", "muon", "--muon-tp-mode", "duplicated", "--muon-nesterov", "--muon-extra-scale-factor", "0.2"),
    *("--muon-momentum", "0.95"),
)
SHARDED = ("--use-distributed-optimizer",)


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The part of a run that one rank saw."""

    losses: list[float] = field(default_factory=list)
    """Empty but on the last stage."""
    norms: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    """This rank's fragments, by their names in the whole model."""
    printed: str = ""
    """This rank's output."""
    timers: frozenset[str] = frozenset()
    """The names of Megatron-LM's timers that were started."""


def pretrain(
    *flags: str,
    ranks: int = 2,
    canzona: Sequence[str] | None = None,
    samples: Callable[[], "torch.utils.data.Dataset[dict[str, torch.Tensor]]"] | None = None,
) -> list[Pretrained]:
    """Runs `pretrain` on gloo ranks.

    Args:
        flags: Megatron-LM's arguments.
        canzona: the settings of canzona's engine; None for Megatron's own optimizer.
        samples: makes the training samples; None for `MockTokens`.
    """
    ready_to_fork()
    return run_ranks(ranks, partial(run, flags, canzona, samples or MockTokens))


def run(
    flags: Sequence[str],
    canzona: Sequence[str] | None,
    samples: Callable[[], "torch.utils.data.Dataset[dict[str, torch.Tensor]]"],
) -> Pretrained:
    """Runs `pretrain` in this process, which is one rank."""
    # Megatron-LM's ranks exchange objects by pickles, which ranks of these tests are kept from.
    distributed_c10d._unpickler = pickle.Unpickler
    logging.getLogger("canzona_cli").addHandler(Refusing(level=logging.WARNING))
    seen, models = Pretrained(), list[GPTModel]()
    with stand_ins(), contextlib.redirect_stdout(io.StringIO()) as printed:
        sys.argv = ["pretrain_gpt.py", *flags]
        args = arguments.parse_and_validate_args()
        container = pretrain_cfg_container_from_args(args)
        if canzona is not None:
            use_in_megatron_lm(*canzona)
        training.train_step = recorded(training.train_step, seen)

        def datasets_of(*_: object, vp_stage: int | None = None) -> tuple[object, object, None]:
            return samples(), samples(), None

        datasets_of.is_distributed = True  # type: ignore[attr-defined] # every tensor-parallel rank reads for itself
        try:
            training.pretrain(
                container, datasets_of, ModelType.encoder_or_decoder, forward_step, partial(model_of, models=models)
            )
        except BaseException as error:
            error.add_note(printed.getvalue()[-2000:])
            raise
        finally:  # a checkpoint's writers outlive it
            for child in multiprocessing.active_children():
                child.kill()
    return Pretrained(
        losses=seen.losses,
        norms=seen.norms,
        weights={name: param.detach().float().numpy().copy() for name, param in global_parameters(models)},
        printed=printed.getvalue(),
        timers=frozenset(training.get_timers()._timers),
    )


class Refusing(logging.Handler):
    """Raises what canzona warns of: a setting that has no effect would test nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


def recorded(step: Callable[..., tuple[Any, ...]], seen: Pretrained) -> Callable[..., tuple[Any, ...]]:
    def train_step(*arguments: object, **named: object) -> tuple[Any, ...]:
        result = step(*arguments, **named)
        seen.losses.extend(float(value) for value in result[0].values())
        seen.norms.append(float(result[5]))
        return result

    return train_step


def model_of(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: object = None,
    pg_collection: object = None,
    *,
    models: list[GPTModel],
) -> GPTModel:
    """Builds a chunk of the model, as Megatron-LM's model providers do."""
    args = training.get_args()
    mcore = core_transformer_config_from_args(args)
    spec = (
        get_gpt_layer_local_spec(
            num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
        if args.moe_layer_freq == 1
        else get_gpt_decoder_block_spec(mcore, False, normalization=args.normalization, vp_stage=vp_stage)
    )
    model = GPTModel(
        config=mcore,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    leave_to_adamw(model)
    models.append(model)
    return model


def leave_to_adamw(model: GPTModel) -> None:
    """Marks the routers, the gates of shared experts, and the learned positions, which Megatron's Muon would update as
    matrices."""
    experts.leave_to_adamw(model)
    for name, param in model.named_parameters():
        if name.endswith("gate_weight"):
            param.is_embedding_or_output_parameter = True


class MockTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sample `i` repeats a random word of its own, so that there is something to learn."""

    def __len__(self) -> int:
        return 1 << 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        text = torch.randint(VOCABULARY // 2, (8,), generator=generator).repeat(LENGTH // 8 + 1)[: LENGTH + 1]
        # Samples have different numbers of tokens that count, which per-token losses weigh.
        mask = (torch.arange(LENGTH) < LENGTH - index % 8).float()
        return {"tokens": text[:-1], "labels": text[1:], "mask": mask}


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, object]:
    batch = next(batches)
    positions = torch.arange(LENGTH).expand_as(batch["tokens"])
    return model(batch["tokens"], positions, None, labels=batch["labels"]), partial(loss_of, batch["mask"])


def loss_of(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss, tokens = (losses.float() * mask).sum(), mask.sum().int()
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of one of Megatron's checkpoints, whole, by torch's own functions."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    tensors = {key: torch.empty(entry.size) for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    load_tensors(dict(tensors), storage_reader=reader, no_dist=True)
    return {key: tensor.numpy() for key, tensor in tensors.items()}


class TorchsAdamW(DistributedOptimizer):  # type: ignore[misc]
    """An optimizer with the methods that Megatron's lacks to load a checkpoint into torch's AdamW without Transformer
    Engine: state to load into, a copy of the step for each parameter, and no step among the tensors that it sets."""

    def sharded_state_dict(self, model: object, is_loading: bool = False, **named: object) -> object:
        if is_loading and not self.optimizer.state:
            for param in (param for group in self.optimizer.param_groups for param in group["params"]):
                moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
        return _SHARDED_STATE_DICT(self, model, is_loading, **named)

    def load_state_dict(self, state: object) -> None:
        _LOAD_STATE_DICT(self, state)
        for each in self.optimizer.state.values():
            each["step"] = each["step"].clone()

    def _set_main_param_and_optimizer_states(self, param: object, tensors: dict[str, object]) -> None:
        _SET_STATES(self, param, {"step": None, **tensors})


def norm_of(_: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **__: object) -> torch.nn.Module:
    """Makes a norm that, unlike Megatron's without Transformer Engine, also works with sequence parallelism, which
    experts on several tensor-parallel ranks need."""
    norm = (torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm)(hidden_size, eps=eps)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


_SHARDED_STATE_DICT, _LOAD_STATE_DICT = DistributedOptimizer.sharded_state_dict, DistributedOptimizer.load_state_dict
_SET_STATES = DistributedOptimizer._set_main_param_and_optimizer_states


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replaces what Megatron-LM's training asks of CUDA, for the rest of this process' life but for two names."""
    cpu_backend.install()
    cuda, zero = torch.cuda, lambda *_, **__: 0
    replaced: tuple[tuple[object, str, object], ...] = (
        (cuda, "Stream", lambda *_, **__: cpu_backend.CpuStream()),
        (cuda, "stream", lambda _: contextlib.nullcontext()),
        *((cuda, f"{kind}_{what}", zero) for kind in ("memory", "max_memory") for what in ("allocated", "reserved")),
        (cuda, "synchronize", zero),
        (cuda, "memory_stats", lambda *_: {}),
        (cuda, "reset_peak_memory_stats", zero),
        (training, "set_jit_fusion_options", zero),
        (training, "initialize_megatron", partial(_initialize, training.initialize_megatron)),
        (initialize, "_compile_dependencies", zero),  # a make in the wheel, which has the library and no Makefile
        (initialize.inprocess_restart, "maybe_force_nccl_backend_init", zero),
        (arguments, "get_device_arch_version", lambda: 10),
        (argument_utils.ArgumentGroupFactory, "_get_field_docstrings", lambda *_: {}),  # by parsing Megatron's sources
        (WrappedTorchNorm, "__new__", norm_of),
        *((DistributedOptimizer, name, value) for name, value in vars(TorchsAdamW).items() if callable(value)),
    )
    for owner, name, value in replaced:
        setattr(owner, name, value)
    yield


def _initialize(original: Callable[..., object], **named: object) -> object:
    """Makes groups and random states, which Megatron-LM leaves out where it counts no device."""
    count, choose = torch.cuda.device_count, torch.cuda.set_device
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda _: None  # type: ignore[assignment]
    try:
        return original(allow_no_cuda=True, **named)
    finally:
        torch.cuda.device_count, torch.cuda.set_device = count, choose
