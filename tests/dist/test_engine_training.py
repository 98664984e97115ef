"""Real training through the engine gives one model, however it is spread over ranks.

Three claims, from the exact to the approximate:

- A step's update is that of an ordinary optimizer on whole matrices with the gradients the ranks have reduced: to the
  last bit, over several steps; on one layout for each optimizer at default settings, too.
- Where layouts add up gradients in the same order, all weights are the same to the last bit.
- Else they differ as much as one rank differs from itself when it adds up its micro-batches in another order, and no
  more: optimizers amplify rounding, and how much is a property of theirs. Muon hardly does. Shampoo's inverse roots
  multiply directions at the noise floor of a factor (sqrt(n) times fp32's epsilon) by up to its -1/4th power, 28 a
  side; it is compared with roots renewed at every step, because those of one gradient fit few others (renewed at every
  tenth, it differed by 0.7 learning rates once). SOAP's bases are not even defined by the gradients: where a factor's
  rank is short of its length, or eigenvalues are close, they are whatever rounding makes of them, and Adam's step
  depends on its basis. It is compared where every factor has full rank (sides of 64, the model's width) and with an
  epsilon that lets small directions count for little; at default settings two runs of it part within ten steps.
"""

import pytest

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import Layout
from tests.dist import jobs
from tests.dist.jobs import Runs, ranks_of
from tests.dist.synthetic import FARTHER, FARTHEST
from tests.dist.trained import (
    FIXED,
    GRAM,
    LAYOUTS,
    LR,
    MODES,
    OPTIMIZERS,
    ROUNDING,
    deviation,
    different,
    inexactness,
    one_rank,
    replay,
    run_trainings,
)

STEPS = {"muon": 3, "soap": 4}
"""SOAP's bases are renewed at the third again."""
EXACT = 2
"""Steps where bits are compared."""
SETTINGS = OPTIMIZERS | {"soap": (*OPTIMIZERS["soap"], "optimizer.precondition_frequency=2")}
# Fewer micro-batches: ranks that share every matrix, or pass on every activation, spend most of their time waiting.
MESHES = LAYOUTS | {"tp2 pp2": (*LAYOUTS["tp2 pp2"], "train.micro_batch_size=4")}

NORMAL = [("muon", "tp2 pp2"), ("soap", "tp2 dp2")]

Run = tuple[tuple[str, ...], int]
"""Settings, and how many steps are made with them."""


def _run(*settings: str, steps: int) -> Run:
    return settings, steps


def _there(optimizer: str, where: str) -> Run:
    return _run(*SETTINGS[optimizer], *MESHES[where], steps=STEPS[optimizer])


def _one_rank(optimizer: str, where: str) -> tuple[Run, Run]:
    """A run on one rank with the layout's global batch, and the same with the batch cut in other micro-batches."""
    settings, steps = (*SETTINGS[optimizer], *one_rank(where)), STEPS[optimizer]
    return _run(*settings, "train.micro_batch_size=4", steps=steps), _run(*settings, steps=steps)


# Clipping multiplies by a norm whose sum of squares is cut over ranks, so it is off wherever bits are compared.
UNCLIPPED = ("optimizer=muon", "optimizer.clip_grad=0")
TWO = ("gpus=1", "train.global_batch_size=4", "train.micro_batch_size=2", *UNCLIPPED)
"""One rank, two micro-batches."""
PRECISIONS = {
    "fp32": (),
    "bf16": ("train.precision=bf16",),
    "bf16 reduced in bf16": ("train.precision=bf16", "train.grad_reduce_dtype=bf16"),
}
USUALLY = [("fp32", "reduce"), ("bf16", "ring"), ("bf16 reduced in bf16", "reduce")]
"""Each of both once."""
ON_ONE = {name: _run(*TWO, *precision, steps=EXACT) for name, precision in PRECISIONS.items()}
ON_TWO = {
    (reduction, name): _run(*TWO, "gpus=2", f"engine.reduction={reduction}", *PRECISIONS[name], steps=EXACT)
    for name, reduction in USUALLY
}
UNTIED = {
    where: _run(*TWO, "model.tied_embeddings=false", *layout, steps=EXACT)
    for where, layout in {
        "one": (),
        "pp2": ("gpus=2", "parallel.pp=2"),
        "pp2 dp2": ("gpus=4", "parallel.pp=2"),
    }.items()
}
TIED = _run(*TWO, "gpus=2", "parallel.pp=2", steps=EXACT)
USUAL, *OTHERWISE = (
    _run(*UNCLIPPED, *LAYOUTS["tp2 dp2"], "model.num_layers=1", *settings, steps=EXACT)
    for settings in (
        (),
        ("engine=paper", "engine.reduction=ring"),
        ("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"),
        ("train.recompute=full",),
        ("train.recompute=selective",),
    )
)
"""The cases that need a real backward and forward pass; `test_engine_exact` compares plans without."""
SHARING = _run(*MODES["shared"], *MESHES["tp2 dp2"], steps=STEPS["muon"])
IN_GRAM_FORM = _run(*GRAM, *one_rank("tp2 dp2"), steps=STEPS["muon"])


def _resolve(*overrides: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *overrides)


RUNS = Runs(
    [
        *(run for case in NORMAL for run in (*_one_rank(*case), _there(*case))),
        *ON_ONE.values(),
        *ON_TWO.values(),
        *UNTIED.values(),
        *(TIED, USUAL, *OTHERWISE, SHARING, IN_GRAM_FORM),
    ],
    lambda run: ranks_of(run[0]),
    lambda runs: run_trainings([(*_resolve(*settings), steps) for settings, steps in runs]),
)


@pytest.mark.parametrize(("optimizer", "where"), NORMAL)
def test_steps_differ_from_one_rank_by_rounding(optimizer: str, where: str) -> None:
    one, again = (RUNS[run] for run in _one_rank(optimizer, where))
    found = RUNS[_there(optimizer, where)]
    assert min(one.grad_norms) > 0.25, "clipping is not active"
    assert different(found.before, one.before) == []
    assert 0 < deviation(again.after, one.after, LR) < ROUNDING[optimizer]
    assert deviation(found.after, one.after, LR) < ROUNDING[optimizer]
    assert found.losses == pytest.approx(one.losses, abs=1e-5)
    assert deviation(found.before, found.after, LR) > 0.1 * STEPS[optimizer]


@pytest.mark.parametrize(("optimizer", "where"), NORMAL)
def test_the_first_step_has_the_gradients_of_one_rank(optimizer: str, where: str) -> None:
    """Reduced, assembled and clipped; before any optimizer amplifies. Sums of 512 tokens and 192 columns in fp32, in
    another order: seen 1e-6 of a matrix's gradient."""
    one = RUNS[_one_rank(optimizer, where)[0]]
    found = RUNS[_there(optimizer, where)]
    assert len(one.gradients[0]) == 14
    for name, gradient in one.gradients[0].items():
        assert (found.gradients[0][name] - gradient).norm() < 1e-5 * gradient.norm(), name
    assert found.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=1e-6)


@pytest.mark.parametrize(("optimizer", "where"), NORMAL)
def test_matrices_are_what_an_ordinary_optimizer_makes_of_their_gradients(optimizer: str, where: str) -> None:
    """The weights are equal to the last bit after several real steps: nothing is lost on the way to hosts and back."""
    run = _there(optimizer, where)
    found = RUNS[run]
    expected = replay(found, _resolve(*run[0])[0])
    assert len(expected) == 14
    assert different(found.after, expected) == []


def test_shared_matrices_are_what_one_process_makes_of_their_gradients_and_another_order_of_sums() -> None:
    found, one = RUNS[SHARING], RUNS[IN_GRAM_FORM]
    assert len(found.shared) == 14
    assert found.fallbacks == one.fallbacks == 0
    assert deviation(found.after, one.after, LR) < ROUNDING["muon"]
    together, most = inexactness(found, _resolve(*SHARING[0])[0])
    assert together <= FARTHER
    assert most <= FARTHEST


@pytest.mark.parametrize(("reduction", "precision"), ON_TWO)
def test_two_ranks_are_bitwise_one_rank_with_two_micro_batches(reduction: str, precision: str) -> None:
    """Two numbers have one sum, and halving them first is exact."""
    one, two = RUNS[ON_ONE[precision]], RUNS[ON_TWO[reduction, precision]]
    assert different(two.after, one.after) == []
    assert two.losses == one.losses
    assert all(different(a, b) == [] for a, b in zip(two.gradients, one.gradients, strict=True))


@pytest.mark.parametrize("where", ["pp2", "pp2 dp2"])
def test_stages_are_bitwise_one_rank(where: str) -> None:
    """A stage computes what one rank would alone, also with an output layer of its own."""
    one, found = RUNS[UNTIED["one"]], RUNS[UNTIED[where]]
    assert different(found.after, one.after) == []
    assert found.losses == one.losses


def test_tied_embeddings_over_stages_differ_by_rounding() -> None:
    """Their two gradients are each added up over micro-batches before they meet, and on one rank after."""
    one, found = RUNS[ON_ONE["fp32"]], RUNS[TIED]
    assert different(found.gradients[0], one.gradients[0]) == []
    assert 0 < deviation(found.after, one.after, LR) < ROUNDING["muon"]


@pytest.mark.parametrize("run", OTHERWISE, ids=lambda run: run[0][-1])
def test_how_buckets_travel_what_overlaps_and_what_is_computed_again_changes_no_bit(run: Run) -> None:
    """Each of two data-parallel ranks accumulates two micro-batches; every sum of two ranks is the same."""
    usual, found = RUNS[USUAL], RUNS[run]
    assert different(found.after, usual.after) == []
    assert found.losses == usual.losses


def test_gradients_reduced_in_bf16_are_rounded_and_no_worse() -> None:
    """bf16 has 2^-9 of rounding; a step of orthogonal matrices follows its gradient's direction."""
    exact, rounded = RUNS[ON_TWO["ring", "bf16"]], RUNS[ON_TWO["reduce", "bf16 reduced in bf16"]]
    for name, gradient in exact.gradients[0].items():
        error = (rounded.gradients[0][name] - gradient).norm() / gradient.norm()
        assert 0 < error < 2**-7, name
    assert rounded.losses == pytest.approx(exact.losses, abs=0.02)
