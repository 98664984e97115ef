"""The base class of Shampoo and SOAP: moving averages of G G^T and G^T G (the Kronecker factors),
and the schedule for refreshing the roots or eigenbases that are computed from them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from .matrix_optimizer import MatmulPrecision, MatrixOptimizer, OnFallback, Workspace, matmul_precision
from .shampoo_facts import packed_elements

Side = Literal["L", "R"]
"""A side of a matrix. L: its rows, with a factor from G G^T. R: its columns, with a factor from G^T G."""
SIDES: tuple[Side, Side] = ("L", "R")


class KroneckerSettings(TypedDict, total=False):
    """The keyword arguments of `KroneckerOptimizer`, for subclasses that pass them on."""

    weight_decay: float
    betas: tuple[float, float]
    eps: float
    shampoo_beta: float
    precondition_frequency: int
    max_preconditioner_dim: int
    spread: bool
    on_fallback: OnFallback | None
    precision: MatmulPrecision
    workspace: Workspace | None


class KroneckerOptimizer(MatrixOptimizer):
    """The base class of optimizers with Kronecker factors, which it maintains. A subclass computes a square
    (a root or an eigenbasis) from each factor, and the direction of the update from the gradient.

    State of a matrix: `step`, the number of its updates so far; `L` (rows, rows) and `R` (cols, cols), the
    packed factors, which are bias-corrected moving averages; and the state that the subclass adds. A side
    longer than `max_preconditioner_dim` does not have a factor.
    """

    symmetric: tuple[str, ...] = ("",)
    """The prefixes of the state keys of packed symmetric squares; L or R follows the prefix."""
    squares = "Q_"
    """The prefix of the state keys of the squares that refreshes compute; L or R follows the prefix. Between
    the parts of a spread refresh, the same keys with `next_` prepended hold the unfinished squares."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 8192,
        spread: bool = False,
        on_fallback: OnFallback | None = None,
        precision: MatmulPrecision = "fp32",
        workspace: Workspace | None = None,
    ) -> None:
        """Args:
            params: Matrices (rows, cols), or parameter groups of matrices.
            lr: Learning rate.
            weight_decay: Decoupled weight decay: p *= 1 - lr weight_decay, before the update.
            betas: Decays of the first and the second moment.
            eps: The epsilon in the denominator of Adam's update.
            shampoo_beta: Decay of the factors.
            precondition_frequency: The period: the number of steps between two refreshes of a matrix. A
                refresh costs much more than a step; a longer period makes the preconditioner older. A matrix
                is refreshed at its first step, and whenever its steps so far are a multiple of the period. It
                is not refreshed earlier, because after one step SOAP's second moment is zero off the
                diagonal, and a new basis would rotate the first moment into those directions.
            max_preconditioner_dim: A side longer than this is not preconditioned and does not have a factor,
                which would take side^2 / 2 elements and O(side^3) operations per refresh.
            spread: Compute refreshes, from the third on, in parts, one in each step of a period, so that no
                step is much longer than others. A refresh is computed from the factors of the period's first
                step and used from its last step on, in Shampoo less than a seventh of the period earlier
                (Anil et al. 2020, arXiv:2002.09018, use roots just as late).
            on_fallback: Called when a decomposition or Newton's iteration failed, or when an update was
                bounded (`LONGEST`).
            precision: The precision of a step's matmuls ("tf32": on TF32 units where a GPU has them).
                Refreshes are always fp32.
            workspace: Scratch shared with other optimizers; None for a separate workspace.

        Raises:
            ValueError: A setting is out of range, or a parameter is not a contiguous 2-D fp32 tensor.
        """
        for name, beta in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("shampoo_beta", shampoo_beta)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} is {beta}; a moving average needs 0 <= decay < 1")
        if precondition_frequency < 1:
            raise ValueError(f"precondition_frequency is {precondition_frequency}; it has to be at least 1")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.betas = betas
        self.eps = eps
        self.shampoo_beta = shampoo_beta
        self.precondition_frequency = precondition_frequency
        self.max_preconditioner_dim = max_preconditioner_dim
        self.on_fallback = on_fallback
        self.precision = precision
        self.workspace = workspace or Workspace()
        self.spread = spread and precondition_frequency > 1
        self._pending_reports: list[tuple[torch.Tensor, torch.Tensor, float, str]] = []

    @abstractmethod
    def _start(self, p: torch.Tensor, state: dict[str, torch.Tensor | int]) -> None:
        """Adds the subclass's initial state for matrix `p` to `state`."""

    @abstractmethod
    def _refresh(self, p: torch.Tensor, side: Side, factor: torch.Tensor) -> None:
        """Recomputes the root or eigenbasis of a side of `p`, which keeps its previous value if that fails.

        Args:
            factor: The unpacked factor (length, length), in scratch.
        """

    @abstractmethod
    def _refresh_part(self, p: torch.Tensor, side: Side, part: int) -> bool:
        """Computes one part, counted from 0, of the refresh of a side of `p`, and keeps intermediate results
        in the state. Returns True if the refresh is now complete."""

    def _initial_refresh_state(
        self, p: torch.Tensor, state: Mapping[str, torch.Tensor | int]
    ) -> dict[str, torch.Tensor]:
        """Returns initial values for the state that a spread refresh keeps between its parts: copies of the
        squares in use. If a checkpoint lacks this state, the refresh in progress continues from these copies
        and leaves the squares unchanged."""
        names = [f"{self.squares}{side}" for side in self._sides(p)]
        return {f"next_{key}": square.clone() for key in names if isinstance(square := state.get(key), torch.Tensor)}

    def _after_refresh(self, p: torch.Tensor) -> None:
        """Does nothing here. Called after sides of `p` have been refreshed, for subclasses that need it."""

    @abstractmethod
    def _direction(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Returns the direction D (rows, cols) of the update p -= lr D. D may be scratch."""

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        packed = {
            f"{name}{side}": (packed_elements(length),) for name in self.symmetric for side, length in self._lengths(p)
        }
        return {"step": None, **packed}

    def convert_state(self, p: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the state with or without the state of an unfinished refresh, as this optimizer needs."""
        unfinished = self._initial_refresh_state(p, state)
        if self.spread:
            return {**unfinished, **state}
        return {key: tensor for key, tensor in state.items() if key not in unfinished}

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        self._report_pending()
        with matmul_precision(self.precision):
            for p in matrices:
                self._average_factors(p)
        with matmul_precision("fp32"):
            for p in filter(self._is_due, matrices):
                for side in self._sides(p):
                    self._refresh(p, side, self._unpacked(p, side))
                self._after_refresh(p)
            for p in matrices:
                self._continue_refresh(p)
        with matmul_precision(self.precision):
            for p in matrices:
                self._update(p, self._gradient(p), group)

    def _average_factors(self, p: torch.Tensor) -> None:
        """Updates the factors of `p` with its gradient."""
        state = self.state[p]
        if not state:
            state["step"] = 0
            for side, length in self._lengths(p):
                state[side] = p.new_zeros(packed_elements(length))
            self._start(p, state)
            state.update(self._initial_refresh_state(p, state) if self.spread else {})
        steps_before: int = state["step"]
        state["step"] = steps_before + 1
        # With this weight the average is bias-corrected at every step (as in emerging-optimizers' SOAP).
        weight = (1 - self.shampoo_beta) / (1 - self.shampoo_beta ** (steps_before + 1))
        grad = self._gradient(p)
        for side, length in self._lengths(p):
            average_gram(state[side], grad if side == "L" else grad.mT, weight, self._square(p, length))

    def _is_due(self, p: torch.Tensor) -> bool:
        """Returns True if `p` is refreshed as a whole in this step."""
        steps_before, period = self.state[p]["step"] - 1, self.precondition_frequency
        return steps_before in (0, period) if self.spread else steps_before % period == 0

    def _continue_refresh(self, p: torch.Tensor) -> None:
        """Computes this step's part of the refresh of `p` if refreshes are spread."""
        steps_before, period = self.state[p]["step"] - 1, self.precondition_frequency
        if not self.spread or steps_before < 2 * period:
            return
        completed = [self._refresh_part(p, side, steps_before % period) for side in self._sides(p)]
        if any(completed):
            self._after_refresh(p)

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        direction = self._direction(p, grad)
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])

    def _sides(self, p: torch.Tensor) -> tuple[Side, ...]:
        """Returns the sides of `p` that have a factor."""
        return tuple(side for side, _ in self._lengths(p))

    def _lengths(self, p: torch.Tensor) -> list[tuple[Side, int]]:
        """Returns the sides of `p` that have a factor, with their lengths."""
        lengths = zip(SIDES, p.shape, strict=True)
        return [(side, length) for side, length in lengths if length <= self.max_preconditioner_dim]

    def _square(self, p: torch.Tensor, length: int) -> torch.Tensor:
        """Returns scratch for a square: (length, length)."""
        return self.workspace.get("square", (length, length), p.dtype, p.device)

    def _unpacked(self, p: torch.Tensor, side: Side, name: str = "") -> torch.Tensor:
        """Returns a factor, or another symmetric square of the state, in scratch that the next call overwrites."""
        return unpack(self.state[p][f"{name}{side}"], self._square(p, p.size(SIDES.index(side))))

    def _sandwich(self, p: torch.Tensor, name: str, x: torch.Tensor, *, transpose: Side | None = None) -> torch.Tensor:
        """Multiplies `x` by the squares of `p` from both sides: S_L x S_R.

        Args:
            name: The prefix of the squares' names in the state of `p`.
            x: (rows, cols).
            transpose: The side whose square is transposed.

        Returns:
            The product (rows, cols), in scratch that the next call overwrites; `x` itself if no side has a
            square.
        """
        state = self.state[p]
        for side in self._sides(p):
            square = self._unpacked(p, side, name) if name in self.symmetric else state[f"{name}{side}"]
            square = square.mT if side == transpose else square
            out = self.workspace.like(f"sandwich_{side}", p)
            x = torch.mm(square, x, out=out) if side == "L" else torch.mm(x, square, out=out)
        return x

    def _report_bound(self, p: torch.Tensor, size: torch.Tensor, limit: float, words: str) -> None:
        """Reports that an update was bounded, if `size` exceeds the limit. `words` is a format string for
        `size`. On a GPU the report comes with the next update, when the host has waited for the device
        anyway; this call does not wait."""
        self._pending_reports.append((p, size.to("cpu", non_blocking=True), limit, words))
        if size.device.type == "cpu":
            self._report_pending()

    def _report_pending(self) -> None:
        for p, size, limit, words in self._pending_reports:
            if (value := float(size)) > limit:
                self._report(p, words.format(value))
        self._pending_reports.clear()

    def _report(self, p: torch.Tensor, reason: str) -> None:
        if self.on_fallback is not None:
            self.on_fallback(p, reason)


_STRIP = 64
"""The minimum number of rows of a strip in `average_gram` on a CPU."""


def pack(square: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Packs the upper triangle of `square`, a contiguous symmetric matrix (side, side), into `out`
    (packed_elements(side),) and returns `out`. `square` is overwritten."""
    return out.copy_(_fold(square))


def unpack(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Unpacks a symmetric matrix from the result of `pack` into `out` (side, side), contiguous, and returns
    `out`."""
    side = len(out)
    half = (side + 1) // 2
    rest = side - half
    out.view(-1)[: len(packed)].copy_(packed)
    lower = _lower_mask(half, out.device)
    corner, folded = out[:half, :half], out[1 : rest + 1, :rest]
    torch.where(lower[:rest, :rest], folded, folded.mT, out=out[half:, half:])
    corner.copy_(torch.where(lower, corner.mT, corner))
    out[half:, :half].copy_(out[:half, half:].mT)
    return out


def average_gram(packed: torch.Tensor, x: torch.Tensor, weight: float, scratch: torch.Tensor) -> None:
    """Computes packed += weight (X X^T - packed) in place.

    On a CPU, X X^T is computed in strips of rows that begin at the diagonal, which takes about half the
    operations. On a GPU strips would be too small to fill the device, so all of X X^T is computed.

    Args:
        packed: The factor, packed: (packed_elements(side),).
        x: X (side, long).
        scratch: (side, side), contiguous, overwritten.
    """
    side = len(x)
    height = side if x.device.type != "cpu" else max(_STRIP, -(-side // 16))
    for top in range(0, side, height):
        end = min(side, top + height)
        torch.mm(x[top:end], x[top:].mT, out=scratch[top:end, top:])
    packed.lerp_(_fold(scratch), weight)


def _fold(square: torch.Tensor) -> torch.Tensor:
    """Folds the upper triangle of `square` into its packed form in the memory of `square`, and returns a view
    of it."""
    side = len(square)
    half = (side + 1) // 2
    rest = side - half
    folded = square[1 : rest + 1, :rest]
    torch.where(_lower_mask(rest, square.device), square[half:, half:].mT, folded, out=folded)
    return square.view(-1)[: packed_elements(side)]


def _lower_mask(side: int, device: torch.device) -> torch.Tensor:
    """Returns a mask (side, side) of the elements on the diagonal or below it."""
    return torch.ones(side, side, dtype=torch.bool, device=device).tril_()
