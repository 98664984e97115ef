"""Checkpoints of real runs: going on is as if nothing had happened, and any layout and strategy reads any other's.

Compared are values, to the last bit: what a checkpoint holds in model space, and the weights that are trained on.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from canzona_cli.checkpoint.contents import content_problems
from canzona_cli.checkpoint.manifest import step_name
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.core.errors import CheckpointInvalid
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.model.families import EMBEDDING
from canzona_cli.core.optimizers import gram_form, muon_facts, shared_rows
from canzona_cli.core.optimizers.muon_facts import DISTRUSTED, STANDARD_STEPS
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist.jobs import EXPERTS, Runs, on_ranks, planned
from tests.dist.samples import RandomTokens
from tests.dist.saved import (
    Case,
    Outcome,
    Units,
    manifest_of,
    random_states_of,
    resolve,
    saving_runs,
    train,
    units_of,
)
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import Part, part_of

TP2_DP2 = ("gpus=4", "parallel.tp=2", "train.micro_batch_size=4")
OPTIMIZERS = {
    "adamw": ("optimizer=adamw",),
    "muon": ("optimizer=muon",),
    "soap": ("optimizer=soap", "optimizer.precondition_frequency=2", "model.num_layers=1"),
    "shampoo": ("optimizer=shampoo", "optimizer.precondition_frequency=2"),
}
LAYOUTS = {
    "tp4": ("gpus=4", "parallel.tp=4"),
    "pp2 tp2": ("gpus=4", "parallel.tp=2", "parallel.pp=2"),
    "pp2": ("gpus=2", "parallel.pp=2"),
    "dp2": ("gpus=2",),
}
CASES = [("muon", "pp2 tp2"), ("adamw", "pp2")]
"""Optimizers and layouts; `tests.dist.fuzz` draws more of both."""
STRATEGIES = (OPTIMIZERS["muon"], "layerwise")
"""The settings of canzona, and another strategy."""
FOUR = ("model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=96", "train.seq_length=32")
OF_CHUNKS = Case(settings=(*FOUR, "gpus=2", "parallel.pp=2", "parallel.vpp=2"), steps=2)
"""Stages of two model chunks."""
READ_ELSEWHERE = Case(settings=(*FOUR, "gpus=2", "parallel.tp=2"), start=OF_CHUNKS)
CHUNKS_AGAIN = Case(settings=(*OF_CHUNKS.settings, "train.seed=99"), start=READ_ELSEWHERE)
UNTIED = ("model.tied_embeddings=false", "train.precision=fp32")
OF_EXPERTS = (*OPTIMIZERS["shampoo"], *UNTIED, "model.moe_layer_freq=[0,1]", "model.dense_ffn_hidden_size=96")
"""The second of two layers has experts."""


def _saved(*settings: str, steps: int = 2) -> Case:
    """A run of two steps on TP 2 x DP 2, the start of others."""
    return Case(settings=(*TP2_DP2, *settings), steps=steps)


def _there_and_back(there: tuple[str, ...], saved: Case, back_steps: int = 0) -> tuple[Case, Case]:
    """Read on another layout and saved again, then where it came from."""
    read = Case(settings=there, start=saved)
    return read, Case(settings=saved.settings, start=read, steps=back_steps)


def _and_one(*settings: str, steps: int = 1) -> tuple[Case, Case, Case]:
    """A run with a step more; one of `steps`; that step, in processes that start from another seed."""
    first = _saved(*settings, steps=steps)
    more = Case(settings=(*first.settings, "train.seed=99"), steps=1, start=first)
    return _saved(*settings, steps=steps + 1), first, more


def _elsewhere(optimizer: str, where: str) -> tuple[Case, Case]:
    return _there_and_back((*LAYOUTS[where], *OPTIMIZERS[optimizer]), _saved(*OPTIMIZERS[optimizer]))


def _over_experts(*settings: str) -> tuple[Case, Case, Case, Case]:
    """Saved by two ranks with half of the experts each; read and saved again by one rank, by four ranks with a quarter
    of the experts each, and by two stages of two with half of them that cut the other weights."""
    saved = Case(settings=(*EXPERTS, *settings, "gpus=2", "parallel.ep=2"), steps=2)
    alone = Case(settings=(*EXPERTS, *settings, "gpus=1"), start=saved)
    quarters = Case(settings=(*EXPERTS, *settings, "gpus=4", "parallel.ep=4"), start=alone)
    cut = ("gpus=4", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2")
    return saved, alone, quarters, Case(settings=(*EXPERTS, *settings, *cut), start=quarters)


def _by_another_strategy(saving: tuple[str, ...], reading: str) -> tuple[Case, Case, Case]:
    """Read under another strategy; one step more under the first, from there and from what it saved itself."""
    saved = _saved(*saving)
    there, back = _there_and_back((*LAYOUTS["tp4"], f"engine.strategy={reading}"), saved, back_steps=1)
    return there, back, Case(settings=saved.settings, start=saved, steps=1)


SPLIT_OTHERWISE = _there_and_back((*LAYOUTS["dp2"], "engine.splitting=fused"), _saved(*OPTIMIZERS["muon"]))
WEIGHTS_ALONE = Case(
    settings=(*LAYOUTS["tp4"], "optimizer=muon", "engine.splitting=fused", "model.num_layers=1"),
    start=_saved(*OPTIMIZERS["soap"]),
    weights_only=True,
)


SHARED = ("optimizer=muon", "optimizer.form=gram", "engine.mode=shared")
SHARED_ALONE = (*SHARED, "model.num_layers=1")
THERE = Case(settings=(*TP2_DP2, *SHARED), start=_saved(*OPTIMIZERS["muon"]))
MODES = [
    THERE,
    # In another layout, on from what was saved in fragments, and hosted again.
    Case(settings=(*LAYOUTS["tp4"], *SHARED, "engine.splitting=fused"), start=THERE),
    Case(settings=_saved(*OPTIMIZERS["muon"]).settings, start=THERE, steps=1),
]
ONE_MORE = Case(settings=MODES[-1].settings, start=_saved(*OPTIMIZERS["muon"]), steps=1)
IN_PARTS = _there_and_back((*LAYOUTS["tp4"], *OPTIMIZERS["soap"]), _saved(*OPTIMIZERS["soap"], steps=3), back_steps=1)
"""Saved between the two parts of the second refresh, read elsewhere, and one step more."""
SC_SOAP = Case(settings=(*LAYOUTS["dp2"], "engine.strategy=sc", *OPTIMIZERS["soap"]), start=_saved(*OPTIMIZERS["soap"]))
WIDER = _saved("model.hidden_size=128", "model.ffn_hidden_size=512", steps=1)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The settings of a user's own optimizer."""
    source = tmp_path_factory.mktemp("own") / "counting.py"
    source.write_text(COUNTING)
    return ("optimizer=custom", f"optimizer.source={source}:Counting", "optimizer.lr=0.01", "model.num_layers=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, own: tuple[str, ...]) -> Runs[Case, Outcome]:
    ends = [
        *_and_one(*OPTIMIZERS["soap"], steps=2),
        *(case for settings in (SHARED_ALONE, own) for case in _and_one(*settings)),
        *(case for each in CASES for case in _elsewhere(*each)),
        *_by_another_strategy(*STRATEGIES),
        *(*SPLIT_OTHERWISE, WEIGHTS_ALONE, SC_SOAP, WIDER, *MODES, ONE_MORE),
        *(READ_ELSEWHERE, CHUNKS_AGAIN),
        *_over_experts(*OF_EXPERTS),
        *IN_PARTS,
    ]
    with_starts = [case for end in ends for case in (end, end.start) if case is not None]
    return saving_runs(tmp_path_factory.mktemp("saved"), with_starts)


def _same(one: Units, other: Units) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not np.array_equal(one[name], other[name])]
    assert not different, different[:5]


def _same_weights(one: Outcome, other: Outcome) -> None:
    assert one.weights.keys() == other.weights.keys()
    different = [name for name in one.weights if not one.weights[name].equal(other.weights[name])]
    assert not different, different[:5]


def _go_on(runs: Runs[Case, Outcome], cases: tuple[Case, Case, Case]) -> None:
    straight, first, second = (runs[case] for case in cases)
    assert first.losses + second.losses == straight.losses
    assert len(set(straight.losses)) == len(straight.losses) > 1
    _same_weights(second, straight)
    model = resolve(*cases[0].settings)[0].model
    _same(units_of(second.checkpoint, model), units_of(straight.checkpoint, model))
    _same(random_states_of(second.checkpoint), random_states_of(straight.checkpoint))


def test_two_steps_and_one_more_are_three(runs: Runs[Case, Outcome]) -> None:
    """Losses, weights, masters and state, by way of a file and other processes, which start from another seed, so that
    nothing is left of what they started with. Bases are renewed at the third step."""
    _go_on(runs, _and_one(*OPTIMIZERS["soap"], steps=2))


@pytest.mark.parametrize(("optimizer", "where"), CASES)
def test_another_layout_reads_the_same_values_and_back(optimizer: str, where: str, runs: Runs[Case, Outcome]) -> None:
    saved, there, back = (runs[case] for case in (_saved(*OPTIMIZERS[optimizer]), *_elsewhere(optimizer, where)))
    model = resolve(*TP2_DP2)[0].model
    values = units_of(saved.checkpoint, model)
    assert any(name.endswith(("/momentum_buffer", "/exp_avg")) for name in values)
    _same(units_of(there.checkpoint, model), values)
    _same(units_of(back.checkpoint, model), values)
    _same_weights(there, saved)
    _same_weights(back, saved)


def test_experts_are_read_by_any_number_of_ranks(runs: Runs[Case, Outcome]) -> None:
    """Weights are fp32, and there is an output layer of its own."""
    cases = _over_experts(*OF_EXPERTS)
    saved, *others = (runs[case] for case in cases)
    model = resolve(*cases[0].settings)[0].model
    values = units_of(saved.checkpoint, model)
    assert sum("layers.1.experts.3." in name for name in values) >= 2 * 3
    assert not any("layers.0.experts" in name for name in values)
    assert "output_layer.weight/exp_avg" in values
    for other in others:
        _same(units_of(other.checkpoint, model), values)
        _same_weights(other, saved)


def test_a_refresh_that_has_begun_goes_through_another_layout(runs: Runs[Case, Outcome]) -> None:
    saved, straight = (runs[_saved(*OPTIMIZERS["soap"], steps=steps)] for steps in (3, 4))
    there, back = (runs[case] for case in IN_PARTS)
    model = resolve(*TP2_DP2, *OPTIMIZERS["soap"])[0].model
    values = units_of(saved.checkpoint, model)
    assert any("/next_Q_" in name for name in values)
    _same(units_of(there.checkpoint, model), values)
    _same(units_of(back.checkpoint, model), units_of(straight.checkpoint, model))
    _same_weights(back, straight)


def test_weights_alone_are_taken_by_another_optimizer_splitting_and_layout(runs: Runs[Case, Outcome]) -> None:
    """Every master to the last bit, and of the state nothing: no step counted, every average zero or not there."""
    saved, there = runs[_saved(*OPTIMIZERS["soap"])], runs[WEIGHTS_ALONE]
    _same_weights(there, saved)
    model = resolve(*TP2_DP2, *OPTIMIZERS["soap"])[0].model
    before, now = units_of(saved.checkpoint, model), units_of(there.checkpoint, model)
    masters = {name for name in before if name.endswith("/master")}
    assert masters == {name for name in now if name.endswith("/master")}
    _same({name: now[name] for name in masters}, {name: before[name] for name in masters})
    assert not [name for name in now.keys() - masters if now[name].any()]
    assert not [
        name for name, value in manifest_of(there.checkpoint).scalars.items() if name.endswith("/step") and value
    ]


def test_strategies_read_each_others_checkpoints(runs: Runs[Case, Outcome]) -> None:
    """Megatron's own Muon keeps masters and momentum in fragments of other matrices than canzona's; values are one."""
    saved = runs[_saved(*STRATEGIES[0])]
    there, back, straight = (runs[case] for case in _by_another_strategy(*STRATEGIES))
    model = resolve(*TP2_DP2)[0].model
    _same(units_of(there.checkpoint, model), units_of(saved.checkpoint, model))
    _same_weights(there, saved)
    _same(units_of(back.checkpoint, model), units_of(straight.checkpoint, model))
    assert back.losses == straight.losses


def test_sc_and_canzona_share_the_state_of_soap(runs: Runs[Case, Outcome]) -> None:
    saved, there = runs[_saved(*OPTIMIZERS["soap"])], runs[SC_SOAP]
    model = resolve(*TP2_DP2, *OPTIMIZERS["soap"])[0].model
    _same(units_of(there.checkpoint, model), units_of(saved.checkpoint, model))
    _same_weights(there, saved)


COUNTING = """
import torch

class Counting(torch.optim.Optimizer):
    # Three places to keep state in: a tensor and a number of each matrix, and a number of all of them.
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(average=torch.zeros_like(p), sign=1.0, seen=torch.tensor(0.0))
                state["seen"] += 1
                state["sign"] = -state["sign"] * 1.5
                state["average"].lerp_(p.grad, 0.5)
                p.add_(state["average"], alpha=group["lr"] * group["k"] * state["sign"] / float(state["seen"]))
"""


def test_a_users_optimizer_goes_on_with_all_it_keeps(runs: Runs[Case, Outcome], own: tuple[str, ...]) -> None:
    _go_on(runs, _and_one(*own))


def test_shared_and_hosted_matrices_go_on_as_each_other(runs: Runs[Case, Outcome]) -> None:
    """Masters and momenta to the last bit, from whole matrices to fragments, to others, and back."""
    saved = runs[_saved(*OPTIMIZERS["muon"])]
    there, elsewhere, back = (runs[case] for case in MODES)
    model = resolve(*TP2_DP2)[0].model
    assert any(
        tensor.piece is not None for name, tensor in manifest_of(there.checkpoint).tensors.items() if ".gate/" in name
    )
    for read in (there, elsewhere):
        _same(units_of(read.checkpoint, model), units_of(saved.checkpoint, model))
        _same_weights(read, saved)
    assert back.losses == runs[ONE_MORE].losses
    _same(units_of(back.checkpoint, model), units_of(runs[ONE_MORE].checkpoint, model))


def test_shared_matrices_go_on_as_if_nothing_had_happened(runs: Runs[Case, Outcome]) -> None:
    _go_on(runs, _and_one(*SHARED_ALONE))


def test_muon_goes_on_with_matrices_split_otherwise(runs: Runs[Case, Outcome]) -> None:
    """Its state is of elements: what counts as one matrix may change."""
    saved, there, back = (runs[case] for case in (_saved(*OPTIMIZERS["muon"]), *SPLIT_OTHERWISE))
    model = resolve(*TP2_DP2)[0].model
    _same(units_of(there.checkpoint, model), units_of(saved.checkpoint, model))
    _same(units_of(back.checkpoint, model), units_of(saved.checkpoint, model))
    _same_weights(there, saved)


def test_shampoo_does_not_and_says_what_to_set(runs: Runs[Case, Outcome]) -> None:
    """Factors of a whole matrix are no factors of its parts."""
    shampoo = OPTIMIZERS["shampoo"]
    there = Case(settings=(*LAYOUTS["dp2"], *shampoo, "engine.splitting=fused"), start=_saved(*shampoo))
    with pytest.raises(AssertionError, match=r"engine\.splitting=split") as refused:
        runs[there]
    assert str(refused.value).count(CheckpointInvalid.__name__) >= 2, "one rank alone refused"


def test_a_checkpoint_of_chunks_is_that_of_every_layout(runs: Runs[Case, Outcome]) -> None:
    """Masters and state, by way of tensor-parallel ranks and back."""
    model = resolve(*OF_CHUNKS.settings)[0].model
    saved, there, again = (units_of(runs[case].checkpoint, model) for case in (OF_CHUNKS, READ_ELSEWHERE, CHUNKS_AGAIN))
    _same(there, saved)
    _same(again, saved)
    _same_weights(runs[CHUNKS_AGAIN], runs[OF_CHUNKS])


def test_a_checkpoint_is_as_large_as_what_it_has_to_keep(runs: Runs[Case, Outcome]) -> None:
    """fp32 master and momentum of every matrix, master and two moments of every other parameter, random states."""
    saved = runs[WIDER]
    shapes = {name: tensor.numel() for name, tensor in saved.weights.items()}
    matrices = sum(size for name, size in shapes.items() if "_proj" in name)
    rest = sum(size for name, size in shapes.items() if "_proj" not in name and "lm_head" not in name)
    on_disk = sum(file.stat().st_size for file in saved.checkpoint.iterdir())
    random = sum(
        np.prod(tensor.shape) * 8 for name, tensor in manifest_of(saved.checkpoint).tensors.items() if "random." in name
    )
    needed = 8 * matrices + 12 * rest
    assert needed < on_disk <= 1.02 * needed + random


def test_what_gram_form_doubted_stays_in_standard_form_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves out an update as on CUDA, and checks how a run that continues in another layout treats that matrix."""
    monkeypatch.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr("canzona_cli.core.optimizers.gram_form.DOUBT", -1.0)
    gram = resolve("gpus=1", "optimizer.form=gram")
    fused = resolve("gpus=1", "optimizer.form=gram", "engine.splitting=fused")
    case = Case(settings=("gpus=1", "optimizer.form=gram"), steps=1)

    def forms(trainee: Trainee) -> set[object]:
        return {trained["state"].get(DISTRUSTED) for trained in trainee.optimizer.matrices.state_dict().values()}

    def work(_: str, world: World) -> tuple[set[object], set[object], list[float]]:
        first, second = (assemble(gram[0], world, planned(*gram)) for _ in range(2))
        before = forms(first)
        train(gram[0], first, tmp_path, case, None)
        saved = forms(first)
        start = next(tmp_path.glob("step-*"))
        manifest = manifest_of(start)
        assert content_problems(start, manifest, gram[0].model) == []
        marked = next(name for name in manifest.scalars if name.endswith(f"/{DISTRUSTED}"))
        for forged in (10**18, STANDARD_STEPS + 1, 0, 1.5):
            of_ages = replace(manifest, scalars={**manifest.scalars, marked: forged})
            (problem,) = content_problems(start, of_ages, gram[0].model)
            assert f"{forged} is not a number of steps" in problem.reason
        train(gram[0], second, tmp_path, replace(case, steps=0), start)
        assert forms(second) == saved
        # Cut otherwise, as by another splitting, or in fragments by other ranks.
        third = assemble(fused[0], world, planned(*fused))
        with Reader(start, manifest_of(start), gram[0].model) as reader:
            assert reader.marks(["layers.1.gate", "layers.1.k"]) == {DISTRUSTED: STANDARD_STEPS}
            assert reader.marks([EMBEDDING]) == {}
        train(
            fused[0],
            third,
            tmp_path,
            replace(case, settings=(*case.settings, "engine.splitting=fused"), steps=0),
            start,
        )
        assert forms(third) == saved
        with monkeypatch.context() as never:
            never.delattr("canzona_cli.core.optimizers.muon.gram_newton_schulz")
            samples = RandomTokens(samples=8, seq_length=64, vocab_size=384)
            losses = [train_step(second, BatchStream(samples, world)).loss]
            assert forms(second) == {STANDARD_STEPS - 1}
            return before, saved, losses

    [(before, saved, losses)] = on_ranks({"": gram}, work)[""]
    assert (before, saved) == ({None}, {STANDARD_STEPS})
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("mode", ["hosted", "shared"])
def test_behind_a_doubt_a_run_goes_on_as_ever(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more steps in standard form and two in Gram form are equal to the last bit, on all ranks of a shared
    matrix."""
    monkeypatch.setattr(muon_facts, "STANDARD_STEPS", 2)
    settings = ("train.precision=fp32", "optimizer.form=gram", f"engine.mode={mode}")
    run = resolve("gpus=2", "parallel.tp=2", "model.num_layers=1", "train.micro_batch_size=8", *settings)
    case = Case(settings=(), steps=1)

    def marks(trainee: Trainee) -> set[object]:
        matrices = trainee.optimizer.matrices
        hosted = [saved["state"] for saved in matrices.state_dict().values()]
        return {state.get(DISTRUSTED) for state in (*hosted, *(one.state for one in matrices.fragments))}

    def work(_: str, world: World) -> list[Part]:
        gone, resumed = (assemble(run[0], world, planned(*run)) for _ in range(2))
        with monkeypatch.context() as doubting:
            for module in (gram_form, shared_rows):
                doubting.setattr(module, "DOUBT", -1.0)
            train(run[0], gone, tmp_path, case, None)
        assert marks(gone) == {2}
        train(run[0], resumed, tmp_path / "again", replace(case, steps=0), tmp_path / step_name(1))
        samples = RandomTokens(samples=32 * world.layout.global_batch_size, seq_length=64, vocab_size=384)
        found = []
        for trainee in (gone, resumed):
            batches = BatchStream(samples, world)
            assert [marks(trainee) for _ in range(4) if train_step(trainee, batches)] == [{1}, {None}, {None}, {None}]
            finish_gathering(trainee)
            found.append(part_of(trainee.chunks, world))
        return found

    for gone, resumed in on_ranks({"": run}, work)[""]:
        assert gone.fragments.keys() == resumed.fragments.keys()
        for name, one in gone.fragments.items():
            assert np.array_equal(one.values, resumed.fragments[name].values), name
