"""The engine moves fragments and nothing else: fp32 weights equal, to the last bit, an ordinary optimizer's.

Every layout gets the same gradients, each matrix whole is updated by one ordinary optimizer on one rank, so there is no
sum whose order could differ; clipping is off because the global norm is one. Of shared matrices sums over fragments are
added up in another order than a single process has: they are compared with the exact update, in fp64.
"""

from collections.abc import Sequence
from functools import cache, partial

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as EmergingMuon

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.update import algorithm_of, form_of
from canzona_cli.core.optimizers.muon import Muon
from canzona_cli.core.setup import Form, Layout
from tests.dist import jobs
from tests.dist.jobs import EXPERTS, SMALL, Runs, planned
from tests.dist.synthetic import (
    FARTHER,
    FARTHEST,
    Case,
    Result,
    exact_muon,
    farther,
    run_engine,
    run_engines,
    single_process,
    whole_gradients,
)
from tests.dist.trained import ordinary
from tests.dist.whole import Weights

STEPS = 3
"""Factors are renewed at every other, twice in all."""
TWO = 2
"""The steps of optimizers that do the same in each: the second begins with the momenta of the first."""
FIXED = (
    *SMALL,
    "model.num_layers=1",
    "train.precision=fp32",
    "optimizer.clip_grad=0",
    "optimizer.lr=0.01",
    "optimizer.weight_decay=0.1",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
    "engine.strategy=canzona",
)
LAYOUTS = {
    "one rank": ("gpus=1",),
    "tp1 dp4": ("gpus=4", "parallel.tp=1", "parallel.pp=1"),
    "tp2 dp2": ("gpus=4", "parallel.tp=2"),
    "tp4 dp1": ("gpus=4", "parallel.tp=4"),
    "dp3": ("gpus=3", "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=12"),
    "tp2": ("gpus=2", "parallel.tp=2"),
    "tp2 pp2 dp2": ("gpus=8", "parallel.tp=2", "parallel.pp=2", "model.num_layers=2"),
    # 7 layers in chunks of 2, 2, 2 and 1.
    "pp2 vpp2, uneven": ("gpus=4", "parallel.pp=2", "parallel.vpp=2", "model.num_layers=7"),
    # Two ranks have the same experts, or one has them alone.
    "dp4 ep2": ("gpus=4", "parallel.ep=2", *EXPERTS),
    "tp2 ep4": ("gpus=4", "parallel.tp=2", "parallel.ep=4", *EXPERTS),
}
Run = tuple[tuple[str, ...], int]
"""Settings, and how many steps are made with them."""
OFTEN = ("optimizer.stagger=false", "optimizer.precondition_frequency=2")
WHOLE: dict[str, Run] = {
    "muon": (("optimizer=muon",), TWO),
    "normuon": (("optimizer=normuon",), TWO),
    "shampoo": (("optimizer=shampoo", *OFTEN), STEPS),
    "soap": (("optimizer=soap", *OFTEN), STEPS),
}
SPLITTINGS: dict[str, Run] = {
    splitting: (("optimizer=muon", f"engine.splitting={splitting}"), TWO)
    for splitting in ("fused", "qkv", "split", "per_head")
}
WHO_AND_WHEN: list[Run] = [
    (("optimizer=muon", *settings), TWO)
    for settings in (
        ("engine.strategy=asc", "engine.reduction=ring"),
        ("engine.strategy=paper", "engine.alpha=0.5", "engine.c_max_mib=0.05", "engine.reduction=ring"),
        ("engine.c_max_mib=0.05",),
    )
]
STAGGERED, AT_ONCE = (
    (("optimizer=shampoo", "optimizer.precondition_frequency=3", how), 7)
    for how in ("optimizer.stagger=true", "optimizer.stagger=false")
)
GRAM = ("optimizer=muon", "optimizer.form=gram")
HOSTED: Run = ((*GRAM, "engine.mode=hosted"), TWO)
SHARED: Run = ((*GRAM, "engine.mode=shared"), TWO)
AUTO: Run = ((*GRAM, "engine.mode=auto"), TWO)
SHARED_APART: Run = ((*SHARED[0], "engine.c_max_mib=0.05"), TWO)
SHARED_FUSED: Run = ((*SHARED[0], "engine.splitting=fused"), TWO)
LOW: Run = ((*SHARED[0], "train.precision=bf16"), TWO)
BF16: Run = (("optimizer=muon", "train.precision=bf16"), TWO)
SENT_IN_BF16: Run = (("optimizer=muon", "engine.exchange_dtype=bf16"), TWO)
COMPARED: dict[str, list[Run]] = {
    "one rank": [*SPLITTINGS.values(), STAGGERED, AT_ONCE],
    "tp1 dp4": [SHARED],
    "tp2 dp2": [
        *(*WHOLE.values(), SPLITTINGS["per_head"], *WHO_AND_WHEN),
        *(BF16, HOSTED, SHARED, SHARED_APART, AUTO, LOW, AT_ONCE, STAGGERED),
    ],
    "tp4 dp1": [SPLITTINGS["fused"], SPLITTINGS["split"], SENT_IN_BF16, SHARED_FUSED],
    "tp2": [SHARED, SPLITTINGS["qkv"]],
    "dp3": [WHOLE["shampoo"]],
    "tp2 pp2 dp2": [WHOLE["soap"]],
    "pp2 vpp2, uneven": [WHOLE["muon"]],
    "dp4 ep2": [WHOLE["muon"]],
    "tp2 ep4": [WHOLE["shampoo"]],
}
"""All that the tests below compare, by the ranks it runs on; `tests.dist.fuzz` draws more."""


def _run(cases: Sequence[tuple[str, Run]]) -> list[Result]:
    made = [(*_resolve(*settings, *LAYOUTS[where]), steps) for where, (settings, steps) in cases]
    return run_engines([Case(config=config, layout=layout, steps=steps) for config, layout, steps in made])


RUNS = Runs(((where, run) for where, runs in COMPARED.items() for run in runs), lambda case: case[0], _run)


def _compared(runs: dict[str, Run]) -> list[tuple[str, str]]:
    """Returns the names of runs with the layouts of several ranks in which they are compared."""
    return [
        (name, where)
        for name, run in runs.items()
        for where in LAYOUTS
        if where != "one rank" and run in COMPARED[where]
    ]


def _resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *overrides)


def _different(first: Weights, second: Weights, names: Weights) -> list[str]:
    return [name for name in names if not torch.equal(first[name], second[name])]


def _model(where: str) -> tuple[str, ...]:
    return tuple(setting for setting in LAYOUTS[where] if setting.startswith("model."))


@cache
def _single_process(name: str, model: tuple[str, ...] = ()) -> Weights:
    """Returns the weights that an optimizer reaches in one process without the engine."""
    settings, steps = run = WHOLE[name]
    before = next(RUNS[where, run].before for where, runs in COMPARED.items() if run in runs and _model(where) == model)
    config, _ = _resolve(*settings, *LAYOUTS["one rank"], *model)
    return single_process(before, config, steps, partial(ordinary, config))


@pytest.mark.parametrize(("name", "where"), _compared(WHOLE))
def test_steps_equal_a_single_process_bitwise(name: str, where: str) -> None:
    found, expected = RUNS[where, WHOLE[name]], _single_process(name, _model(where))
    assert _different(found.after, expected, expected) == []
    assert all(not torch.equal(found.before[key], expected[key]) for key in expected), "nothing was updated"


def test_muon_is_that_of_emerging_optimizers() -> None:
    """Not ours: NVIDIA's on whole matrices. Rounding of products in another order, through an iteration that makes
    singular values of about 1e-3 into 1: seen 2e-6 of a step of 0.2 * sqrt(192) * lr; asserted 1e-4."""
    found = RUNS["tp2 dp2", WHOLE["muon"]]
    config, _ = _resolve("optimizer=muon", *LAYOUTS["tp2 dp2"])
    theirs = single_process(
        found.before, config, WHOLE["muon"][1],
        lambda params: EmergingMuon(
            params, lr=0.01, weight_decay=0.1, momentum=0.95, nesterov=True, num_ns_steps=5, coefficient_type="quintic",
            scale_mode="spectral", extra_scale_factor=0.2, fp32_matmul_prec="highest",
        ),
    )  # fmt: skip
    worst = max((found.after[name] - theirs[name]).abs().max().item() for name in theirs)
    assert worst < 1e-4 * 0.01


def _on_one_rank(splitting: str) -> Weights:
    return RUNS["one rank", SPLITTINGS[splitting]].after


@pytest.mark.parametrize(("splitting", "where"), _compared(SPLITTINGS))
def test_every_splitting_gives_the_same_in_every_layout(splitting: str, where: str) -> None:
    one = _on_one_rank(splitting)
    assert _different(one, RUNS[where, SPLITTINGS[splitting]].after, one) == []


def test_splittings_differ() -> None:
    """The test above compares four different splittings, not one under four names."""
    ends = [_on_one_rank(splitting) for splitting in SPLITTINGS]
    for number, first in enumerate(ends):
        for second in ends[number + 1 :]:
            assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("run", WHO_AND_WHEN, ids=lambda run: " ".join(run[0][1:]))
def test_who_updates_what_and_when_changes_nothing(run: Run) -> None:
    one = _on_one_rank("split")
    assert _different(one, RUNS["tp2 dp2", run].after, one) == []


def test_refreshes_do_not_depend_on_the_layout() -> None:
    """Refreshes in parts or as a whole are bitwise an ordinary optimizer's; in parts, the third refresh is used
    later."""
    one, in_parts = (RUNS["one rank", run].after for run in (AT_ONCE, STAGGERED))
    assert _different(one, in_parts, one) != []
    for run, after in ((AT_ONCE, one), (STAGGERED, in_parts)):
        assert _different(after, RUNS["tp2 dp2", run].after, after) == []
        config, _ = _resolve(*run[0], *LAYOUTS["one rank"])
        single = single_process(RUNS["one rank", run].before, config, run[1], partial(ordinary, config))
        assert _different(after, single, single) == []


@cache
def _exact() -> Weights:
    """The steps in fp64."""
    before = RUNS["tp2 dp2", SHARED].before
    config, _ = _resolve(*SHARED[0], *LAYOUTS["one rank"])
    return exact_muon(before, (whole_gradients(before, config.model, step) for step in range(TWO)), 0.01)


@cache
def _in_gram_form() -> Weights:
    """Returns the weights that the Gram form reaches in one process."""
    config, _ = _resolve(*SHARED[0], *LAYOUTS["one rank"])
    return single_process(
        RUNS["tp2 dp2", SHARED].before, config, TWO,
        lambda params: Muon(params, 0.01, weight_decay=0.1, precision="fp32", form="gram"),
    )  # fmt: skip


def _planned_shares(where: str, run: Run) -> set[str]:
    plan = planned(*_resolve(*run[0], *LAYOUTS[where]))
    assert plan is not None
    return {plan.matrices[index].kind for index in plan.assignment.shared_costs}


@pytest.mark.parametrize("where", [where for _, where in _compared({"shared": SHARED})])
def test_shared_matrices_are_as_exact_as_those_of_one_process(where: str) -> None:
    tp1 = where in ("dp3", "tp1 dp4")
    assert _planned_shares(where, SHARED) == (set() if tp1 else {"q", "k", "v", "proj", "gate", "up", "down"})
    found, exact, single = RUNS[where, SHARED].after, _exact(), _in_gram_form()
    assert tp1 == all(torch.equal(found[name], single[name]) for name in exact)
    _as_near(found)


def _as_near(found: Weights) -> None:
    """Asserts that weights are about as far from the exact ones as those of one process are."""
    all_together, most = farther(found, _in_gram_form(), _exact())
    assert most <= FARTHEST
    assert all_together <= FARTHER


def test_hosted_is_bitwise_what_one_process_comes_to_in_gram_form() -> None:
    """Nothing is shared here, because nothing may be or because nothing is cut."""
    expected = _in_gram_form()
    for where, run in (("tp2 dp2", HOSTED), ("tp1 dp4", SHARED)):
        assert _planned_shares(where, run) == set()
        assert _different(RUNS[where, run].after, expected, expected) == []


def test_who_owns_and_hosts_shared_matrices_and_when_changes_nothing() -> None:
    """Gram matrices are added up in the ranks' order."""
    one = RUNS["tp2", SHARED].after
    assert _different(one, RUNS["tp2 dp2", SHARED_APART].after, one) == []


def test_auto_is_one_of_both_for_each_matrix() -> None:
    _as_near(RUNS["tp2 dp2", AUTO].after)


def test_fused_matrices_are_shared_too() -> None:
    """[gate; up] and [q, k, v] are cut in parts: a fragment's rows are some of each. Against one rank, whose matrices
    are whole; a step being 0.2 sqrt(384) 0.01."""
    assert _planned_shares("tp4 dp1", SHARED_FUSED) == {"qkv", "fc1", "proj", "down"}
    found, one = RUNS["tp4 dp1", SHARED_FUSED].after, RUNS["one rank", SPLITTINGS["fused"]].after
    worst = max((found[name] - one[name]).abs().max().item() for name in _exact())
    assert 0 < worst < 1e-4 * 0.01


def test_shared_masters_in_fp32_are_rounded_once_for_bf16_weights() -> None:
    """Products in bf16: as near to the exact update as those of hosted matrices are, by the weights' own rounding."""
    exact, hosted, found = _exact(), RUNS["tp2 dp2", HOSTED].before, RUNS["tp2 dp2", LOW].after
    for name, right in exact.items():
        moved = (right - hosted[name].double()).norm()
        rounding = right.norm() * 2.0**-8
        assert (found[name].double() - right).norm() <= 0.05 * moved + rounding, name


def test_bf16_weights_are_the_rounded_masters() -> None:
    """A host's master is fp32 all along while weights are bf16: the weights are its rounding, never rounded twice."""
    found = RUNS["tp2 dp2", BF16]
    config, _ = _resolve(*BF16[0], *LAYOUTS["tp2 dp2"])
    expected = single_process(
        found.before, config, BF16[1],
        lambda params: Muon(params, 0.01, weight_decay=0.1, precision="bf16"),
    )  # fmt: skip
    rounded = {name: weight.bfloat16().float() for name, weight in expected.items()}
    assert _different(found.after, rounded, rounded) == []


def test_a_profile_that_multiplies_bf16_in_fp32_has_the_gram_form_executed() -> None:
    """Bitwise what one process comes to that has the plan's forms; in standard form those in Gram form differ."""
    settings = ("train.precision=bf16", "cluster.bf16_in_fp32=true", "gpus=2")
    wide = ("model.num_layers=1", "model.hidden_size=256", "model.ffn_hidden_size=768")
    config, layout = _resolve("optimizer=muon", *settings, *wide)
    how = algorithm_of(config.setup)
    assert how.form == "auto"
    found = run_engine(config, layout, 2)

    def after(form: Form | dict[tuple[int, int], Form]) -> Weights:
        weights = single_process(
            found.before, config, 2,
            lambda params: Muon(params, 0.01, weight_decay=0.1, precision="bf16", form=form),
        )  # fmt: skip
        return {name: weight.bfloat16().float() for name, weight in weights.items()}

    standard = after("standard")
    shapes = {name: (weight.size(0), weight.size(1)) for name, weight in standard.items()}
    forms = {shape: form_of(how, *shape, config.cluster) for shape in shapes.values()}
    planned_so = after(forms)
    assert _different(found.after, planned_so, planned_so) == []
    gram = [name for name, shape in shapes.items() if forms[shape] == "gram"]
    assert _different(found.after, standard, standard) == gram
    assert {name.split(".")[-2] for name in gram} == {"gate_proj", "up_proj", "down_proj"}


def test_gradients_in_bf16_travel_rounded_once() -> None:
    found, exact = RUNS["tp4 dp1", SENT_IN_BF16], RUNS["tp4 dp1", SPLITTINGS["split"]]
    names = _single_process("muon")
    assert all(not torch.equal(found.after[name], exact.after[name]) for name in names)
    # Steps of orthogonal matrices whose inputs differ by bf16's 2^-9: far from a step's own size.
    moved = max((exact.after[name] - exact.before[name]).abs().max().item() for name in names)
    worst = max((exact.after[name] - found.after[name]).abs().max().item() for name in names)
    assert 0 < worst < 0.1 * moved
