"""The promises of all algorithms: state that restarts, decompositions that may fail, refreshes spread evenly."""

import copy
from collections.abc import Callable

import pytest
import torch

from canzona_cli.core.optimizers.kronecker import KroneckerOptimizer
from canzona_cli.core.optimizers.matrix_optimizer import MatrixOptimizer, matmul_precision
from canzona_cli.optimizers import SOAP, Muon, NorMuon, Shampoo

from . import reference as reference

SHAPES = [(8, 12), (12, 8), (8, 12)]
Make = Callable[[list[torch.nn.Parameter]], MatrixOptimizer]
MAKES: dict[str, Make] = {
    "muon": lambda p: Muon(p, 0.02),
    "muon-stacked": lambda p: Muon(p, 0.02, stack=True),
    "normuon": lambda p: NorMuon(p, 0.02),
    "shampoo": lambda p: Shampoo(p, 0.02, precondition_frequency=2),
    "soap": lambda p: SOAP(p, 0.02, precondition_frequency=2),
    "shampoo-spread": lambda p: Shampoo(p, 0.02, precondition_frequency=2, roots="newton", spread=True),
    "soap-spread": lambda p: SOAP(p, 0.02, precondition_frequency=2, spread=True),
}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
Kind = type[Shampoo] | type[SOAP]
preconditioned = pytest.mark.parametrize("kind", [Shampoo, SOAP])


@every
def test_deleting_a_state_restarts_one_matrix_alone(make: Make) -> None:
    """Afterwards it moves as one that was never stepped; its neighbours as if nothing had happened."""
    grads = reference.gradients(SHAPES, 9)
    params, undisturbed = reference.weights(SHAPES), reference.weights(SHAPES)
    optimizer, other = make(params), make(undisturbed)
    reference.step_through(optimizer, params, grads[:3])
    reference.step_through(other, undisturbed, grads[:3])
    fresh = torch.nn.Parameter(params[1].detach().clone())
    del optimizer.state[params[1]]
    reference.step_through(optimizer, params, grads[3:])
    reference.step_through(other, undisturbed, grads[3:])
    reference.step_through(make([fresh]), [fresh], [[of_step[1]] for of_step in grads[3:]])
    torch.testing.assert_close(params[1], fresh)
    assert torch.equal(params[0], undisturbed[0])
    assert torch.equal(params[2], undisturbed[2])
    assert not torch.equal(params[1], undisturbed[1])


@pytest.mark.parametrize(
    "make",
    [
        *MAKES.values(),
        lambda p: SOAP(p, 0.02, max_preconditioner_dim=10),
        lambda p: Shampoo(p, 0.02, max_preconditioner_dim=5),
    ],
)
def test_an_optimizer_says_what_it_keeps(make: Make) -> None:
    """A checkpoint is compared with this before anything in it is used."""
    params = reference.weights(SHAPES)
    optimizer = make(params)
    reference.step_through(optimizer, params, reference.gradients(SHAPES, 2))
    for p in params:
        kept = {
            key: tuple(value.shape) if isinstance(value, torch.Tensor) else None
            for key, value in optimizer.state[p].items()
        }
        assert optimizer.state_shapes(p) == kept
        assert {value.dtype for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)} == {p.dtype}


@every
def test_plain_state_goes_through_a_checkpoint(make: Make) -> None:
    """Also between two parts of a refresh."""
    grads = reference.gradients(SHAPES, 8)
    params = reference.weights(SHAPES)
    optimizer = make(params)
    reference.step_through(optimizer, params, grads[:5])
    assert {type(value) for _, value in reference.states(optimizer)} <= {torch.Tensor, int}
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = make(copies)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reference.step_through(optimizer, params, grads[5:])
    reference.step_through(resumed, copies, grads[5:])
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))


@every
def test_a_matrix_without_gradient_is_skipped(make: Make) -> None:
    params = reference.weights(SHAPES)
    before = [p.detach().clone() for p in params]
    optimizer = make(params)
    params[0].grad = torch.randn(SHAPES[0])
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])
    assert list(optimizer.state) == [params[0]]


@every
def test_a_closure_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        make(reference.weights(SHAPES)).step(lambda: 0.0)  # type: ignore[arg-type]


def test_precision_is_put_back() -> None:
    matmul = torch.backends.cuda.matmul

    def parts() -> tuple[bool, bool]:
        return matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction

    before = torch.get_float32_matmul_precision(), parts()
    assert any(before[1])
    with matmul_precision("tf32"):
        assert matmul.fp32_precision == "tf32"
        assert not any(parts())
    assert (torch.get_float32_matmul_precision(), parts()) == before


@preconditioned
def test_a_failed_eigendecomposition_is_done_in_fp64(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.eigh

    def fails_in_fp32(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]
        values, vectors = real(x)
        return values, vectors

    grads = reference.gradients([(8, 8)], 3)
    usual, _ = reference.run(lambda p: kind(p, 0.02, eps=1e-2), [(8, 8)], grads)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_fp32)
    told: list[str] = []
    fallen, _ = reference.run(
        lambda p: kind(p, 0.02, eps=1e-2, on_fallback=lambda _, reason: told.append(reason)), [(8, 8)], grads
    )
    # Inverse roots and bases of eigenvalues that fp32 and fp64 see 1e-6 apart.
    torch.testing.assert_close(fallen[0], usual[0], rtol=1e-3, atol=1e-4)
    assert [reason.partition(" failed")[0] for reason in told] == [
        "the eigendecomposition of L",
        "the eigendecomposition of R",
    ]
    assert all("did not converge" in reason and reason.endswith("it was computed in fp64") for reason in told)


@preconditioned
@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_what_fails_altogether_keeps_the_previous_one(kind: Kind, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[torch.Tensor, str]] = []
    (p,) = reference.weights([(8, 10)])
    optimizer = kind([p], 0.02, precondition_frequency=2, on_fallback=lambda q, reason: told.append((q, reason)))
    grads = reference.gradients([(8, 10)], 5)
    reference.step_through(optimizer, [p], grads[:2])
    names = ("root_L", "root_R") if kind is Shampoo else ("Q_L", "Q_R")
    before = [optimizer.state[p][name].clone() for name in names]

    def failing(x: torch.Tensor) -> object:
        if how == "raises":
            raise torch.linalg.LinAlgError("did not converge")  # type: ignore[attr-defined]
        return torch.return_types.linalg_eigh((x[0] * torch.nan, x * torch.nan))  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    monkeypatch.setattr(torch.linalg, "qr", lambda x: (failing(x)[1], x))  # type: ignore[index]
    reference.step_through(optimizer, [p], grads[2:3])
    assert len(told) == 2
    assert all(q is p and reason.endswith("the previous one is kept") for q, reason in told)
    assert all(torch.equal(optimizer.state[p][name], old) for name, old in zip(names, before, strict=True))
    assert p.isfinite().all()
    monkeypatch.undo()
    reference.step_through(optimizer, [p], grads[3:])
    assert not torch.equal(optimizer.state[p][names[0]], before[0])
    assert len(told) == 2


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_a_part_that_fails_keeps_the_previous_basis(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third refresh, whose second part fails; the fourth goes on from the basis that was kept."""
    told: list[str] = []
    (p,) = reference.weights([(9, 9)])
    optimizer = SOAP(
        [p], 0.02, precondition_frequency=3, spread=True, on_fallback=lambda _, reason: told.append(reason)
    )
    grads = reference.gradients([(9, 9)], 12)
    reference.step_through(optimizer, [p], grads[:7])
    before = optimizer.state[p]["Q_L"].clone()

    def failing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if how == "raises":
            raise torch.linalg.LinAlgError("no")  # type: ignore[attr-defined]
        return x * torch.nan, x[: x.size(1)] * torch.nan

    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "qr", failing)
        reference.step_through(optimizer, [p], grads[7:8])
    reference.step_through(optimizer, [p], grads[8:9])
    assert len(told) == 2
    assert all("QR of" in reason and reason.endswith("the previous one is kept") for reason in told)
    torch.testing.assert_close(optimizer.state[p]["Q_L"], before, rtol=0, atol=1e-6)
    reference.step_through(optimizer, [p], grads[9:])
    assert len(told) == 2
    assert (optimizer.state[p]["Q_L"] - before).abs().max() > 1e-3
    torch.testing.assert_close(optimizer.state[p]["Q_L"].T @ optimizer.state[p]["Q_L"], torch.eye(9), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda p, s: SOAP(p, 0.02, precondition_frequency=3, spread=s),
        lambda p, s: Shampoo(p, 0.02, precondition_frequency=3, spread=s, roots="newton"),
    ],
)
def test_state_from_before_refreshes_were_spread_is_taken_over(
    make: Callable[[list[torch.nn.Parameter], bool], KroneckerOptimizer],
) -> None:
    """The change comes in the middle of a period: its refresh leaves squares as they are, the next one does not; in the
    other direction, a refresh that has begun is left out."""
    grads = reference.gradients([(9, 9)], 12)
    params = reference.weights([(9, 9)])
    old = make(params, False)
    reference.step_through(old, params, grads[:7])
    [p] = params
    tensors = {key: value for key, value in old.state[p].items() if isinstance(value, torch.Tensor)}
    now = make(params, True)
    now.state[p] = {**now.convert_state(p, tensors), "step": 7}
    assert now.state_shapes(p).keys() == now.state[p].keys()
    key = f"{now.squares}L"
    before = now.state[p][key].clone()
    reference.step_through(now, params, grads[7:9])
    torch.testing.assert_close(now.state[p][key], before, rtol=1e-5, atol=1e-6)
    reference.step_through(now, params, grads[9:])
    assert (now.state[p][key] - before).abs().max() > 1e-3
    assert old.convert_state(p, now.state[p]).keys() == old.state_shapes(p).keys()


@preconditioned
def test_failing_at_first_leaves_the_identity(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(x: torch.Tensor) -> None:
        raise torch.linalg.LinAlgError("no")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    (p,) = reference.weights([(6, 6)])
    (q,) = reference.weights([(6, 6)])
    grads = reference.gradients([(6, 6)], 1)
    reference.step_through(kind([p], 0.02), [p], grads)
    # What is left is Adam's size: Shampoo's on the gradient itself, SOAP's without rotation.
    adam = grads[0][0].sign() if kind is SOAP else grads[0][0] * 6 / grads[0][0].norm()
    torch.testing.assert_close(p.detach(), q.detach() * (1 - 0.002) - 0.02 * adam, rtol=1e-5, atol=1e-6)


@preconditioned
def test_settings_are_checked(kind: Kind) -> None:
    with pytest.raises(ValueError, match="precondition_frequency is 0"):
        kind(reference.weights(SHAPES), 0.02, precondition_frequency=0)
    with pytest.raises(ValueError, match=r"betas\[1\] is 1.0"):
        kind(reference.weights(SHAPES), 0.02, betas=(0.9, 1.0))
