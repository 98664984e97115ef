"""The rules of layouts, each broken alone and several at once."""

import json
from dataclasses import replace

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup.layout_rules import divisors, layout_problems, possible_tp
from tests.sizes import model, run


def changed(config: RunConfig, settings: str) -> RunConfig:
    """Returns a run with these settings, whose values are JSON."""
    for key, _, value in (each.partition("=") for each in settings.split()):
        section, _, name = key.rpartition(".")
        values = {name: json.loads(value)}
        config = replace(config, **({section: replace(getattr(config, section), **values)} if section else values))
    return config


TINY = run("tiny", 4)
GPU = run("8b", 16)

BROKEN = {
    "kv heads % tp": (TINY, "gpus=8 parallel.tp=8", "parallel.tp"),
    "tp 3": (TINY, "gpus=3 parallel.tp=3", "parallel.tp"),
    "ffn % tp": (TINY, "parallel.tp=4 model.ffn_hidden_size=770", "parallel.tp"),
    "ffn of whole experts % tp": (TINY, "parallel.tp=4 model.num_experts=8 model.ffn_hidden_size=770", "parallel.tp"),
    "vocabulary % tp": (TINY, "parallel.tp=4 model.vocab_size=257", "parallel.tp"),
    "layers % pp": (TINY, "gpus=5 parallel.pp=5", "parallel.pp"),
    "layers of a stage % vpp": (TINY, "parallel.pp=2 parallel.vpp=4", "parallel.vpp"),
    "vpp without stages": (TINY, "parallel.pp=1 parallel.vpp=2", "parallel.vpp"),
    "micro-batches % pp": (
        TINY,
        "parallel.tp=1 parallel.pp=2 parallel.cp=1 parallel.vpp=2 train.global_batch_size=24 train.micro_batch_size=4",
        "train.global_batch_size",
    ),
    "gpus % (tp * pp)": (TINY, "gpus=6 parallel.tp=2 parallel.pp=2", "gpus"),
    "half a machine": (GPU, "gpus=12", "gpus"),
    "heads % groups": (TINY, "model.num_query_groups=3", "model.num_query_groups"),
    "batch % micro": (TINY, "train.global_batch_size=10 train.micro_batch_size=4", "train.global_batch_size"),
    "batch % dp": (
        TINY,
        "parallel.tp=1 parallel.pp=1 parallel.cp=1 train.global_batch_size=10",
        "train.global_batch_size",
    ),
    "cp slices": (TINY, "parallel.cp=2 train.seq_length=254", "train.seq_length"),
    "experts of a dense model": (TINY, "gpus=2 parallel.ep=2", "parallel.ep"),
    "experts % ep": (TINY, "gpus=3 parallel.ep=3 model.num_experts=8", "parallel.ep"),
    "ranks of a stage % ep": (TINY, "gpus=4 parallel.ep=4 parallel.pp=2 model.num_experts=8", "parallel.ep"),
    "DeepEP on CPUs": (
        TINY,
        'gpus=2 parallel.ep=2 parallel.dispatcher="flex" model.num_experts=8',
        "parallel.dispatcher",
    ),
    "experts and whole sequences": (
        TINY,
        "parallel.tp=2 parallel.sequence_parallel=false model.num_experts=8",
        "parallel.sequence_parallel",
    ),
    "experts' sequence % tp": (TINY, "parallel.tp=2 model.num_experts=8 train.seq_length=255", "train.seq_length"),
    "sequence parallel with tp 1": (GPU, "parallel.sequence_parallel=true parallel.tp=1", "parallel.sequence_parallel"),
    "sequence % tp": (GPU, "parallel.sequence_parallel=true parallel.tp=8 train.seq_length=4100", "train.seq_length"),
    "uneven nodes": (GPU, "cluster.nodes=3", "cluster.nodes"),
    "crowded nodes": (GPU, "cluster.nodes=1", "cluster.nodes"),
}


@pytest.mark.parametrize(("config", "settings", "key"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_names_its_key_and_a_way_out(config: RunConfig, settings: str, key: str) -> None:
    problems = layout_problems(changed(config, settings).setup)
    assert [problem.key for problem in problems] == [key]
    assert problems[0].reason
    assert problems[0].fix


def test_all_problems_come_at_once() -> None:
    train = "train.global_batch_size=7 train.micro_batch_size=2 train.seq_length=255"
    config = changed(TINY, f"parallel.tp=3 parallel.pp=5 parallel.cp=2 {train}")
    keys = {problem.key for problem in layout_problems(config.setup)}
    assert keys == {"parallel.tp", "parallel.pp", "gpus", "train.seq_length", "train.global_batch_size"}


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        changed(TINY, "gpus=3 parallel.pp=3"),
        changed(TINY, "parallel.cp=2"),
        # Tensor parallelism does not cut experts that are divided among ranks.
        changed(TINY, "parallel.tp=4 parallel.ep=2 model.num_experts=8 model.ffn_hidden_size=770"),
        changed(GPU, "parallel.tp=8 model.num_experts=8 model.ffn_hidden_size=12289"),
        GPU,
        run("tiny", 7),
        run("32b", 1024, tp=8, pp=4, global_batch_size=256),
    ],
)
def test_what_can_work_has_no_problems(config: RunConfig) -> None:
    assert layout_problems(config.setup) == []


def test_the_fix_for_a_gpu_count_is_itself_fine() -> None:
    settings = "parallel.tp=2 parallel.pp=2"
    problem = layout_problems(changed(TINY, f"gpus=6 {settings}").setup)[0]
    assert "gpus=8" in problem.fix
    assert "gpus=4" in problem.fix
    for gpus in (4, 8):
        assert layout_problems(changed(TINY, f"gpus={gpus} {settings}").setup) == []


def test_divisors() -> None:
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)


def test_tensor_parallel_sizes_of_the_published_models() -> None:
    assert possible_tp(model("tiny")) == (1, 2, 4)
    assert possible_tp(model("32b")) == (1, 2, 4, 8)
