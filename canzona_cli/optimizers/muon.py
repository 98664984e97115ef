"""Muon: momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import groupby
from typing import Literal, TypedDict

import torch
from torch.optim.optimizer import ParamsT

from . import muon_cpu, muon_cuda
from . import newton_schulz as iteration
from .facts import Form
from .gram_form import gram_newton_schulz, products_type, starting_norm
from .graphs import Replayed
from .matrix_optimizer import MatrixOptimizer, OnFallback, Workspace, products
from .muon_facts import LOST, STANDARD_ONLY, CoefficientSet, ScaleMode, count_down, distrust, steps_left
from .newton_schulz import newton_schulz
from .shared_rows import Shape


class MuonSettings(TypedDict, total=False):
    """The arguments that `Muon` takes by name, for subclasses that pass it on."""

    weight_decay: float
    momentum: float
    nesterov: bool
    ns_steps: int
    coefficients: CoefficientSet
    scale_mode: ScaleMode
    scale_factor: float
    precision: Literal["bf16", "fp32"]
    stack: bool | Mapping[tuple[int, int], int]
    graph: bool
    form: Form | Mapping[tuple[int, int], Form]
    on_fallback: OnFallback | None
    workspace: Workspace | None


class Muon(MatrixOptimizer):
    """Each matrix moves equally far in all directions its momentum has: by the nearest orthogonal matrix.

        M = momentum M + (1 - momentum) G               the average of gradients G (rows, cols)
        D = momentum M + (1 - momentum) G               what is orthogonalised: a look ahead (nesterov), or M itself
        O = newton_schulz(D / |D|)                      U V^T where D = U S V^T: every singular value becomes about 1
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) O

    O needs all of D, however its rows and columns are spread over ranks: that is what this project is about.
    Where ranks keep their fragments, they update them together (`shared_muon`). Muon is not for embeddings,
    the output layer and vectors; AdamW updates those.

    The rule is that of emerging-optimizers' Muon, which Megatron uses. What differs is how it runs. Products
    write into a workspace that is allocated once. On CPU, passes over memory go by blocks of rows that stay
    in cache; on CUDA they are whole-tensor operations, and nothing waits for the GPU.

    The gradient's scale is of no account, powers of two not for a single bit, and zeros only decay. (Others
    divide by max(|D|, 1e-7): the update fades where clipping by the norm of all parameters leaves less.)

    State of a matrix: `momentum_buffer`, M; `distrusted`, behind an update in Gram form that could not be
    trusted.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        coefficients: CoefficientSet = "quintic",
        scale_mode: ScaleMode = "spectral",
        scale_factor: float = 0.2,
        precision: Literal["bf16", "fp32"] = "bf16",
        stack: bool | Mapping[tuple[int, int], int] = False,
        form: Form | Mapping[tuple[int, int], Form] = "standard",
        on_fallback: OnFallback | None = None,
        graph: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        """Args:
        params: Matrices, or parameter groups of them.
        lr: Learning rate.
        weight_decay: p *= 1 - lr weight_decay, before the update.
        momentum: Decay of the gradients' moving average.
        nesterov: Orthogonalise gradient + momentum (average - gradient) rather than the average.
        ns_steps: Newton-Schulz iterations.
        coefficients: Their polynomials.
        scale_mode: See `scale`.
        scale_factor: Multiplies it. 0.2 with spectral gives the update AdamW's RMS (Liu et al. 2025,
            arXiv:2502.16982).
        precision: The precision of the iteration's products; they accumulate in fp32. Momentum and weights
        are fp32 always. Where
            it is as fast the Gram form has fp16 for bf16 (`gram_form.products_type`).
        stack: Orthogonalise matrices of one shape in batched products: all, or at most so many of a shape
        (rows, cols).
            Spares launches when matrices are small and many, and costs scratch for all of them at once.
        form: The form of the iteration; of each shape (rows, cols). An update in Gram form that cannot be
        trusted (`gram_form`)
            is made in standard form instead, and so are the next `STANDARD_STEPS`. On CUDA, where the host
            does not wait to know, it is left out, and `settle` sees to the next ones.
        on_fallback: Called when an update was made in standard form instead.
        graph: On CUDA, capture the update of all matrices of a parameter group, and replay it (`graphs`), but
            not while one of them is in standard form after a doubt.
        workspace: Scratch to share with other optimizers.

        Raises:
            ValueError: `ns_steps` is not a number of steps, or the coefficients are not for the Gram form.
        """
        if ns_steps < 1:
            raise ValueError(f"ns_steps is {ns_steps}; at least one is needed")
        if coefficients in STANDARD_ONLY and "gram" in ({form} if isinstance(form, str) else set(form.values())):
            raise ValueError(f"coefficients {coefficients} are for the standard form alone")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.workspace = workspace or Workspace()
        self.nesterov = nesterov
        self.steps = iteration.coefficients(coefficients, ns_steps)
        self.scale_mode = scale_mode
        self.scale_factor = scale_factor
        self._standard = torch.bfloat16 if precision == "bf16" else torch.float32
        self.dtype = products_type(self._standard, next((p.device for p in self._matrices()), torch.device("cpu")))
        self.stack = stack
        self.form = form
        self.on_fallback = on_fallback
        self._trusted: dict[torch.Tensor, torch.Tensor] = {}
        """By matrix, on CUDA: whether its last update in Gram form can be trusted, (), on the device."""
        self.graph = graph
        self._replayed: dict[int, Replayed] = {}
        self._rates: dict[int, torch.Tensor] = {}

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        excluded = [p for p in matrices if self.excluded(p)]
        with products("fp32"):
            on_host = not matrices or by_blocks(matrices[0])
            if not on_host:
                self._set_rates(matrices[0], group)
            if self.graph and not on_host and not excluded:
                replayed = self._replayed.setdefault(id(group), Replayed())
                replayed.run(lambda: self._update_all(matrices, group), lambda: self._fixed(matrices, group))
            else:
                self._update_all(matrices, group)
        for p in excluded:  # here, and not where they are updated: a replay knows of no host's numbers
            count_down(self.state[p])

    def _update_all(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        for _, same in groupby(sorted(matrices, key=self._kind) if self.stack else matrices, key=self._kind):
            of_shape = list(same)
            most = self._most(of_shape)
            for first in range(0, len(of_shape), most):
                together = of_shape[first : first + most]
                if len(together) > 1:
                    self._update_stack(together, group)
                else:
                    super()._update_group(together, group)

    def _set_rates(self, p: torch.Tensor, group: Mapping[str, float]) -> None:
        """Puts on the device what changes from step to step."""
        if id(group) not in self._rates:
            self._rates[id(group)] = p.new_empty(3)
        muon_cuda.set_rates(self._rates[id(group)], group["lr"], group["weight_decay"])

    def _fixed(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> Hashable:
        """Collects all else that an update of these matrices depends on, as far as it may change."""
        state = [value for p in matrices for value in self.state[p].values() if isinstance(value, torch.Tensor)]
        gradients = [p.grad for p in matrices if p.grad is not None]
        places = tuple(tensor.data_ptr() for tensors in (matrices, gradients, state) for tensor in tensors)
        in_gram_form = any(self._form(p) == "gram" for p in matrices)
        decay = group["weight_decay"] if in_gram_form else None  # the host's number there, in `_move`
        return group["momentum"], decay, self.workspace.nbytes, places

    def _most(self, of_shape: Sequence[torch.Tensor]) -> int:
        """Tells how many matrices of one shape are updated together."""
        if isinstance(self.stack, bool):
            return len(of_shape) if self.stack else 1
        rows, cols = of_shape[0].shape
        return self.stack.get((rows, cols), 1)

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        x = self.workspace.get("muon_x", p.shape, self._type(p), p.device)
        self._direction(p, grad, group["momentum"], x, side=min(p.shape))
        self._apply(p, self._orthogonalised(x, [p], group), group)

    def _update_stack(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        first = matrices[0]
        x = self.workspace.get("muon_x", (len(matrices), *first.shape), self._type(first), first.device)
        for p, direction in zip(matrices, x, strict=True):
            assert p.grad is not None
            self._direction(p, p.grad, group["momentum"], direction, side=min(p.shape))
        x = self._orthogonalised(x, matrices, group)
        for p, direction in zip(matrices, x, strict=True):
            self._apply(p, direction, group)

    def _direction(
        self,
        p: torch.Tensor,
        grad: torch.Tensor,
        momentum: float,
        out: torch.Tensor,
        *,
        side: int,
        again: bool = False,
    ) -> float | torch.Tensor:
        """Update the momentum, unless `again`, and write into `out` what is to be orthogonalised, of the norm
        that its type is for, or 0.

        Args:
            side: The whole matrix's shorter one.

        Returns:
            The norm it had; on CUDA () in fp64, on the device.
        """
        direction: Callable[..., float | torch.Tensor] = (muon_cpu if by_blocks(p) else muon_cuda).direction
        return direction(
            self._average(p),
            grad,
            out,
            momentum=momentum,
            weight=0.0 if again else 1 - momentum,
            ahead=self.workspace.like("muon_direction", p) if self.nesterov else None,
            norm=starting_norm(side, out.dtype),
            workspace=self.workspace,
        )

    def _orthogonalised(
        self, x: torch.Tensor, matrices: list[torch.Tensor], group: Mapping[str, float]
    ) -> torch.Tensor:
        """Orthogonalises directions `x` in their form: (rows, columns) of one matrix, or (matrices,
        rows, columns)."""
        if self._form(matrices[0]) == "standard":
            return newton_schulz(x, self.steps, self.workspace)
        if not by_blocks(matrices[0]):
            wider = x.dtype is torch.float16 and x.ndim == 2
            # The direction is needed no more.
            into = self.workspace.like("muon_direction", matrices[0]) if wider else None
            result, trusted = gram_newton_schulz(x, self.steps, self.workspace, into)
            self._judge(matrices, trusted)
            if x.ndim == 2 and result.dtype is torch.float32:
                return result  # which `_move` leaves out
            # Not by a factor of 0: what is left out may be NaN.
            return result.masked_fill_(trusted.logical_not().view(*trusted.shape, 1, 1), 0)
        result, trusted = gram_newton_schulz(x, self.steps, self.workspace)
        for p, iterate, good in zip(matrices, result.view(-1, *x.shape[-2:]), trusted.view(-1).tolist(), strict=True):
            if not good:
                assert p.grad is not None
                again = torch.empty_like(iterate, dtype=self._standard)
                self._direction(p, p.grad, group["momentum"], again, side=min(p.shape), again=True)
                iterate.copy_(newton_schulz(again, self.steps, Workspace()))
                distrust(self.state[p])
                self._tell(p)
        return result

    def _tell(self, p: torch.Tensor) -> None:
        if self.on_fallback is not None:
            self.on_fallback(p, LOST)

    def _judge(self, matrices: Sequence[torch.Tensor], trusted: torch.Tensor) -> None:
        """Notes whether the updates of matrices are `trusted`, where steps and their replays both write it."""
        for p in matrices:
            self._trusted.setdefault(p, torch.ones((), dtype=torch.bool, device=p.device))
        torch._foreach_copy_([self._trusted[p] for p in matrices], trusted.view(-1).unbind())

    def doubted(self) -> torch.Tensor | None:
        """Counts the updates of the last step that were left out: (), on the device; None on a CPU."""
        if not self._trusted:
            return None
        return torch.stack(list(self._trusted.values())).logical_not().sum()

    def settle(self) -> list[torch.Tensor]:
        """Update what was left out in standard form for the next steps; the host waits.

        Returns:
            Matrices whose last update was left out.
        """
        left = [p for p, good in self._trusted.items() if not bool(good)]
        for p in left:
            distrust(self.state[p])
            self._trusted[p].fill_(True)
        return left

    @property
    def captures(self) -> int:
        """The CUDA graphs captured so far."""
        return sum(replayed.captures for replayed in self._replayed.values())

    def excluded(self, p: torch.Tensor) -> bool:
        """Tells whether the next update is in standard form, after one that was doubted."""
        return steps_left(self.state[p]) > 0

    def _form(self, p: torch.Tensor) -> Form:
        if self.excluded(p):
            return "standard"
        return self.form if isinstance(self.form, str) else self.form[p.size(0), p.size(1)]

    def _type(self, p: torch.Tensor) -> torch.dtype:
        """Picks the type of the iterate."""
        return self.dtype if self._form(p) == "gram" else self._standard

    def _kind(self, p: torch.Tensor) -> tuple[tuple[int, ...], str, Form]:
        return tuple(p.shape), str(p.device), self._form(p)

    def _apply(self, p: torch.Tensor, x: torch.Tensor, group: Mapping[str, float]) -> None:
        trusted = self._trusted.get(p) if self._form(p) == "gram" else None
        self._move(p, x, group, (p.size(0), p.size(1)), trusted)

    def _move(
        self,
        p: torch.Tensor,
        x: torch.Tensor,
        group: Mapping[str, float],
        whole: Shape,
        trusted: torch.Tensor | None = None,
    ) -> None:
        """p <- (1 - lr weight_decay) p - lr scale x, for `p` of a matrix of the shape `whole`; where an `x`
        in fp32 is not `trusted`, on CUDA, p only decays."""
        size = self.scale_factor * scale(*whole, self.scale_mode)
        if by_blocks(p):
            muon_cpu.move(p, x, group["lr"], group["weight_decay"], size, self.workspace)
        else:
            muon_cuda.move(p, x, self._rates[id(group)], group["weight_decay"], size, trusted)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {"momentum_buffer": tuple(p.shape)}

    def _average(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average: torch.Tensor = state["momentum_buffer"]
        return average


def scale(rows: int, cols: int, mode: ScaleMode) -> float:
    """Computes the size of the update of a (rows, cols) matrix, a semi-orthogonal matrix being 1.

    - spectral: sqrt(max(rows, cols)), the same RMS for every shape (Liu et al. 2025, arXiv:2502.16982).
    - unit_rms_norm: sqrt(rows / cols), the same RMS-to-RMS operator norm (Bernstein 2025; Scion,
      arXiv:2502.07529).
    - shape_scaling: the same, and never below 1 (Jordan et al. 2024).
    """
    if mode == "spectral":
        return math.sqrt(max(rows, cols))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


def by_blocks(matrix: torch.Tensor) -> bool:
    """Tells whether passes over a matrix go by blocks of rows; there the host reads numbers too, elsewhere
    nothing waits."""
    return matrix.device.type == "cpu"
