"""The base of optimizers of whole matrices, whoever updates which: fp32 masters,
and state saved whole and by name."""

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer import MegatronOptimizer

from canzona_cli.model.matrices import Matrix
from canzona_cli.optimizers.matrix_optimizer import Workspace
from canzona_cli.optimizers.muon import Muon
from canzona_cli.optimizers.muon_facts import LOST

_log = logging.getLogger(__name__)


class MatrixGroup(Protocol):
    """Matrices this rank updates, or fragments of them, with one optimizer."""

    @property
    def hosted(self) -> tuple[Matrix, ...]: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None where this rank updates nothing of the group."""


@dataclass(frozen=True, kw_only=True)
class HeldFragment:
    """This rank's fragment of a shared matrix: its rows and columns as `Fragments.in_parameter` has them, 2-D."""

    matrix: Matrix
    master: torch.nn.Parameter
    """fp32."""
    optimizer: torch.optim.Optimizer

    @property
    def state(self) -> Mapping[str, object]:
        """Empty before the first step."""
        state: Mapping[str, object] = self.optimizer.state.get(self.master, {})
        return state

    @property
    def marks(self) -> Mapping[str, bool | int | float | str]:
        """The values in its state that are not tensors."""
        return {key: value for key, value in self.state.items() if isinstance(value, bool | int | float | str)}

    @property
    def step(self) -> None:
        """No optimizer that shares matrices counts steps."""

    def replace_state(self, tensors: Mapping[str, torch.Tensor], step: float | None) -> None:
        """Make `tensors`, each as long as the master, its state; what it had besides stays."""
        state = self.optimizer.state[self.master]
        state.update({key: value.view(self.master.shape) for key, value in tensors.items()})

    def replace_marks(self, marks: Mapping[str, bool | int | float | str | None]) -> None:
        """Make these what its state has besides tensors."""
        self.optimizer.state[self.master].update(marks)


def left_out(groups: Sequence[MatrixGroup], device: torch.device) -> torch.Tensor:
    """Counts the updates of the last step that were left out as not to be trusted: (1,), on the device,
    without waiting."""
    count = torch.zeros(1, device=device)
    for group in groups:
        if isinstance(group.optimizer, Muon) and (doubted := group.optimizer.doubted()) is not None:
            count += doubted
    return count


def settle(groups: Sequence[MatrixGroup], masters: Mapping[int, torch.nn.Parameter]) -> None:
    """Have matrices whose update was left out updated in standard form for the next steps. The host waits."""
    for group in groups:
        if not isinstance(group.optimizer, Muon):
            continue
        left = {id(master) for master in group.optimizer.settle()}
        for matrix in group.hosted:
            if id(masters[matrix.index]) in left:
                _log.warning("%s keeps its weight: %s", matrix.name, LOST)


class Fallbacks:
    """The fallbacks that optimizers took for a matrix: logged with the matrix's name, and counted.

    Args:
        hosted: matrices that this rank speaks for.
        masters: by matrix index; what the optimizers call their parameters.
    """

    def __init__(self, hosted: Iterable[Matrix], masters: Mapping[int, torch.nn.Parameter]) -> None:
        self._names = {id(masters[matrix.index]): matrix.name for matrix in hosted}
        self._count = 0

    def __call__(self, parameter: torch.Tensor, reason: str) -> None:
        if (name := self._names.get(id(parameter))) is not None:
            self._count += 1
            _log.warning("%s: %s", name, reason)

    def take(self) -> int:
        """Returns the number since the last call."""
        count, self._count = self._count, 0
        return count


class MasterOptimizer(MegatronOptimizer):  # type: ignore[misc]
    """The matrices' part of a `CanzonaOptimizer`; a subclass moves fragments and steps the groups' optimizers.

    Args:
        masters: by matrix index: the fp32 weights of what this rank updates, (rows, columns); of a shared
            matrix its fragment.
    """

    groups: Sequence[MatrixGroup]
    """The groups of whole matrices."""
    sharing: Sequence[MatrixGroup] = ()
    """The groups of fragments."""

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
        """Lists what this rank adds to the global gradient norm, so that every element counts once."""

    def begin(self) -> None:
        """Start what of the next update needs reduced gradients, but not their norm. It changes no state."""

    def discard(self) -> None:
        """Waits for what was begun and throws it away: there is no such update."""

    @abstractmethod
    def step_with_ready_grads(self) -> bool:
        """Update this rank's matrices from reduced gradients; True, as nothing is ever left out."""

    @abstractmethod
    def fallbacks(self) -> torch.Tensor:
        """Counts the updates of the last step that were not finite, or needed their optimizer's fallback;
        each counted on one rank of a `CanzonaOptimizer`'s `stats_group`. (1,), on the device."""

    @property
    def captures(self) -> int:
        """The CUDA graphs that this rank's optimizers have captured so far."""
        return sum(group.optimizer.captures for group in self.groups if isinstance(group.optimizer, Muon))

    @abstractmethod
    def repair(self) -> None:
        """Mend what the last update left broken. Collective over the TP ranks; the host waits."""

    @abstractmethod
    def publish(self) -> None:
        """Round masters into the weights, as an update does. Collective over the TP ranks."""

    @property
    @abstractmethod
    def exchange_bytes(self) -> int:
        """Bytes of message buffers and gradient scratch."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch that the groups' optimizers keep; what several share counts once."""
        scratch = (getattr(group.optimizer, "workspace", None) for group in (*self.groups, *self.sharing))
        return sum(space.nbytes for space in {each for each in scratch if isinstance(each, Workspace)})

    def set_gradient_scale(self, scale: float) -> None:
        """Sets what the next step multiplies gradients by: the clipping coefficient."""
        self._scale = scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Does nothing: gradients are used where Megatron reduced them."""
        return False

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The parameter groups of all groups' optimizers; a schedule sets `lr` and `weight_decay` in them."""
        optimizers = [group.optimizer for group in (*self.groups, *self.sharing)]
        return [params for optimizer in optimizers if optimizer is not None for params in optimizer.param_groups]

    @property
    def fragments(self) -> list[HeldFragment]:
        """The fragments of shared matrices that this rank has."""
        return [
            HeldFragment(matrix=matrix, master=self.masters[matrix.index], optimizer=group.optimizer)
            for group in self.sharing
            for matrix in group.hosted
            if group.optimizer is not None
        ]

    def get_parameters(self) -> list[torch.nn.Parameter]:
        return list(self.masters.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the model zeroes Megatron's gradient buffers, and masters have gradients only while
        they are updated."""

    def get_loss_scale(self) -> torch.Tensor:
        return torch.ones(1, device=self._device)

    def step(self) -> tuple[bool, float | None, int | None]:
        raise RuntimeError("the matrices are updated as a part of CanzonaOptimizer.step, after the global norm")

    def state_dict(self) -> dict[str, object]:
        """Returns the state of the matrices hosted here, whole, by name; that of `fragments` is not in it.

        Of each: "master", fp32; "state", the optimizer's own; "group", what it counts for all matrices
        together.
        """
        self.repair()
        saved: dict[str, object] = {}
        for group in self.groups:
            for matrix in group.hosted:
                assert group.optimizer is not None
                master = self.masters[matrix.index]
                saved[matrix.name] = {
                    "master": master.detach(),
                    "state": dict(group.optimizer.state.get(master, {})),
                    "group": _counted(group.optimizer),
                }
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, object]]) -> None:
        """Loads what `state_dict` returned: each matrix hosted here is looked up by name.

        Raises:
            KeyError: a matrix hosted here is not in it.
        """
        for group in self.groups:
            for matrix in group.hosted:
                assert group.optimizer is not None
                saved = state_dict[matrix.name]
                master, weights, state = self.masters[matrix.index], saved["master"], saved["state"]
                assert isinstance(weights, torch.Tensor)
                assert isinstance(state, Mapping)
                master.copy_(weights)
                group.optimizer.state[master] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()
                }
                counted = saved.get("group", {})
                assert isinstance(counted, Mapping)
                group.optimizer.param_groups[0].update(counted)

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        raise NotImplementedError("canzona saves whole matrices (state_dict), not Megatron's sharded optimizer state")


def _counted(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Collects what an optimizer itself has changed in its parameter group; the schedule changes rate and
    decay, the user the rest."""
    return {
        key: value
        for key, value in optimizer.param_groups[0].items()
        if key not in ("params", "lr", "weight_decay")
        and isinstance(value, bool | int | float | str)
        and value != optimizer.defaults.get(key)
    }
