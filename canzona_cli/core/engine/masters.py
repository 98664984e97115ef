"""The base class of the engine's optimizers for matrices: it keeps fp32 masters, and saves the state of whole
matrices by name. Subclasses differ in which ranks update a matrix."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer

from canzona_cli.core.errors import Problem, Unsupported
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.matrix_optimizer import Workspace
from canzona_cli.core.optimizers.muon import Muon
from canzona_cli.core.optimizers.muon_facts import LOST

_ON_DEVICE: Final = "fp32 masters and optimizer state of matrices stay on the device that updates them"
_IN_STEP: Final = "the norm is computed, and gradients are clipped, within step()"
_SAVED: Final = "no rank has the state of all matrices, and Megatron's format `torch` cannot store it by host"
_WEIGHTS: Final = "use sharded_state_dict and load_state_dict (Megatron-LM: --ckpt-format torch_dist)"


def refuse_masters(state_dict: object) -> None:
    """Raises Unsupported if the caller wants masters to be copied from a loaded state instead of the
    weights."""
    if state_dict is not None:
        reason = "masters of matrices are copied from the weights"
        fix = "call it without state_dict (Megatron-LM: remove --load-main-params-from-ckpt)"
        raise Unsupported(Problem(key="reload_model_params", value="state_dict", reason=reason, fix=fix))


def _refused(name: str, reason: str, fix: str) -> Callable[..., NoReturn]:
    """Returns a method that raises Unsupported."""

    def method(*_: object, **__: object) -> NoReturn:
        raise Unsupported(Problem(key=name, reason=reason, fix=fix))

    method.__name__ = name
    return method


class Refusals:
    """The methods that raise Unsupported on the part of `CanzonaOptimizer` that updates matrices, and, except
    `sharded_state_dict`, on `CanzonaOptimizer` itself: Megatron's versions would silently ignore the matrices."""

    offload_to_cpu = _refused("offload_to_cpu", _ON_DEVICE, "free other memory, or build the engine again")
    restore_from_cpu = _refused("restore_from_cpu", _ON_DEVICE, "remove the call")
    count_zeros = _refused("count_zeros", "no rank has the gradients of all matrices", "remove the call")
    clip_grad_norm = _refused("clip_grad_norm", _IN_STEP, "call step()")
    get_grads_for_grad_norm = _refused("get_grads_for_grad_norm", _IN_STEP, "call get_grad_norm()")
    has_grad_norm_group = _refused("has_grad_norm_group", _IN_STEP, "call step()")
    sharded_state_dict = _refused("sharded_state_dict", _SAVED, _WEIGHTS)
    save_parameter_state = _refused("save_parameter_state", _SAVED, _WEIGHTS)
    load_parameter_state = _refused("load_parameter_state", _SAVED, _WEIGHTS)
    save_state_dict_to_file = _refused("save_state_dict_to_file", _SAVED, _WEIGHTS)
    load_state_dict_from_file = _refused("load_state_dict_from_file", _SAVED, _WEIGHTS)


class SavingRefusals(Refusals):
    """The methods that raise Unsupported on `CanzonaOptimizer`, which loads only sharded state, but work on
    the part of it that updates matrices."""

    state_dict = _refused("state_dict", _SAVED, _WEIGHTS)
    load_state_dict = _refused("load_state_dict", _SAVED, _WEIGHTS)


_log = logging.getLogger(__name__)


class MatrixGroup(Protocol):
    """Matrices, or fragments of matrices, that this rank updates with one optimizer."""

    @property
    def hosted(self) -> tuple[Matrix, ...]:
        """The matrices of the group that this rank updates."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None if this rank does not update any matrix of the group."""


type Mark = bool | int | float | str
"""A value of an optimizer's state that is not a tensor, such as a counter."""


@dataclass(frozen=True, kw_only=True)
class UpdatedMatrix:
    """A matrix that this rank updates, or this rank's fragment of a shared matrix (the elements of
    `Fragments.view_in_parameter`, as a 2-D matrix)."""

    matrix: Matrix
    master: torch.nn.Parameter
    """The fp32 weights of the matrix or the fragment, 2-D."""
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> Mapping[str, object]:
        """The optimizer's state of the matrix; empty before the first step."""
        state: Mapping[str, object] = self.optimizer.state.get(self.master, {})
        return state

    @property
    def marks(self) -> dict[str, Mark]:
        """The values of the state that are not tensors."""
        return {key: value for key, value in self.state.items() if isinstance(value, bool | int | float | str)}

    def replace_state(self, tensors: Mapping[str, torch.Tensor], step: float | None) -> None:
        """Stores `tensors`, each with as many elements as the master, in the state; other entries are kept.
        `step` is ignored, because the optimizers of fragments do not count steps."""
        state = self.optimizer.state[self.master]
        state.update({key: value.view(self.master.shape) for key, value in tensors.items()})

    def reset(self) -> None:
        """Deletes the state after an update that was not finite; the caller has restored the weights."""
        self.optimizer.state.pop(self.master, None)
        _log.warning(
            "%s keeps its weight because its update was not finite; its optimizer state is reset", self.matrix.name
        )

    def replace_marks(self, marks: Mapping[str, Mark | None]) -> None:
        """Stores `marks`, values that are not tensors, in the state; other entries are kept."""
        self.optimizer.state[self.master].update(marks)


def skipped_updates(groups: Sequence[MatrixGroup], device: torch.device) -> torch.Tensor:
    """Returns the number of updates that the last step skipped because they could not be trusted: (1,), on
    the device. The host does not wait."""
    count = torch.zeros(1, device=device)
    for group in groups:
        if isinstance(group.optimizer, Muon) and (untrusted := group.optimizer.untrusted_count()) is not None:
            count += untrusted
    return count


def distrust_skipped(groups: Sequence[MatrixGroup], masters: Mapping[int, torch.nn.Parameter]) -> None:
    """Switches matrices to the standard form for their next updates if their last update was skipped, and
    logs their names. The host waits for the device."""
    names = {id(masters[matrix.index]): matrix.name for group in groups for matrix in group.hosted}
    for group in groups:
        if isinstance(group.optimizer, Muon):
            for master in group.optimizer.distrust_skipped():
                _log.warning("%s: the last update was skipped because %s", names[id(master)], LOST)


class Fallbacks:
    """A callback for optimizers that logs each fallback with the name of its matrix, and counts the
    fallbacks.

    Args:
        counted: the matrices whose fallbacks this rank logs and counts; fallbacks of other matrices are
            ignored.
        masters: the optimizers' parameters, by matrix index.
    """

    def __init__(self, counted: Iterable[Matrix], masters: Mapping[int, torch.nn.Parameter]) -> None:
        self._names = {id(masters[matrix.index]): matrix.name for matrix in counted}
        self._count = 0

    def __call__(self, parameter: torch.Tensor, reason: str) -> None:
        if (name := self._names.get(id(parameter))) is not None:
            self._count += 1
            _log.warning("%s: %s", name, reason)

    def take(self) -> int:
        """Returns the number of fallbacks since the last call."""
        count, self._count = self._count, 0
        return count


@dataclass(frozen=True, kw_only=True)
class AllOptimizers:
    """The optimizers of all groups, presented as a single optimizer for code that reads a Megatron
    optimizer's `optimizer`."""

    param_groups: list[dict[str, object]]
    state: Mapping[torch.Tensor, Mapping[str, object]]
    """The state of each master."""


class MasterOptimizer(Refusals, MegatronOptimizer):  # type: ignore[misc]
    """The part of a `CanzonaOptimizer` that updates matrices. A subclass moves fragments and steps the
    optimizers of its groups.

    Args:
        masters: the fp32 weights that this rank updates, by matrix index: whole matrices (rows, columns), and
            fragments of shared matrices.
    """

    groups: Sequence[MatrixGroup]
    """The groups of whole matrices."""
    sharing: Sequence[MatrixGroup] = ()
    """The groups of fragments of shared matrices."""

    def __init__(
        self,
        config: MegatronOptimizerConfig,
        chunks: Sequence[torch.nn.Module],
        masters: Mapping[int, torch.nn.Parameter],
        device: torch.device,
    ) -> None:
        self.config = config
        self.is_stub_optimizer = False
        self.model_chunks = list(chunks)
        self.masters = masters
        self._device = device
        self._scale = 1.0

    @abstractmethod
    def gradients_for_norm(self) -> list[torch.Tensor]:
        """Returns the gradients that this rank contributes to the global gradient norm. The ranks of
        `CanzonaOptimizer`'s `stats_group` together contribute every element once."""

    def begin(self) -> None:
        """Starts the part of the next update that needs reduced gradients but not their norm. Does not change
        any state."""

    def discard(self) -> None:
        """Waits for the communication that `begin` started and discards its results, because this step does
        not update the matrices."""

    @abstractmethod
    def step_with_ready_grads(self) -> bool:
        """Updates this rank's matrices from reduced gradients. Always returns True, because it is not called
        in a skipped step."""

    @abstractmethod
    def fallbacks(self) -> torch.Tensor:
        """Returns the number of updates of the last step that were not finite or needed their optimizer's
        fallback: (1,), on the device. Each update is counted by only one rank of `CanzonaOptimizer`'s
        `stats_group`."""

    @property
    def captures(self) -> int:
        """The number of CUDA graphs that the optimizers of this rank's whole matrices have captured so
        far."""
        return sum(group.optimizer.captures for group in self.groups if isinstance(group.optimizer, Muon))

    @abstractmethod
    def repair(self) -> None:
        """Repairs matrices whose last update failed. Collective over the TP ranks; the host waits for the
        device."""

    @abstractmethod
    def publish(self) -> None:
        """Writes the rounded masters to the model's weights, as an update does. Collective over the TP
        ranks."""

    @property
    def scratch_bytes(self) -> int:
        """The size of message buffers and scratch in bytes; a workspace that several optimizers share counts
        once."""
        workspaces = {getattr(optimizer, "workspace", None) for optimizer in self._optimizers()}
        return sum(workspace.nbytes for workspace in workspaces if isinstance(workspace, Workspace))

    def set_gradient_scale(self, scale: float) -> None:
        """Sets the clipping coefficient by which the next step multiplies gradients."""
        self._scale = scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Does nothing, because gradients are read from Megatron's buffers. Returns False, because it did not
        find infinite gradients."""
        return False

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The parameter groups of all optimizers of this rank's matrices; a schedule sets their `lr` and
        `weight_decay`."""
        return [params for optimizer in self._optimizers() for params in optimizer.param_groups]

    @property
    def optimizer(self) -> AllOptimizers:
        """The optimizers of this rank's matrices as a single optimizer. Adding entries to its `state` has no
        effect."""
        states = {master: state for optimizer in self._optimizers() for master, state in optimizer.state.items()}
        return AllOptimizers(param_groups=self.param_groups, state=states)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers of all groups in which this rank updates matrices."""
        return [group.optimizer for group in (*self.groups, *self.sharing) if group.optimizer is not None]

    @property
    def whole(self) -> list[UpdatedMatrix]:
        """The whole matrices that this rank updates."""
        return self._updated(self.groups)

    @property
    def fragments(self) -> list[UpdatedMatrix]:
        """The fragments of shared matrices that this rank has."""
        return self._updated(self.sharing)

    def _updated(self, groups: Sequence[MatrixGroup]) -> list[UpdatedMatrix]:
        return [
            UpdatedMatrix(matrix=matrix, master=self.masters[matrix.index], optimizer=group.optimizer)
            for group in groups
            for matrix in group.hosted
            if group.optimizer is not None
        ]

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return list(self.masters.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing, because the model zeroes Megatron's gradient buffers, and masters have gradients only
        during their update."""

    def get_loss_scale(self) -> torch.Tensor:
        return torch.ones(1, device=self._device)

    def step(self) -> tuple[bool, float | None, int | None]:
        raise RuntimeError("the matrices are updated as a part of CanzonaOptimizer.step, after the global norm")

    def state_dict(self) -> dict[str, object]:
        """Returns the state of the whole matrices that this rank hosts, by name, after repairing failed
        updates. The state of `fragments` is not included.

        Each entry has "master", the fp32 weight; "state", the optimizer's state of the matrix; and "group",
        values of the parameter group that the optimizer has changed, such as counters.
        """
        self.repair()
        saved: dict[str, object] = {}
        for updated in self.whole:
            saved[updated.matrix.name] = {
                "master": updated.master.detach(),
                "state": dict(updated.state),
                "group": _changed_values(updated.optimizer),
            }
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, object]]) -> None:
        """Loads the matrices that this rank hosts, by name, from the result of `state_dict`.

        Raises:
            KeyError: a matrix that this rank hosts is missing.
        """
        for updated in self.whole:
            saved = state_dict[updated.matrix.name]
            weights, state, changed = saved["master"], saved["state"], saved.get("group", {})
            assert isinstance(weights, torch.Tensor)
            assert isinstance(state, Mapping)
            assert isinstance(changed, Mapping)
            updated.master.copy_(weights)
            updated.optimizer.state[updated.master] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
            }
            updated.optimizer.param_groups[0].update(changed)


def _changed_values(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Returns the values of the optimizer's first parameter group that the optimizer itself has changed, such
    as counters. Learning rate and weight decay are not included, because the schedule sets them."""
    return {
        key: value
        for key, value in optimizer.param_groups[0].items()
        if key not in ("params", "lr", "weight_decay")
        and isinstance(value, bool | int | float | str)
        and value != optimizer.defaults.get(key)
    }
