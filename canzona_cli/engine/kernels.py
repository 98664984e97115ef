"""Chooses the kernels for matmuls with symmetric results when a run starts, from measurements on the run's
own shapes.

Before it is timed, every kernel is called exactly as updates call it, and its results are compared with
cuBLAS's. A kernel is not used if a rank cannot use it, if it is wrong on any rank, or if it saves too little
time. All ranks use the same kernels, because strategy sc relies on equal updates on all ranks.

Shapes that are multiplied in batches use cuBLAS, so nothing is compiled for them. The time to compile a
kernel has to pay off: QuACK compiles for dtypes and strides, not for shapes, and caches the result on the
node's disk, where one rank compiles and the others wait for its files. emerging-optimizers' Triton kernel is
not tried: it compiles 24 tilings for every shape, factor and stride (1.5 to 2.5 minutes for a 0.6B model,
which it does not speed up), and supports bf16 only.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from canzona_cli.config.schema import RunConfig
from canzona_cli.costs.update import RULES, algorithm_of, form_of, stack_of
from canzona_cli.megatron.owner_bucket_group import device_seconds
from canzona_cli.megatron.parallel import gather
from canzona_cli.model.matrices import matrix_shapes
from canzona_cli.optimizers import graphs, symmetric
from canzona_cli.optimizers.gram_form import gram_dtype
from canzona_cli.optimizers.symmetric import Kernel, Shape
from canzona_cli.run.records import PLAIN, STRIPS, KernelChoice, Kernels, KernelTrial

Call = Literal["wide", "tall", "square"]
"""The kind of a matmul's operand A: X with contiguous rows (wide) or contiguous columns (tall), or a
polynomial of a symmetric matrix (square)."""
Seconds = Callable[[Callable[[], None]], float]
"""A function that measures the seconds that an operation takes."""

LEAST_SIDE = 512
"""The smallest side for which kernels are tried. A smaller matmul does not fill a GPU even if its whole
result is computed, so computing half of the result does not save time."""
GAIN = 0.97
"""The largest ratio of a kernel's time to cuBLAS's at which the kernel is used; a smaller gain is within the
noise of a few samples."""
_REPEATS = 9
_NAMES: Mapping[torch.dtype, Literal["bf16", "fp16"]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def matmul_shapes(config: RunConfig, device: torch.device) -> dict[Shape, frozenset[Call]]:
    """Returns the shapes of the run's unbatched matmuls with symmetric results, smallest first, and the kinds
    of calls made with each shape. A shape includes the dtype that its form uses on `device`.

    The result is empty if the optimizer does not orthogonalise, is not one of canzona's, or does not run in
    bf16.
    """
    algorithm = algorithm_of(config)
    orthogonal = RULES[algorithm.name].orthogonal and not algorithm.custom
    if not orthogonal or algorithm.precision != "bf16" or not config.execution.ours:
        return {}
    shapes: dict[Shape, frozenset[Call]] = {}
    for rows, cols in matrix_shapes(config):
        if stack_of(algorithm, rows, cols, config.cluster) > 1:
            continue
        standard = form_of(algorithm, rows, cols, config.cluster) == "standard"
        dtype = torch.bfloat16 if standard else gram_dtype(torch.bfloat16, device)
        side, long = sorted((rows, cols))
        calls: tuple[tuple[int, Call], ...] = ((long, "tall" if rows > cols else "wide"), (side, "square"))
        for width, call in calls:
            shapes[side, width, dtype] = shapes.get((side, width, dtype), frozenset()) | {call}
    return dict(sorted(shapes.items(), key=lambda item: _size(item[0])))


def _size(shape: Shape) -> tuple[float, int, int, str]:
    side, long, dtype = shape
    return side**2 * long, side, long, _NAMES[dtype]


def choose_kernels(
    config: RunConfig,
    device: torch.device,
    *,
    ladder: Mapping[str, Callable[[], Kernel]] = symmetric.LADDER,
    seconds: Seconds = device_seconds,
    begin: Callable[[str], None] = lambda shape: None,
) -> Kernels:
    """Chooses the kernel for each shape, installs the kernels for all further updates, and returns the
    choices, which are the same on every rank. Also tests whether updates can be replayed as CUDA graphs.
    Collective on CUDA; on a CPU it only reports which matmuls are computed in strips.

    Args:
        ladder: The loaders of kernels by name.
        seconds: A function that measures the seconds that an operation takes.
        begin: Called with a description of each shape before kernels are tried on it.
    """
    shapes = matmul_shapes(config, device)
    if device.type != "cuda":
        return Kernels(choices=tuple(_cpu_choice(shape) for shape in shapes))
    loaded, refused = _load(ladder)
    choices_here = []
    for shape, calls in shapes.items():
        begin(f"{shape[0]} x {shape[1]} in {_NAMES[shape[2]]}")
        choices_here.append(_try_kernels(shape, calls, device, loaded, refused, seconds))
    refusal = graphs.try_out(device) if algorithm_of(config).graph else ""
    all_kernels = gather(Kernels(choices=tuple(choices_here), no_graphs=refusal), Kernels)
    choices = tuple(_merge(by_rank) for by_rank in zip(*(rank.choices for rank in all_kernels), strict=True))
    symmetric.use({shape: loaded[c.kernel] for shape, c in zip(shapes, choices, strict=True) if c.kernel != PLAIN})
    return Kernels(choices=choices, no_graphs=next((rank.no_graphs for rank in all_kernels if rank.no_graphs), ""))


def _cpu_choice(shape: Shape) -> KernelChoice:
    side, long, dtype = shape
    kernel = STRIPS if symmetric.strip_count(side, long) > 1 else PLAIN
    return KernelChoice(side=side, long=long, dtype=_NAMES[dtype], kernel=kernel)


def _load(ladder: Mapping[str, Callable[[], Kernel]]) -> tuple[dict[str, Kernel], list[KernelTrial]]:
    """Returns the kernels that can be imported, and for every other kernel a trial with the reason why it
    cannot."""
    loaded: dict[str, Kernel] = {}
    refused = []
    for name, load in ladder.items():
        try:
            loaded[name] = load()
        except Exception as error:  # importing an optional package may raise anything
            refused.append(KernelTrial(kernel=name, refused=_error_text(error)))
    return loaded, refused


def _try_kernels(
    shape: Shape,
    calls: Iterable[Call],
    device: torch.device,
    loaded: Mapping[str, Kernel],
    refused: Sequence[KernelTrial],
    seconds: Seconds,
) -> KernelChoice:
    """Tries every kernel on one shape, on this rank only. `_merge` chooses among the kernels afterwards."""
    side, long, dtype = shape
    trials = list(refused)
    if side >= LEAST_SIDE:
        cases = list(_cases(shape, calls, device))
        trials += [_trial(name, kernel, cases, seconds) for name, kernel in loaded.items()]
        trials.append(_trial(PLAIN, symmetric.full_matmul, cases, seconds))
    return KernelChoice(side=side, long=long, dtype=_NAMES[dtype], kernel=PLAIN, trials=tuple(trials))


def _merge(choices: Sequence[KernelChoice]) -> KernelChoice:
    """Merges all ranks' trials of one shape and chooses its kernel. A kernel that any rank refuses is
    refused."""
    by_kernel: dict[str, list[KernelTrial]] = {}
    for choice in choices:
        for trial in choice.trials:
            by_kernel.setdefault(trial.kernel, []).append(trial)
    merged = {name: _merge_trials(name, trials) for name, trials in by_kernel.items()}
    times = {name: trial.seconds for name, trial in merged.items() if trial.seconds is not None}
    best = min(times, key=lambda name: times[name], default=PLAIN)
    if best != PLAIN and times[best] > GAIN * times[PLAIN]:
        best = PLAIN
    for name in times.keys() - {best}:
        merged[name] = replace(merged[name], refused=f"slower than {best}, or hardly faster")
    return replace(choices[0], kernel=best, trials=tuple(merged.values()))


def _merge_trials(name: str, trials: Sequence[KernelTrial]) -> KernelTrial:
    """Merges all ranks' trials of one kernel: its time on the slowest rank, or the reason why a rank refuses
    it."""
    reason = next((trial.refused for trial in trials if trial.refused), "")
    times = [trial.seconds for trial in trials if trial.seconds is not None]
    return KernelTrial(kernel=name, seconds=None if reason else max(times), refused=reason)


class _Case:
    """A matmul on which kernels are tried, with cuBLAS's result.

    Args:
        a, b: The operands, (side, long) and (long, side).
        add, beta, alpha: As for a `Kernel`.
        in_place: True if the result overwrites `add`.
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        add: torch.Tensor | None = None,
        beta: float = 0.0,
        alpha: float = 1.0,
        *,
        in_place: bool = False,
    ) -> None:
        self._factors = a, b
        self._out, self._exact = (a.new_empty(a.size(0), a.size(0)) for _ in range(2))
        symmetric.full_matmul(a, b, self._exact, add, beta, alpha)
        self._before = add if in_place and add is not None else torch.full_like(self._out, float("nan"))
        self._scalars = self._out if in_place else add, beta, alpha

    def run(self, kernel: Kernel) -> None:
        a, b = self._factors
        kernel(a, b, self._out, *self._scalars)

    def is_wrong(self, kernel: Kernel) -> bool:
        """Returns True if an element differs from cuBLAS's result by more than two roundings to its dtype
        plus the difference that another order of summation makes. Elements that the kernel does not write
        stay NaN, or keep the value of `add`, so they are detected as well."""
        self._out.copy_(self._before)
        self.run(kernel)
        exact = self._exact.float()
        is_close = (self._out.float() - exact).abs() <= torch.finfo(self._out.dtype).eps * exact.abs() + 2.0**-12
        return not bool(is_close.all())


def _cases(shape: Shape, calls: Iterable[Call], device: torch.device) -> Iterable[_Case]:
    """Yields the matmuls of this shape that Newton-Schulz computes, on operands whose rows have a norm of
    about 1. The Gram form, which uses fp16, adds every result to the matrix that it overwrites. The standard
    form computes X X^T and A A + A."""
    side, long, dtype = shape
    in_place = dtype is torch.float16
    square = torch.randn(side, side, device=device).mul_(side**-0.5)
    a = (square + square.mT).mul_(0.5).to(dtype)
    x = torch.randn(side, long, device=device).mul_(long**-0.5).to(dtype)
    for call in sorted(calls):
        if call != "square":
            operand = x.mT.contiguous().mT if call == "tall" else x
            yield _Case(operand, operand.mT, a, 1.0, in_place=True) if in_place else _Case(operand, operand.mT)
    if "square" in calls and in_place:
        p = torch.addmm(a, a, a, beta=-0.5, alpha=2.0)
        yield _Case(p, a.mT, a, 1.0, in_place=True)
        yield _Case(a, a.mT, p, 1.0, 2.0, in_place=True)
    elif "square" in calls:
        yield _Case(a, a.mT, a, -0.5, 2.0)


def _trial(name: str, kernel: Kernel, cases: Sequence[_Case], seconds: Seconds) -> KernelTrial:
    """Compares a kernel with cuBLAS in all cases, and times it in the last case."""
    try:
        if any(case.is_wrong(kernel) for case in cases):
            return KernelTrial(kernel=name, refused="its results differ from cuBLAS's")
        times = [seconds(lambda: cases[-1].run(kernel)) for _ in range(_REPEATS)]
    except Exception as error:  # raised by a compiler or a driver that does not support the kernel on this GPU
        return KernelTrial(kernel=name, refused=_error_text(error))
    return KernelTrial(kernel=name, seconds=statistics.median(times))


def _error_text(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:200]
