"""Saves the engine's optimizer in Megatron's checkpoints (`megatron.core.dist_checkpointing`), and loads it
from them.

The fp32 masters and the momentum of matrices have the keys and the layout that Megatron's layer-wise Muon
uses: the key and layout of the weight, after the prefix `optimizer.state.fp32_param` or
`optimizer.state.momentum_buffer`. Every rank writes and reads only the rows that it updates, so nothing is
sent, and a checkpoint depends neither on the plan nor on the number of ranks. Other state, such as SOAP's, is
stored under the names of matrices. AdamW's state is in Megatron's format `fully_reshardable`.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer

from canzona_cli.core.engine.masters import Mark, MasterOptimizer, UpdatedMatrix
from canzona_cli.core.engine.planned import PlannedOptimizer
from canzona_cli.core.engine.stored_state import (
    ADAMWS_MASTER,
    MUONS_MASTER,
    OURS,
    SHARDING,
    STATE,
    stored_step,
    zero_moments,
)
from canzona_cli.core.errors import Problem, Unsupported
from canzona_cli.core.megatron.holdings import megatron_masters
from canzona_cli.core.megatron.matrix_buffers import TAG, global_parameters
from canzona_cli.core.megatron.optimizer import muon_groups
from canzona_cli.core.megatron.parallel import Wrapped, gather
from canzona_cli.core.model.geometry import Block
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.facts import MOMENTS, MOMENTUM
from canzona_cli.core.optimizers.matrix_optimizer import MatrixOptimizer

_LIKE_WEIGHTS: Final = {MUONS_MASTER: (MUONS_MASTER, ADAMWS_MASTER), MOMENTUM: (MOMENTUM, MOMENTS[0])}
"""The fields of matrices that are laid out like weights. Each has two names: the first in checkpoints of
Megatron's Muon, the second in checkpoints of its AdamW. AdamW's first moment can serve as momentum, because
both are moving averages of gradients."""
_ADAMW: Final = {ADAMWS_MASTER: (ADAMWS_MASTER, MUONS_MASTER), **{name: (name,) for name in MOMENTS}}
"""AdamW's fields, each with its name in checkpoints of Megatron's distributed optimizer, followed by a
different name, if any, in checkpoints of its other optimizers."""
_ENTRIES: Final = "canzona"
"""The key, in a checkpoint's dict, of the entries that only canzona reads."""
_LOG: Final = logging.getLogger(__name__)
_WEIGHTS_ALONE: Final = "load only the weights: --no-load-optim"

type StateDict = Mapping[object, object]
type Entry = ShardedTensor | ShardedTensorFactory
"""The entry of a parameter in a model's `sharded_state_dict`."""


@dataclass(frozen=True, kw_only=True)
class _PlacedMatrix(UpdatedMatrix):
    """An updated matrix or fragment, and its place in the parameter."""

    optimizer: MatrixOptimizer
    blocks: tuple[Block, ...]
    """The positions of the master's rows in the whole parameter."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...] | None]:
        return self.optimizer.state_shapes(self.master) or {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The master and the state's tensors; zeros for tensors that do not exist yet."""
        state = self.state
        missing = {key: shape for key, shape in self.shapes.items() if shape is not None and key not in state}
        return {
            MUONS_MASTER: self.master.detach(),
            **{key: self.master.new_zeros(shape) for key, shape in missing.items()},
            **{key: value for key, value in state.items() if isinstance(value, torch.Tensor)},
        }

    def adopt(self, tensors: Mapping[str, torch.Tensor], marks: Mapping[str, Mark]) -> None:
        """Replaces the optimizer's state by the state from a checkpoint. If counters that the optimizer needs
        are missing, the checkpoint was saved before the matrix's first step, and nothing changes."""
        if all(shape is not None or key in marks for key, shape in self.shapes.items()):
            state = {key: tensor for key, tensor in tensors.items() if key != MUONS_MASTER}
            self.optimizer.state[self.master] = {**state, **marks}

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, Block | None, torch.Tensor]]:
        """Yields the state's pieces as (name, field, position in the whole parameter, rows). State that is
        not laid out like the weight is a single piece, whose position is None."""
        for field, tensor in tensors.items():
            blocks: Sequence[Block | None] = self.blocks if field in _LIKE_WEIGHTS else (None,)
            for index, block in enumerate(blocks):
                piece = tensor if block is None else tensor[block.row : block.row + block.rows]
                yield f"{self.matrix.name}/{field}/{index}", field, block, piece

    def entries(
        self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], weight: Entry
    ) -> Iterator[tuple[str, ShardedTensor]]:
        """Yields, for each piece of the state, its name and its entry in a checkpoint.

        Args:
            names: the name of each field in the checkpoint.
            weight: the parameter's entry in the model's `sharded_state_dict`.
        """
        while isinstance(weight, ShardedTensorFactory):  # a factory builds the entries of gate and up
            weight = weight.build()[0]
        layer_axes = weight.prepend_axis_num
        for name, field, block, piece in self.pieces(tensors):
            if block is None:
                yield name, ShardedTensor.from_rank_offsets(_canzona_key(field, self.matrix), piece)
                continue
            # Megatron prepends the axis of layers only if all pieces have one shape, so each piece has that
            # axis here.
            data = piece.view((1,) * layer_axes + piece.shape)
            offset = (*weight.global_offset[:layer_axes], block.unit_row, block.unit_col)
            key = f"{STATE}{names[field]}.{weight.key}"
            yield name, ShardedTensor(key, data, data.dtype, tuple(data.shape), weight.global_shape, offset, None)


def state_problem(
    matrices: MasterOptimizer, metadata: Mapping[str, object], formats: Collection[object]
) -> Problem | None:
    """Returns the reason why this rank's state cannot be saved in, or loaded from, a checkpoint; None if it
    can.

    Args:
        metadata: Megatron's metadata of the checkpoint.
        formats: the supported formats of AdamW's state; the format None is state that Megatron does not
            shard.
    """
    sharding = metadata.get("distrib_optim_sharding_type")
    if sharding not in formats:
        reason = "in this format (distrib_optim_sharding_type) AdamW's state depends on the layout of ranks and buckets"
        fix = f"save with {SHARDING} (Megatron-LM: --dist-ckpt-optim-fully-reshardable)"
        return Problem(key="sharded_state_dict", value=sharding, reason=reason, fix=fix)
    if isinstance(matrices, PlannedOptimizer) and all(
        isinstance(updated.optimizer, MatrixOptimizer) and updated.optimizer.state_shapes(updated.master) is not None
        for updated in (*matrices.whole, *matrices.fragments)
    ):
        return None
    reason = "the shapes of the state of its matrices are not known"
    fix = "save and load only the weights (Megatron-LM: --no-save-optim, --no-load-optim)"
    return Problem(key="sharded_state_dict", reason=reason, fix=fix)


class ShardedState:
    """The state of one rank's optimizers as entries of Megatron's checkpoints.

    Args:
        adamw: Megatron's `DistributedOptimizer`.
        stored: the keys of the checkpoint to load; None if it has the keys that `to_save` writes.
    """

    def __init__(
        self,
        adamw: MegatronOptimizer,
        matrices: PlannedOptimizer,
        chunks: Wrapped,
        stored: Collection[str] | None = None,
    ) -> None:
        self._adamw, self._matrices, self._chunks, self._stored = adamw, matrices, chunks, stored
        self._updated = [
            _PlacedMatrix(**vars(updated), blocks=blocks)
            for updated, blocks in matrices.placements()
            if isinstance(updated.optimizer, MatrixOptimizer)
        ]
        self._targets: dict[str, dict[str, torch.Tensor]] = {}
        """The tensors that each matrix's state is loaded into, by matrix name."""
        self.has_masters = True
        """False if the checkpoint to load was saved by fp32 training, in which the weights themselves may be
        the masters."""

    def to_save(self, model: StateDict, metadata: Mapping[str, object]) -> dict[object, object]:
        """Returns the state in the form in which Megatron saves its layer-wise Muon with AdamW. Collective.

        Args:
            model: the model's `sharded_state_dict`.
        """
        self._matrices.repair()
        weights = self._weights(model)
        names = {field: field for field in _LIKE_WEIGHTS}
        state: dict[str, ShardedTensor] = {}
        for updated in self._updated:
            state |= updated.entries(updated.tensors, names, weights[updated.matrix.parameter])
        marks: dict[str, dict[str, Mark]] = {}
        marks_here = {updated.matrix.name: updated.marks for updated in self._updated if updated.marks}
        for marks_of_rank in gather(marks_here, dict[str, dict[str, Mark]]):
            marks |= marks_of_rank
        adamw = self._adamw.sharded_state_dict(model, metadata=metadata)
        for group in adamw["optimizer"]["param_groups"]:
            group["optimizer"] = "adam"  # as Megatron marks AdamW's groups next to Muon's
        muon = {"param_groups": muon_groups(self._matrices.config, self._chunks), "state": state}
        return {0: {"optimizer": muon, _ENTRIES: marks}, 1: adamw}

    def to_load(self, model: StateDict) -> dict[object, object]:
        """Returns the entries into which a checkpoint is to be read before `adopt` is called. The masters and
        state of matrices are read directly into this rank's tensors.

        Args:
            model: the model's `sharded_state_dict`.

        Raises:
            Unsupported: the checkpoint was saved by another optimizer.
        """
        weights = self._weights(model)
        matrices: dict[str, ShardedTensor] = {}
        for updated in self._updated:
            weight, tensors = weights[updated.matrix.parameter], updated.tensors
            for field in tensors.keys() - _LIKE_WEIGHTS.keys():
                self._refuse_missing(_canzona_key(field, updated.matrix))
            names = self._names(
                weight.key, {field: _LIKE_WEIGHTS[field] for field in tensors if field in _LIKE_WEIGHTS}
            )
            loaded = {
                field: tensor for field, tensor in tensors.items() if field in names or field not in _LIKE_WEIGHTS
            }
            self._targets[updated.matrix.name] = loaded
            matrices |= updated.entries(loaded, names, weight)
        # As with Megatron's own optimizer, every rank reads all of AdamW's parameters, on the host.
        adamw = {
            name: {
                field: make_sharded_optimizer_tensor(weights[name], torch.empty(param.shape), f"{STATE}{stored}")
                for field, stored in self._adamws_names(weights[name].key).items()
            }
            for name, param in global_parameters(self._chunks)
            if param.requires_grad and not getattr(param, TAG)
        }
        of_muon = [weights[name].key for name, fields in adamw.items() if MOMENTS[0] not in fields]
        if of_muon and torch.distributed.get_rank() == 0:
            _LOG.warning(zero_moments(of_muon))
        return {_ENTRIES: {"matrices": matrices, "adamw": adamw}}

    @torch.no_grad()
    def adopt(self, state: StateDict) -> bool:
        """Loads into the optimizers the state that `dist_checkpointing.load` has read into the entries of
        `to_load`. Returns False for any other state, and then changes nothing.

        Raises:
            Unsupported: the number of AdamW's steps is missing.
        """
        entries = state.get(_ENTRIES)
        if not isinstance(entries, Mapping):
            return False
        muon = state.get(0)
        marks = muon.get(_ENTRIES, {}) if isinstance(muon, Mapping) else {}
        for updated in self._updated:
            tensors = self._targets[updated.matrix.name]
            for name, _, _, piece in updated.pieces(tensors):
                source = entries["matrices"][name]
                if source.data_ptr() != piece.data_ptr():  # not read in place
                    piece.copy_(source.view_as(piece))
            updated.adopt(tensors, marks.get(updated.matrix.name, {}))
        step = stored_step({key: value for key, value in state.items() if key != _ENTRIES})
        if step is None:
            reason = "it does not contain the number of AdamW's steps"
            raise Unsupported(Problem(key="load", value="step", reason=reason, fix=_WEIGHTS_ALONE))
        for item in megatron_masters(self._adamw, self._chunks):
            fields = entries["adamw"].get(item.parameter, {}).items()  # Megatron drops empty dicts
            parts = {field: tensor.view(-1)[item.start : item.end] for field, tensor in fields}
            if (master := parts.pop(ADAMWS_MASTER, None)) is not None:
                item.master.copy_(master.view(item.master.shape))
            moments = {key: part.to(item.master.device, copy=True) for key, part in parts.items()}
            item.replace_state({key: torch.zeros_like(item.master) for key in MOMENTS} | moments, step)
        return True

    def _weights(self, model: StateDict) -> dict[str, Entry]:
        """Returns the entries of this rank's parameters, by their names in the whole model."""
        named = [*global_parameters(self._chunks)]
        entries = get_param_id_to_sharded_param_map(model, [param for _, param in named])
        return {named[index][0]: entry for index, entry in entries.items()}

    def _adamws_names(self, weight_key: str) -> dict[str, str]:
        """Returns the names that the fields of one of AdamW's parameters have in the checkpoint. A parameter has no
        moments there if Megatron's Muon updated it, which takes routers and learned positions for matrices."""
        updated_by_muon = self._stored is not None and f"{STATE}{MOMENTUM}.{weight_key}" in self._stored
        fields = {field: names for field, names in _ADAMW.items() if not (updated_by_muon and field in MOMENTS)}
        return self._names(weight_key, fields)

    def _names(self, weight_key: str, fields: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """Returns the name that each field of a parameter's state has in the checkpoint. The master is not
        included if the checkpoint has no masters.

        Args:
            weight_key: the key of the parameter.
            fields: the possible names of each field.
        """
        names: dict[str, str] = {}
        for field, possible in fields.items():
            keys = {name: f"{STATE}{name}.{weight_key}" for name in possible}
            stored = [name for name, key in keys.items() if self._stored is None or key in self._stored]
            if stored:
                names[field] = stored[0]
            elif field in (MUONS_MASTER, ADAMWS_MASTER):
                self.has_masters = False
            else:
                self._refuse_missing(keys[field])
        return names

    def _refuse_missing(self, key: str) -> None:
        if self._stored is not None and key not in self._stored:
            reason = "the checkpoint does not have this key: it was saved by another optimizer"
            raise Unsupported(Problem(key="load", value=key, reason=reason, fix=_WEIGHTS_ALONE))


def _canzona_key(field: str, matrix: Matrix) -> str:
    return f"{OURS}{field}.{matrix.name}"
