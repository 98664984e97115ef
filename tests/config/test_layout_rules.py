"""The rules of layouts, each broken alone and several at once."""

from dataclasses import replace

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup.layout_rules import divisors, layout_problems, possible_tp
from tests.sizes import model, run


def changed(config: RunConfig, section: str, **values: object) -> RunConfig:
    return replace(config, **{section: replace(getattr(config, section), **values)})


TINY = run("tiny", 4)
GPU = run("8b", 16)

BROKEN = {
    "kv heads % tp": (replace(changed(TINY, "parallel", tp=8), gpus=8), "parallel.tp"),
    "tp 3": (replace(changed(TINY, "parallel", tp=3), gpus=3), "parallel.tp"),
    "ffn % tp": (changed(changed(TINY, "parallel", tp=4), "model", ffn_hidden_size=770), "parallel.tp"),
    "ffn of undivided experts % tp": (
        changed(changed(TINY, "parallel", tp=4), "model", num_experts=8, ffn_hidden_size=770),
        "parallel.tp",
    ),
    "vocabulary % tp": (changed(changed(TINY, "parallel", tp=4), "model", vocab_size=257), "parallel.tp"),
    "layers % pp": (replace(changed(TINY, "parallel", pp=5), gpus=5), "parallel.pp"),
    "layers of a stage % vpp": (changed(TINY, "parallel", pp=2, vpp=4), "parallel.vpp"),
    "vpp without stages": (changed(TINY, "parallel", pp=1, vpp=2), "parallel.vpp"),
    "micro-batches % pp": (
        changed(changed(TINY, "parallel", tp=1, pp=2, cp=1, vpp=2), "train", global_batch_size=24, micro_batch_size=4),
        "train.global_batch_size",
    ),
    "gpus % (tp * pp)": (replace(changed(TINY, "parallel", tp=2, pp=2), gpus=6), "gpus"),
    "half a machine": (replace(GPU, gpus=12), "gpus"),
    "heads % groups": (changed(TINY, "model", num_query_groups=3), "model.num_query_groups"),
    "batch % micro": (changed(TINY, "train", global_batch_size=10, micro_batch_size=4), "train.global_batch_size"),
    "batch % dp": (
        changed(changed(TINY, "parallel", tp=1, pp=1, cp=1), "train", global_batch_size=10),
        "train.global_batch_size",
    ),
    "cp slices": (changed(changed(TINY, "parallel", cp=2), "train", seq_length=254), "train.seq_length"),
    "experts of a dense model": (replace(changed(TINY, "parallel", ep=2), gpus=2), "parallel.ep"),
    "experts % ep": (replace(changed(changed(TINY, "parallel", ep=3), "model", num_experts=8), gpus=3), "parallel.ep"),
    "ranks of a stage % ep": (
        replace(changed(changed(TINY, "parallel", ep=4, pp=2), "model", num_experts=8), gpus=4),
        "parallel.ep",
    ),
    "DeepEP on CPUs": (
        replace(changed(changed(TINY, "parallel", ep=2, dispatcher="flex"), "model", num_experts=8), gpus=2),
        "parallel.dispatcher",
    ),
    "experts without sequence parallelism": (
        changed(changed(TINY, "parallel", tp=2, sequence_parallel=False), "model", num_experts=8),
        "parallel.sequence_parallel",
    ),
    "experts' sequence % tp": (
        changed(changed(changed(TINY, "parallel", tp=2), "model", num_experts=8), "train", seq_length=255),
        "train.seq_length",
    ),
    "sequence parallel with tp 1": (
        changed(GPU, "parallel", sequence_parallel=True, tp=1),
        "parallel.sequence_parallel",
    ),
    "sequence % tp": (
        changed(changed(GPU, "parallel", sequence_parallel=True, tp=8), "train", seq_length=4100),
        "train.seq_length",
    ),
    "uneven nodes": (changed(GPU, "cluster", nodes=3), "cluster.nodes"),
    "crowded nodes": (changed(GPU, "cluster", nodes=1), "cluster.nodes"),
}


@pytest.mark.parametrize(("config", "key"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_names_its_key_and_a_way_out(config: RunConfig, key: str) -> None:
    problems = layout_problems(config.setup)
    assert [problem.key for problem in problems] == [key]
    assert problems[0].reason
    assert problems[0].fix


def test_all_problems_come_at_once() -> None:
    config = changed(TINY, "parallel", tp=3, pp=5, cp=2)
    config = changed(config, "train", global_batch_size=7, micro_batch_size=2, seq_length=255)
    keys = {problem.key for problem in layout_problems(config.setup)}
    assert keys == {"parallel.tp", "parallel.pp", "gpus", "train.seq_length", "train.global_batch_size"}


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(changed(TINY, "parallel", pp=3), gpus=3),
        changed(TINY, "parallel", cp=2),
        # Tensor parallelism does not cut experts that are divided among ranks.
        changed(changed(TINY, "parallel", tp=4, ep=2), "model", num_experts=8, ffn_hidden_size=770),
        changed(changed(GPU, "parallel", tp=8), "model", num_experts=8, ffn_hidden_size=12289),
        GPU,
        run("tiny", 7),
        run("32b", 1024, tp=8, pp=4, global_batch_size=256),
    ],
)
def test_what_can_work_has_no_problems(config: RunConfig) -> None:
    assert layout_problems(config.setup) == []


def test_the_fix_for_a_gpu_count_is_itself_fine() -> None:
    problem = layout_problems(replace(changed(TINY, "parallel", tp=2, pp=2), gpus=6).setup)[0]
    assert "gpus=8" in problem.fix
    assert "gpus=4" in problem.fix
    for gpus in (4, 8):
        assert layout_problems(replace(changed(TINY, "parallel", tp=2, pp=2), gpus=gpus).setup) == []


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)


def test_tensor_parallel_sizes_of_the_published_models() -> None:
    assert possible_tp(model("tiny")) == (1, 2, 4)
    assert possible_tp(model("32b")) == (1, 2, 4, 8)
