"""Megatron's optimizers next to canzona's plan in the layout of a command line."""

import json
from pathlib import Path

import pytest

from canzona_cli.bench.beside_megatron import MegatronComparison, compare_with_megatron
from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_translation import read_megatron_run
from canzona_cli.config.resolve import fill
from canzona_cli.core.simulate.compare import mode_key, study_run
from canzona_cli.core.simulate.search import candidates

SMALL = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 --bf16"
    " --hidden-dropout 0 --vocab-size 20480 --seq-length 256 --micro-batch-size 2 --global-batch-size 16"
    " --train-iters 100 --lr 1e-3"
)
MUON = "--optimizer muon --use-distributed-optimizer"
TP = "--tensor-model-parallel-size 4 --sequence-parallel"


def beside(tmp_path: Path, flags: str) -> MegatronComparison:
    path = tmp_path / "train.txt"
    path.write_text(f"{SMALL} {flags}")
    run = read_megatron_run(str(path), ())
    config = compose_run([f"{key}={value}" for key, value in run.overrides.items()], training=False).config
    layout = candidates(config.setup)[0].layout
    return compare_with_megatron(run, fill(config, layout).setup, layout, run.command(config, ()))


def test_modes_of_muon_cost_what_they_repeat(tmp_path: Path) -> None:
    """A rank that orthogonalises fragments does less than one that orthogonalises whole matrices, and without a
    distributed optimizer every rank updates everything and keeps its state."""
    blockwise = beside(tmp_path, f"{MUON} {TP}").muon
    duplicated = beside(tmp_path, f"{MUON} {TP} --muon-tp-mode duplicated").muon
    distributed = beside(tmp_path, f"{MUON} {TP} --muon-tp-mode distributed").muon
    everywhere = beside(tmp_path, f"--optimizer muon {TP} --muon-tp-mode duplicated").muon
    assert blockwise.result.optimizer_s < duplicated.result.optimizer_s < everywhere.result.optimizer_s
    assert distributed.result.update_balance == duplicated.result.update_balance
    assert distributed.result.phases["exchange"] > duplicated.result.phases["exchange"]
    assert blockwise.memory_bytes == duplicated.memory_bytes < everywhere.memory_bytes
    assert blockwise.padding == duplicated.padding
    assert everywhere.padding is None


@pytest.mark.parametrize("flags", ["--optimizer dist_muon", f"{MUON} --muon-tp-mode duplicated"])
def test_ways_to_write_the_same_run_cost_the_same(tmp_path: Path, flags: str) -> None:
    """`dist_muon` is Muon with the distributed optimizer, and modes are alike on one tensor-parallel rank."""
    assert beside(tmp_path, flags).muon == beside(tmp_path, MUON).muon


def test_all_have_the_loop_of_the_file(tmp_path: Path) -> None:
    """Its overlap makes an iteration shorter by the same time with every optimizer, but for rounding."""
    wide = f"{MUON} {TP} --hidden-size 4096 --seq-length 4096"
    without, overlapped = beside(tmp_path, wide), beside(tmp_path, f"{wide} --tp-comm-overlap")
    assert (without.overlaps, overlapped.overlaps) == ((), ("--tp-comm-overlap",))
    saved = [
        getattr(without, name).result.iteration_s - getattr(overlapped, name).result.iteration_s
        for name in ("adamw", "muon", "canzona")
    ]
    assert saved == pytest.approx([saved[0]] * 3, rel=0.05)
    assert saved[0] > 0.01 * without.adamw.result.iteration_s


@pytest.mark.parametrize("optimizer", ["--optimizer adam --use-distributed-optimizer", MUON])
@pytest.mark.parametrize(("flag", "key"), [("", ""), ("--tp-comm-overlap", "cluster.tp_overlap=true")])
def test_costs_are_those_of_a_plan_of_the_command(tmp_path: Path, optimizer: str, flag: str, key: str) -> None:
    """`canzona plan` has the same strategies in its table, and the same loop if its profile has the overlap."""
    ours = beside(tmp_path, f"{optimizer} {TP} --muon-tp-mode duplicated {flag}")
    config = compose_run([*ours.command, *filter(None, [key])], training=False).config
    assert config.engine.splitting == "qkv", "the matrices of Megatron's Muon"
    layout = candidates(config.setup)[0].layout
    assert layout == ours.layout
    study = study_run(fill(config, layout).setup, layout)
    for cost in (ours.adamw, ours.muon, ours.canzona):
        theirs = study.strategies[
            mode_key(cost.strategy, "duplicated") if cost.strategy == "layerwise" else cost.strategy
        ]
        assert (cost.result, cost.memory_bytes, cost.fits) == (theirs.result, theirs.memory_bytes, theirs.fits)
    assert json.loads(json.dumps(ours.as_json()))["costs"]["canzona"]["fits"] is True
