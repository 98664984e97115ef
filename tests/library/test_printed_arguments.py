"""`plan --from-megatron` on what Megatron-LM's own `pretrain` prints, next to what those runs say of themselves."""

import re
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_translation import read_megatron_run
from canzona_cli.core.costs.buffers import stage_weights
from canzona_cli.core.simulate.search import candidates

SHARDED = ("--use-distributed-optimizer",)
RUNS: dict[str, tuple[str, ...]] = {
    "tp2, tied": ("--tensor-model-parallel-size", "2", "--optimizer", "muon", "--muon-tp-mode", "duplicated"),
    "dp2 bf16, untied": ("--bf16", "--untie-embeddings-and-output-weights", *SHARDED),
    "pp2 without a batch": ("--pipeline-model-parallel-size", "2", "--num-query-groups", "4", *SHARDED),
    "experts": (
        *("--num-experts", "4", "--moe-ffn-hidden-size", "96", "--moe-router-topk", "2"),
        *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", *SHARDED),
    ),
}


@pytest.mark.parametrize("name", [*list(RUNS)[:1], *(pytest.param(n, marks=pytest.mark.sweep) for n in list(RUNS)[1:])])
def test_the_plan_is_of_the_run_that_printed_its_arguments(name: str, tmp_path: Path) -> None:
    """Parameters on each rank, sequences in a step and ranks are as the run counts them."""
    from tests.library.pretraining import LENGTH, LOOP, QWEN3, pretrain

    loop = [*LOOP]
    if "without a batch" in name:
        place = loop.index("--global-batch-size")
        del loop[place : place + 2]
    ranks = pretrain(*QWEN3, *loop, "--lr-warmup-iters", "0", "--train-iters", "2", "--log-interval", "1", *RUNS[name])
    printed = "".join(rank.printed for rank in ranks)
    log = tmp_path / "job.log"
    log.write_text(printed)

    run = read_megatron_run(str(log), ("program=gpt",))
    assert (run.assumed, run.not_understood) == ((), ())
    config = compose_run([f"{key}={value}" for key, value in run.overrides.items()], training=False).config
    layout = candidates(config.setup)[0].layout
    parameters = {
        (int(tp), int(pp)): int(count)
        for tp, pp, count in re.findall(r"number of parameters on .* rank \((\d+), \d+, (\d+)\): (\d+)", printed)
    }
    assert len(parameters) == layout.tp * layout.pp
    for (_, stage), count in parameters.items():
        weights = stage_weights(config.setup, layout, stage)
        assert weights.matrices + weights.others == count
    batches = re.findall(r"consumed samples: +(\d+) .* global batch size: +(\d+)", printed)
    batch = config.train.global_batch_size or 0
    assert [(int(samples), int(size)) for samples, size in batches] == [(batch, batch), (2 * batch, batch)]
    assert (config.gpus, config.train.seq_length) == (len(ranks), LENGTH)
    assert config.train.precision == ("bf16" if "bf16" in name else "fp32")
