"""Muon: SGD with momentum whose update is orthogonalised by a Newton-Schulz iteration (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/)."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, TypedDict, Unpack

import torch
from torch.optim.optimizer import ParamsT

from . import muon_cpu, muon_cuda
from . import newton_schulz as iteration
from .facts import MOMENTUM, Form
from .gram_form import gram_dtype, gram_newton_schulz, starting_norm
from .graphs import Replayed
from .matrix_optimizer import MatrixOptimizer, OnFallback, Run, Workspace, matmul_precision, runs, view_run
from .muon_facts import (
    BLOCK,
    LOST,
    Blend,
    CoefficientSet,
    ScaleMode,
    count_down,
    distrust,
    steps_left,
)
from .newton_schulz import newton_schulz
from .shared_rows import Shape

Norms = float | list[float] | torch.Tensor
"""The norm of a matrix, or the norms of a run: on CPUs a float or a list, on CUDA a tensor () or (count,) in
fp64."""


class MuonSettings(TypedDict, total=False):
    """The keyword arguments of `Muon`, for subclasses that pass them on."""

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
    fused: bool
    form: Form | Mapping[tuple[int, int], Form]
    on_fallback: OnFallback | None
    workspace: Workspace | None


class Muon(MatrixOptimizer):
    """Muon: replaces the momentum of each matrix by (approximately) the nearest semi-orthogonal matrix.

        M = momentum M + (1 - momentum) G          moving average of the gradients G (rows, cols)
        D = momentum M + (1 - momentum) G          with nesterov; otherwise D = M
        O = newton_schulz(D / |D|)                 U V^T where D = U S V^T: all singular values become about 1
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) O

    O depends on all of D, so a rank that has only a fragment of D cannot compute its part of O alone. canzona
    gathers the fragments on one rank (this class), or lets the ranks update their fragments together
    (`shared_muon`). Embeddings, the output layer and vectors should be left to AdamW.

    The update rule is the same as in emerging-optimizers' Muon, which Megatron uses; the implementation
    differs. Matmuls write into a workspace that is allocated once. On CPUs, elementwise passes run over
    blocks of rows that stay in cache. On CUDA they are whole-tensor operations, and `step` never synchronises
    with the GPU.

    The update does not depend on the gradient's scale; scaling all gradients by a power of two leaves it
    bitwise unchanged. Where D is zero, only weight decay applies. Other implementations divide by max(|D|,
    1e-7), so their update shrinks when clipping by the global norm makes |D| smaller than that.

    State of a matrix: `momentum_buffer`, M (rows, cols) in fp32; after an untrusted update in Gram form also
    `distrusted`, the number of updates still to be made in standard form.
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
        fused: bool = False,
        workspace: Workspace | None = None,
    ) -> None:
        """Args:
            params: Matrices (rows, cols), or parameter groups of matrices.
            lr: Learning rate.
            weight_decay: Decoupled weight decay: p *= 1 - lr weight_decay, before the update.
            momentum: Decay of the moving average of gradients.
            nesterov: Orthogonalise the average of gradient and momentum (Nesterov) instead of the momentum.
                Costs a scratch buffer of the size of the largest matrix.
            ns_steps: Number of Newton-Schulz iterations.
            coefficients: The polynomials of these iterations (`newton_schulz.COEFFICIENTS`).
            scale_mode: How the size of the update depends on the matrix's shape, see `scale`.
            scale_factor: A constant factor of the update. 0.2 with "spectral" gives it the RMS of AdamW's
                updates (Liu et al. 2025, arXiv:2502.16982).
            precision: The precision of the iteration's matmuls, which accumulate in fp32. Momentum and
                weights are always fp32. With "bf16", the Gram form uses fp16 where fp16 is as fast
                (`gram_form.gram_dtype`).
            stack: Orthogonalise matrices of the same shape in batched matmuls: True for all of them, or the
                largest batch for each shape (rows, cols). Saves kernel launches when there are many small
                matrices; costs scratch for the whole batch.
            form: The form of the iteration, for all matrices or for each shape (rows, cols). "gram" needs
                fewer operations where one side is longer. On CPUs, an update in Gram form whose estimated
                rounding error is too large (`gram_form`) is repeated in standard form, and the matrix's next
                `STANDARD_STEPS` updates are in standard form. On CUDA, where the host does not wait for the
                estimate, the weight only decays in that step, and the next updates are in standard form once
                `distrust_skipped` is called.
            on_fallback: Called, on CPUs, when an update was repeated in standard form.
            graph: On CUDA, capture the update of all matrices of a parameter group as a CUDA graph and replay
                it (`graphs`), except while one of them is in standard form after an untrusted update.
            fused: On CUDA, let weights that are updated alone in Gram form decay and move in one kernel, a
                private function of torch; else in two passes over a rounded update, as in a stack.
            workspace: Scratch shared with other optimizers; None for a separate workspace.

        Raises:
            ValueError: `ns_steps` is below 1, or as for `MatrixOptimizer`.
        """
        if ns_steps < 1:
            raise ValueError(f"ns_steps is {ns_steps}; at least one is needed")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.workspace = workspace or Workspace()
        self.nesterov = nesterov
        self.steps = iteration.coefficients(coefficients, ns_steps)
        self.scale_mode = scale_mode
        self.scale_factor = scale_factor
        self._standard = torch.bfloat16 if precision == "bf16" else torch.float32
        self.dtype = gram_dtype(self._standard, next((p.device for p in self._matrices()), torch.device("cpu")))
        self.stack = stack
        self.form = form
        self.on_fallback = on_fallback
        self._trusted: dict[torch.Tensor, torch.Tensor] = {}
        """The flag of each matrix on CUDA, () bool: true if its last update in Gram form could be trusted."""
        self.graph = graph
        self.fused = fused
        self._replayed: dict[int, Replayed] = {}
        self._rates: dict[int, torch.Tensor] = {}

    def _update_group(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        distrusted = [p for p in matrices if self.is_distrusted(p)]
        with matmul_precision("fp32"):
            on_host = not matrices or runs_in_blocks(matrices[0])
            if not on_host:
                self._set_rates(matrices[0], group)
            if self.graph and not on_host and not distrusted:
                replayed = self._replayed.setdefault(id(group), Replayed())
                replayed.run(lambda: self._update_all(matrices, group), lambda: self._graph_key(matrices, group))
            else:
                self._update_all(matrices, group)
        # Not in `_update`: replaying a CUDA graph would not run this host code.
        for p in distrusted:
            count_down(self.state[p])

    def _update_all(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        """Updates matrices of the same shape and form in batches of at most `_batch_size`."""
        ordered = sorted(matrices, key=self._batch_key) if self.stack else matrices
        for _, members in groupby(ordered, key=self._batch_key):
            same_kind = list(members)
            batch_size = self._batch_size(same_kind)
            for start in range(0, len(same_kind), batch_size):
                batch = same_kind[start : start + batch_size]
                if len(batch) > 1:
                    self._update_stack(batch, group)
                else:
                    super()._update_group(batch, group)

    def _set_rates(self, p: torch.Tensor, group: Mapping[str, float]) -> None:
        """Copies the group's learning rate and weight decay to where a captured graph reads them."""
        if id(group) not in self._rates:
            self._rates[id(group)] = p.new_empty(3)
        lr, weight_decay = group["lr"], group["weight_decay"]
        for rate, value in zip(self._rates[id(group)], (1 - lr * weight_decay, lr, lr * weight_decay), strict=True):
            rate.fill_(value)

    def _graph_key(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> Hashable:
        """Returns a key that contains everything that a captured update of these matrices depends on and that
        may change, except `_rates`. If the key differs from the previous step's key, the graph must not be
        replayed."""
        addresses = [p.data_ptr() for p in matrices]
        for p in matrices:
            tensors = (p.grad, *self.state[p].values())
            addresses += [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        in_gram_form = any(self._form(p) == "gram" for p in matrices)
        # In Gram form `_move` passes the weight decay as a host number, which a graph would freeze.
        decay = group["weight_decay"] if in_gram_form else None
        return group["momentum"], decay, self.workspace.nbytes, tuple(addresses)

    def _batch_size(self, same_kind: Sequence[torch.Tensor]) -> int:
        """Returns the maximum number of matrices to update in one batch, given matrices of one shape."""
        if isinstance(self.stack, bool):
            return len(same_kind) if self.stack else 1
        rows, cols = same_kind[0].shape
        return self.stack.get((rows, cols), 1)

    def _update(self, p: torch.Tensor, grad: torch.Tensor, group: Mapping[str, float]) -> None:
        x = self.workspace.get("muon_x", p.shape, self._iterate_dtype(p), p.device)
        run = Run.from_matrix(p)
        norm = self._direction(run, group["momentum"], x, side=min(p.shape))
        x = self._orthogonalise(x, [p], [norm], group)
        self._apply(run, x, group, self._trusted.get(p) if self.fused and self._form(p) == "gram" else None)

    def _update_stack(self, matrices: list[torch.Tensor], group: Mapping[str, float]) -> None:
        """Updates matrices of the same shape and form: orthogonalises all of them in one batch, and makes one
        elementwise pass for each run."""
        first = matrices[0]
        self._reserve(first, len(matrices))
        x = self.workspace.get("muon_x", (len(matrices), *first.shape), self._iterate_dtype(first), first.device)
        stack_runs = list(Run.from_matrices(matrices))
        norms = [
            self._direction(run, group["momentum"], direction, side=min(first.shape))
            for run, direction in zip(stack_runs, _parts(x, stack_runs), strict=True)
        ]
        x = self._orthogonalise(x, matrices, norms, group)
        for run, direction in zip(stack_runs, _parts(x, stack_runs), strict=True):
            self._apply(run, direction, group)

    def _reserve(self, p: torch.Tensor, count: int) -> None:
        """Allocates the scratch that elementwise passes over `count` matrices like `p` would need if these
        were a single run, so that a rank's memory does not depend on which gradients are evenly spaced."""
        if runs_in_blocks(p):
            count = max(1, min(count, BLOCK // p.numel()))
            rows = min(count * p.size(0), max(1, BLOCK // p.size(1)))
            self.workspace.get("muon_block", (rows, p.size(1)), p.dtype, p.device)
        if self.nesterov:
            self.workspace.get("muon_direction", (count, *p.shape), p.dtype, p.device)

    def _direction(self, run: Run, momentum: float, out: torch.Tensor, *, side: int, again: bool = False) -> Norms:
        """Updates the momentum, unless `again`, and writes D, the matrices to orthogonalise, into `out`. Each
        matrix is scaled to the Frobenius norm `starting_norm(side, out.dtype)`; zeros stay zero.

        Args:
            out: Receives D, in the shape of `run.weights`.
            side: The shorter side of a whole matrix.
            again: True if the momentum already contains this step's gradient.

        Returns:
            The Frobenius norms of D before scaling.
        """
        blend = Blend(
            nesterov=self.nesterov,
            momentum=momentum,
            weight=0.0 if again else 1 - momentum,
            norm=starting_norm(side, out.dtype),
        )
        average = self._joined_state(run, MOMENTUM, tuple(run.matrices[0].shape))
        if runs_in_blocks(run.weights):
            return muon_cpu.direction(average, run.gradients, out, blend, self.workspace)
        return muon_cuda.direction(average, run.gradients, out, blend, self.workspace)

    def _orthogonalise(
        self,
        x: torch.Tensor,
        matrices: list[torch.Tensor],
        norms: Sequence[Norms],
        group: Mapping[str, float],
    ) -> torch.Tensor:
        """Orthogonalises `x`, (rows, cols) for one matrix or (matrices, rows, cols), in the form that the
        matrices use. On a CPU, an untrusted update in Gram form is repeated in standard form; on CUDA it
        becomes 0, or is left to `_move`, which skips it.

        Args:
            norms: The results of `_direction` for each run. A direction of norm 0 gives an exact update of
                zeros, so it is trusted whatever the estimated error.
        """
        if self._form(matrices[0]) == "standard":
            return newton_schulz(x, self.steps, self.workspace)
        if runs_in_blocks(matrices[0]):
            return self._gram_form_on_cpu(x, matrices, norms, group)
        return self._gram_form_on_cuda(x, matrices, norms)

    def _gram_form_on_cuda(self, x: torch.Tensor, matrices: list[torch.Tensor], norms: Sequence[Norms]) -> torch.Tensor:
        """Orthogonalises `x` in Gram form, and records which updates are trusted. An untrusted update becomes
        0; only with `fused` the fp32 result of a single matrix is left as it is, and `_move` skips it."""
        writes_fp32 = self.fused and x.dtype is torch.float16 and x.ndim == 2
        # The unscaled direction is no longer needed, so its buffer takes the result.
        into = self.workspace.like("muon_direction", matrices[0]) if writes_fp32 else None
        result, trusted = gram_newton_schulz(x, self.steps, self.workspace, into)
        trusted |= torch.cat([torch.as_tensor(norm).view(-1) for norm in norms]).view_as(trusted) == 0
        self._record_trust(matrices, trusted)
        if self.fused and x.ndim == 2 and result.dtype is torch.float32:
            return result  # `_move` skips it if it is untrusted
        # Filled rather than multiplied by 0, because an untrusted result may be NaN.
        return result.masked_fill_(trusted.logical_not().view(*trusted.shape, 1, 1), 0)

    def _gram_form_on_cpu(
        self, x: torch.Tensor, matrices: list[torch.Tensor], norms: Sequence[Norms], group: Mapping[str, float]
    ) -> torch.Tensor:
        """Orthogonalises `x` in Gram form, and repeats untrusted updates in standard form."""
        result, trusted = gram_newton_schulz(x, self.steps, self.workspace)
        updates = result.view(-1, *x.shape[-2:])
        norm_of_each = torch.cat([torch.as_tensor(norm, dtype=torch.float64).view(-1) for norm in norms]).tolist()
        for p, norm, update, is_trusted in zip(matrices, norm_of_each, updates, trusted.view(-1).tolist(), strict=True):
            if not is_trusted and norm:
                direction = torch.empty_like(update, dtype=self._standard)
                self._direction(Run.from_matrix(p), group["momentum"], direction, side=min(p.shape), again=True)
                update.copy_(newton_schulz(direction, self.steps, Workspace()))
                distrust(self.state[p])
                self._report_fallback(p)
        return result

    def _report_fallback(self, p: torch.Tensor) -> None:
        if self.on_fallback is not None:
            self.on_fallback(p, LOST)

    def _record_trust(self, matrices: Sequence[torch.Tensor], trusted: torch.Tensor) -> None:
        """Records on the device which updates are `trusted`. The flags have fixed addresses, so that a
        replayed graph writes them too."""
        if any(p not in self._trusted for p in matrices):
            for p, flag in zip(matrices, torch.ones_like(trusted).view(-1), strict=True):
                self._trusted.setdefault(p, flag)
        torch._foreach_copy_([self._trusted[p] for p in matrices], trusted.view(-1).unbind())

    def untrusted_count(self) -> torch.Tensor | None:
        """Returns the number of updates that the last step skipped because they could not be trusted: (), on
        the device. Returns None if no update was in Gram form on CUDA."""
        if not self._trusted:
            return None
        return torch.stack(list(self._trusted.values())).logical_not().sum()

    def distrust_skipped(self) -> list[torch.Tensor]:
        """Switches matrices to standard form for the next `STANDARD_STEPS` updates if their last update was
        skipped. The host waits for the device.

        Returns:
            The matrices whose last update was skipped.
        """
        skipped = [p for p, flag in self._trusted.items() if not bool(flag)]
        for p in skipped:
            distrust(self.state[p])
            self._trusted[p].fill_(True)
        return skipped

    @property
    def captures(self) -> int:
        """The number of CUDA graphs captured so far."""
        return sum(replayed.captures for replayed in self._replayed.values())

    def is_distrusted(self, p: torch.Tensor) -> bool:
        """Returns True if an earlier update was not trusted, so that the next one is in standard form."""
        return steps_left(self.state[p]) > 0

    def _form(self, p: torch.Tensor) -> Form:
        if self.is_distrusted(p):
            return "standard"
        return self.form if isinstance(self.form, str) else self.form[p.size(0), p.size(1)]

    def _iterate_dtype(self, p: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the iterate X of `p`."""
        return self.dtype if self._form(p) == "gram" else self._standard

    def _batch_key(self, p: torch.Tensor) -> tuple[tuple[int, ...], str, Form]:
        return tuple(p.shape), str(p.device), self._form(p)

    def _apply(
        self, run: Run, x: torch.Tensor, group: Mapping[str, float], trusted: torch.Tensor | None = None
    ) -> None:
        """Moves the weights of a run by the orthogonalised direction `x`.

        Args:
            trusted: See `_move`; None for matrices whose untrusted directions are 0: without `fused`, and in a
                stack.
        """
        rows, cols = run.matrices[0].shape
        self._move(run.weights, x, group, (rows, cols), trusted)

    def _move(
        self,
        p: torch.Tensor,
        x: torch.Tensor,
        group: Mapping[str, float],
        whole: Shape,
        trusted: torch.Tensor | None = None,
    ) -> None:
        """Computes p <- (1 - lr weight_decay) p - lr scale_factor scale x in place.

        Args:
            p: The fp32 weights of a matrix, of a run of matrices, or of a fragment of a matrix.
            x: The orthogonalised direction, of the shape of `p`.
            whole: The shape of the whole matrix, which determines the scale.
            trusted: On CUDA, for one matrix: () bool; if it is false and `x` is fp32, p only decays. None
                means trusted.
        """
        factor = self.scale_factor * scale(*whole, self.scale_mode)
        if runs_in_blocks(p):
            muon_cpu.move(p, x, group["lr"], group["weight_decay"], factor, self.workspace)
        else:
            muon_cuda.move(p, x, self._rates[id(group)], group["weight_decay"], factor, trusted)

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {MOMENTUM: tuple(p.shape)}

    def _joined_state(self, run: Run, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns one state tensor of all matrices of a run: `shape` for one matrix, (count, *shape) for
        several.

        Missing state starts at zero. If the state tensors are not evenly spaced in memory, for example after
        a checkpoint was loaded, they are first moved so that they are.
        """
        states: list[torch.Tensor | None] = [self.state[p].get(key) for p in run.matrices]
        present = [state for state in states if state is not None]
        if len(present) == len(states) and next(runs(present)) == slice(0, len(present)):
            return present[0] if len(present) == 1 else view_run(present)
        block = run.weights.new_zeros((len(states), *shape))
        for p, old, new in zip(run.matrices, states, block, strict=True):
            if old is not None:
                new.copy_(old)
            self.state[p][key] = new
        return block[0] if len(states) == 1 else block


def _parts(x: torch.Tensor, stack_runs: Sequence[Run]) -> Iterator[torch.Tensor]:
    """Yields each run's part of a stack (matrices, rows, cols), in the shape of the run's weights."""
    start = 0
    for run in stack_runs:
        end = start + len(run.matrices)
        yield x[start] if end - start == 1 else x[start:end]
        start = end


def scale(rows: int, cols: int, mode: ScaleMode) -> float:
    """Returns the factor by which the semi-orthogonal update of a (rows, cols) matrix is multiplied.

    - spectral: sqrt(max(rows, cols)), which gives updates the same RMS for every shape (arXiv:2502.16982).
    - unit_rms_norm: sqrt(rows / cols), which gives updates the same RMS-to-RMS operator norm (Bernstein 2025;
      Scion, arXiv:2502.07529).
    - shape_scaling: max(1, sqrt(rows / cols)) (Jordan et al. 2024).
    """
    if mode == "spectral":
        return math.sqrt(max(rows, cols))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return math.sqrt(max(1.0, rows / cols))


def runs_in_blocks(matrix: torch.Tensor) -> bool:
    """Returns True on CPUs, where passes over a matrix run in blocks of rows and the host may read norms."""
    return matrix.device.type == "cpu"


ROW_EPS = 1e-10
"""The term added to the root mean square of a row, as in the authors' code. In a matrix of up to 10,000
columns whose rows are orthonormal, the root mean square is at least 1e-2."""


class NorMuon(Muon):
    """NorMuon: divides the rows of Muon's orthogonalised momentum by the root of their second moment.

        O = as in Muon, (rows, cols)                         singular values about 1, rows of any norm
        v = row_beta v + (1 - row_beta) mean(O * O, dim=1)   (rows,): second moment of each neuron's update
        N = O / (sqrt(v) + eps),  N = N |O| / |N|            rows of similar norm, total norm as in Muon
        W = (1 - lr weight_decay) W - lr scale_factor scale(rows, cols) N

    Rows are output neurons. Both the mean of a row and |O| need the whole matrix, so NorMuon cannot update
    fragments as `shared_muon` does. The paper (Algorithm 1) scales N to a root mean square of 0.2. The
    authors' code, Microsoft's dion and emerging-optimizers keep |O| and leave the size to the scale, as this
    class does, so Muon's learning rates carry over. emerging-optimizers normalises columns where the matrix
    has more columns than rows.

    State of a matrix: Muon's, and `row_square`, v (rows,).
    """

    def __init__(self, params: ParamsT, lr: float, *, row_beta: float = 0.95, **settings: Unpack[MuonSettings]) -> None:
        """Args:
            params, lr, settings: As for Muon.
            row_beta: Decay of v.

        Raises:
            ValueError: `row_beta` is not in [0, 1), or a setting of Muon is not valid.
        """
        if not 0 <= row_beta < 1:
            raise ValueError(f"row_beta is {row_beta}; a moving average needs 0 <= decay < 1")
        super().__init__(params, lr, **settings)
        self.row_beta = row_beta

    def state_shapes(self, p: torch.Tensor) -> Mapping[str, tuple[int, ...] | None]:
        return {**super().state_shapes(p), "row_square": (p.size(0),)}

    def _apply(
        self, run: Run, x: torch.Tensor, group: Mapping[str, float], trusted: torch.Tensor | None = None
    ) -> None:
        rows, cols = run.weights.shape[-2:]
        # v and the tensors computed from it have the shape (rows,) or (count, rows).
        v = self._joined_state(run, "row_square", (rows,))
        row_norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        mean_squares = row_norms.square().div_(cols)
        if (flags := self._flags(run)) is not None:  # a skipped update does not change v
            mean_squares = torch.where(flags, mean_squares, v)
        v.lerp_(mean_squares, 1 - self.row_beta)
        factors = v.sqrt().add_(ROW_EPS).reciprocal_()
        # The norm of a matrix is the norm of its rows' norms. Both are 0 for a gradient of zeros.
        new_norm = torch.linalg.vector_norm(row_norms * factors, dim=-1, keepdim=True)
        new_norm.clamp_min_(torch.finfo(torch.float32).tiny)
        factors.mul_(torch.linalg.vector_norm(row_norms, dim=-1, keepdim=True) / new_norm)
        # The unscaled direction is no longer needed, so its buffer is reused.
        update = torch.mul(x, factors.unsqueeze(-1), out=self.workspace.like("muon_direction", run.weights))
        super()._apply(run, update, group, trusted)

    def _flags(self, run: Run) -> torch.Tensor | None:
        """Returns a flag for each matrix of a run, (1,) or (count, 1): true if its last update, in Gram form,
        can be trusted. Returns None if the updates were not in Gram form on CUDA."""
        flags = [self._trusted[p] for p in run.matrices if p in self._trusted]
        if len(flags) < len(run.matrices):
            return None
        return torch.stack(flags).view(*run.weights.shape[:-2], 1)
