"""The comparisons that verify fast paths on this machine's GPU: updates with the fast path against updates without it.
What agrees may go into `cluster.verified`.

Sharing a matrix takes two GPUs; the part `shared` of the GPU check trains on them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch

from canzona_cli.bench.calibrate.profile import FastPathCheck
from canzona_cli.core.optimizers import muon
from canzona_cli.core.optimizers.graphs import Replayed
from canzona_cli.core.optimizers.muon import Muon
from canzona_cli.core.setup import Form

Compared = Literal["gram", "graphs", "fused"]
"""The fast paths that a single GPU can verify."""

SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "cuda": ((1024, 4096), (4096, 1024), (2048, 2048)),
    "cpu": ((64, 160), (160, 64), (96, 96)),
}
"""The shapes of the compared matrices, by type of device: wide, tall and square."""
STEPS = 6
"""The number of updates that are compared between a CUDA graph and separate kernels."""
GRAM_ERROR = 1.0
"""The largest accepted error of the Gram form in fp16, relative to that of the standard form in bf16. Tests, with fp16
on CPUs, find at most 0.7 (`test_gram_form_fp16.py`). In bf16, which CPUs use, there is no limit: plans
do not choose the Gram form there (`costs.update.gram_holds`)."""
ROUNDED = 2.0**-10
"""The largest accepted relative distance between an update rounded to fp16, at most 2^-11, and one that is not. The
other half is for sums in another order."""
_LR, _DECAY = 0.02, 0.1


def compare_all(device: torch.device, alive: Callable[[], None]) -> tuple[FastPathCheck, ...]:
    """Compares every fast path that a single GPU can verify; nothing on a CPU, where plans may choose all of them.

    Args:
        alive: Called before each comparison.
    """
    checks = []
    for path in get_args(Compared) if device.type == "cuda" else ():
        alive()
        checks.append(compare(path, device))
    return tuple(checks)


def compare(path: Compared, device: torch.device) -> FastPathCheck:
    """Compares updates with a fast path with updates without it. An error that the fast path raises is an outcome, not
    an error."""
    comparisons: dict[Compared, Callable[[torch.device], tuple[bool, str]]] = {
        "gram": _compare_gram,
        "graphs": _compare_graphs,
        "fused": _compare_fused,
    }
    try:
        agrees, summary = comparisons[path](device)
    except Exception as error:  # a driver or a library that does not support the path may raise anything
        first_line = str(error).partition("\n")[0]
        agrees, summary = False, f"{type(error).__name__}: {first_line}"[:300]
    return FastPathCheck(path=path, agrees=agrees, summary=summary)


def _compare_gram(device: torch.device) -> tuple[bool, str]:
    """Compares the Gram form, and the standard form in bf16, with the standard form in fp32. Every update must be
    trusted, except one that is not finite, which must leave the weight as it is, up to its decay."""
    worst = 0.0
    for shape in SHAPES[device.type]:
        for gradient in _gradients(shape, device):
            exact, standard, gram = (
                _Updated(shape, device, form=form, precision=precision).step(gradient)
                for form, precision in _FORMS_COMPARED
            )
            errors = [_distance(updated.weight, exact.weight) for updated in (gram, standard)]
            worst = max(worst, errors[0] / errors[1]) if math.isfinite(errors[0]) else math.inf
            if gram.untrusted:
                return False, f"an update of {shape[0]} x {shape[1]} was not trusted"
    bound = GRAM_ERROR if gram.optimizer.dtype is torch.float16 else math.inf
    decays = all(_decays(shape, device, fused=False) for shape in SHAPES[device.type])
    summary = f"errors at most {worst:.2f} of the standard form's (limit {bound:g})"
    summary += "" if decays else "; an update that is not finite changes the weight"
    return worst <= bound and decays, summary


_FORMS_COMPARED: tuple[tuple[Form, Literal["bf16", "fp32"]], ...] = (
    ("standard", "fp32"),
    ("standard", "bf16"),
    ("gram", "bf16"),
)
"""The reference, the usual update, and the fast path."""


def _compare_fused(device: torch.device) -> tuple[bool, str]:
    """Compares updates in Gram form whose weights decay and move in one kernel with those that take two passes."""
    worst = 0.0
    for shape in SHAPES[device.type]:
        for gradient in _gradients(shape, device):
            fused, plain = (_Updated(shape, device, fused=fused).step(gradient) for fused in (True, False))
            worst = max(worst, apart) if math.isfinite(apart := _distance(fused.weight, plain.weight)) else math.inf
    decays = all(_decays(shape, device, fused=True) for shape in SHAPES[device.type])
    summary = f"{worst:.2g} from two passes (limit {ROUNDED:.2g})"
    summary += "" if decays else "; an update that is not finite changes the weight"
    return worst <= ROUNDED and decays, summary


def _compare_graphs(device: torch.device) -> tuple[bool, str]:
    """Compares updates replayed as CUDA graphs with updates kernel by kernel, bit by bit, in both forms and for two
    optimizers in succession. The current stream must not change."""
    on_gpu = _as_on_gpus(device)
    stream = torch.cuda.current_stream() if on_gpu else None
    problems: list[str] = []
    for form in get_args(Form):
        for _ in range(2):  # the first optimizer and its graphs are gone before the second is made
            (eager, _), (replayed, captures) = (_trained(device, form=form, graph=graph) for graph in (False, True))
            if not all(map(torch.equal, eager, replayed)):
                problems.append(f"weights differ in {form} form")
            if captures != int(on_gpu):
                problems.append(f"{captures} graphs were captured in {form} form")
    if stream != (torch.cuda.current_stream() if on_gpu else None):
        problems.append("the current stream has changed")
    if Replayed.refusal:
        problems.append(Replayed.refusal)
    return not problems, "; ".join(problems) or "weights are equal to those of updates without graphs"


class _Updated:
    """A matrix with its optimizer, from a weight of zeros: the weight is then its update."""

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        form: Form = "gram",
        precision: Literal["bf16", "fp32"] = "bf16",
        fused: bool = False,
        weight: float = 0.0,
    ) -> None:
        self._matrix = torch.nn.Parameter(torch.full(shape, weight, device=device))
        self.optimizer = Muon([self._matrix], _LR, weight_decay=_DECAY, form=form, precision=precision, fused=fused)

    def step(self, gradient: torch.Tensor) -> "_Updated":
        self._matrix.grad = gradient.clone()
        self.optimizer.step()
        return self

    @property
    def weight(self) -> torch.Tensor:
        return self._matrix.detach()

    @property
    def untrusted(self) -> bool:
        """True if the GPU did not trust the last update. A CPU repeats such an update in standard form."""
        count = self.optimizer.untrusted_count()
        return count is not None and int(count) > 0


def _decays(shape: tuple[int, int], device: torch.device, *, fused: bool) -> bool:
    """Returns True if an update that is not finite leaves the weight as it is, up to its decay. A CPU repeats it in
    standard form instead, so there is nothing to test there."""
    if not _as_on_gpus(device):
        return True
    updated = _Updated(shape, device, fused=fused, weight=1.0).step(torch.full(shape, math.nan, device=device))
    expected = torch.full_like(updated.weight, 1 - _LR * _DECAY)
    return updated.untrusted and torch.allclose(updated.weight, expected, rtol=1e-6, atol=0)


def _as_on_gpus(device: torch.device) -> bool:
    """Returns True if updates on the device leave trust to the device, as on GPUs."""
    return not muon.runs_in_blocks(torch.empty(0, device=device))


def _trained(device: torch.device, *, form: Form, graph: bool) -> tuple[list[torch.Tensor], int]:
    """Updates a few matrices `STEPS` times with a changing learning rate; returns the weights and the number of
    captured graphs."""
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in SHAPES[device.type]]
    for matrix in matrices:
        matrix.grad = torch.empty_like(matrix)
    optimizer = Muon(matrices, _LR, weight_decay=_DECAY, form=form, graph=graph)
    for step in range(STEPS):
        for matrix in matrices:
            assert matrix.grad is not None
            matrix.grad.normal_()
        optimizer.param_groups[0]["lr"] = _LR / (step + 1)
        optimizer.step()
    return [matrix.detach() for matrix in matrices], optimizer.captures


def _gradients(shape: tuple[int, int], device: torch.device) -> Iterator[torch.Tensor]:
    """Yields gradients with singular values of about one size, and over four decades, as momentum in training has."""
    torch.manual_seed(0)
    rows, cols = shape
    side = min(shape)
    decays = 10.0 ** (-4 * torch.linspace(0, 1, side, device=device))
    yield torch.randn(shape, device=device)
    yield (torch.randn(rows, side, device=device) * decays) @ torch.randn(side, cols, device=device)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the Frobenius norm of a - b, relative to that of b."""
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))
