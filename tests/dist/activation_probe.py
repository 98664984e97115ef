"""Prints, as JSON, the bytes autograd saves in one forward pass of qwen3-tiny on CPU; run by test_activation_memory."""

import json
import os
from dataclasses import replace

import torch

from canzona_cli.cluster import fit
from canzona_cli.config.schema import Precision, Recompute
from canzona_cli.megatron import parallel
from canzona_cli.megatron.model import build_model
from canzona_cli.megatron.parallel import World
from tests.sizes import run

MICRO_BATCH = 4
CASES: tuple[tuple[Precision, Recompute], ...] = tuple(
    (precision, recompute) for precision in ("bf16", "fp32") for recompute in ("none", "selective", "full")
)


def saved_bytes(world: World, precision: Precision, recompute: Recompute) -> int:
    """Bytes of the distinct storages, weights apart, that the backward pass would need."""
    config = run("tiny", 1, micro_batch_size=MICRO_BATCH, precision=precision, recompute=recompute)
    config, layout = fit.resolve(config)
    model = build_model(config, replace(world, layout=layout))
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept.setdefault(storage, tensor)  # holding the tensor keeps its address from being used again
        return tensor

    length = config.train.seq_length
    tokens = torch.randint(0, 256, (MICRO_BATCH, length))
    positions = torch.arange(length).expand(MICRO_BATCH, length)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, positions, mask, labels=tokens)
    assert torch.isfinite(loss).all()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def main() -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    _, layout = fit.resolve(run("tiny", 1))
    world = parallel.initialize(layout, "cpu", seed=1)
    print(json.dumps([{"case": case, "bytes": saved_bytes(world, *case)} for case in CASES]))
    parallel.shutdown()


if __name__ == "__main__":
    main()
