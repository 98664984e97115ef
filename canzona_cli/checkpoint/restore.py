"""Loads a checkpoint into a run with any layout, strategy or plan. Each rank reads only the state that it
updates.

Afterwards the weights are made from the masters as after an update: they are rounded, sent to the
tensor-parallel ranks, and gathered over the data-parallel ranks.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch

from canzona_cli.checkpoint.contents import AVERAGE, ELEMENTWISE, GROUP, MASTER, RANDOM, content_problems
from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, Scalar
from canzona_cli.checkpoint.reader import Reader, missing_tensor
from canzona_cli.checkpoint.snapshot import MasterPiece, master_pieces, set_random_states
from canzona_cli.checkpoint.verify import limit_problems, problem_of, read_manifest, table_problems, verify_file
from canzona_cli.core.engine.canzona_optimizer import CanzonaOptimizer
from canzona_cli.core.engine.masters import MasterOptimizer, UpdatedMatrix
from canzona_cli.core.errors import CheckpointInvalid, Problem, refuse
from canzona_cli.core.megatron.holdings import copy_masters_to_model, gather_parameters
from canzona_cli.core.megatron.matrix_buffers import global_parameters
from canzona_cli.core.megatron.model import Model, Trainee
from canzona_cli.core.megatron.parallel import World, gather
from canzona_cli.core.model.geometry import fragment_blocks, stored_blocks
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.optimizers.matrix_optimizer import MatrixOptimizer

_log = logging.getLogger(__name__)


def verify_together(world: World, folder: Path) -> Manifest:
    """Hashes every file of a checkpoint, with the files divided among the ranks, and returns the manifest.

    All ranks have to call this. No rank returns before all files have been verified.

    Raises:
        CheckpointInvalid: the manifest is not valid, or files do not match it. All ranks raise this with the
            same problems.
    """
    with raise_on_all_ranks(world, folder):
        manifest = read_manifest(folder)
        names = sorted(manifest.files)[world.rank :: world.world_size]
        results = [verify_file(folder, name, manifest.files[name]) for name in names]
        damaged = [problem for problem in results if problem is not None]
        problems = damaged or table_problems(folder, manifest, names)
        if problems:
            raise CheckpointInvalid(*problems)
    return manifest


@torch.no_grad()
def restore(trainee: Trainee, folder: Path, manifest: Manifest, *, weights_only: bool = False) -> None:
    """Restores weights, masters, optimizer state, schedule and random states from a checkpoint.

    All ranks have to call this. Random states belong to ranks, so they are restored only if the run has as
    many ranks as the run that saved the checkpoint.

    Args:
        weights_only: True to restore only weights and masters, from a checkpoint of any optimizer and
            splitting.

    Raises:
        CheckpointInvalid: the checkpoint lacks state that the run needs, or has state that cannot be used.
            All ranks raise this together.
    """
    world, config = trainee.world, trainee.setup
    averaged = config.train.ema > 0
    with raise_on_all_ranks(world, folder):
        refuse(limit_problems(content_problems(folder, manifest, config.model)), CheckpointInvalid)
    with raise_on_all_ranks(world, folder), Reader(folder, manifest, config.model) as reader:
        for _, pieces in groupby(master_pieces(trainee), key=lambda piece: id(piece.master)):
            _restore_master(list(pieces), reader, weights_only=weights_only, averaged=averaged)
        if isinstance(trainee.optimizer, CanzonaOptimizer):
            matrices = trainee.optimizer.matrices
            _restore_matrices(matrices, reader, manifest, weights_only=weights_only, averaged=averaged)
        stored = any(name.startswith(RANDOM) for name in manifest.tensors)  # imported checkpoints have none
        usable = stored and manifest.world_size == world.world_size and not weights_only
        if usable:
            set_random_states(reader.random_states(world.rank))
    publish_masters(trainee)
    if not weights_only:
        trainee.schedule.step(increment=manifest.progress.step - trainee.schedule.num_steps)


def publish_masters(trainee: Trainee) -> None:
    """Makes the model's weights from the masters, as an update does. All ranks have to call this."""
    copy_masters_to_model(trainee.optimizer)
    if isinstance(trainee.optimizer, CanzonaOptimizer):
        trainee.optimizer.matrices.publish()
    gather_parameters(trainee.chunks)


@contextmanager
def raise_on_all_ranks(world: World, folder: Path) -> Iterator[None]:
    """Raises CheckpointInvalid on all ranks if the block raises an exception on any rank.

    All ranks have to enter the block. The error lists each distinct problem once. If only the failing rank
    raised an error, the other ranks would wait for it forever in their next collective.
    """
    problems: list[Problem] = []
    try:
        yield
    except CheckpointInvalid as error:
        problems += error.problems
    except Exception as error:
        _log.exception("rank %d cannot read %s", world.rank, folder)
        reason = f"rank {world.rank} cannot read it: {type(error).__name__}: {error}"
        problems.append(problem_of(folder, MANIFEST, reason))
    by_rank = gather(problems, list[Problem])
    distinct = {(problem.key, problem.reason): problem for reported in by_rank for problem in reported}
    if distinct:
        raise CheckpointInvalid(*distinct.values())


def _restore_master(pieces: list[MasterPiece], reader: Reader, *, weights_only: bool, averaged: bool) -> None:
    """Restores one master and its optimizer state.

    Args:
        pieces: all pieces of the master.
        averaged: False to leave out the average of the weights.
    """
    item = pieces[0].master
    unit = pieces[0].piece.unit
    fields = [MASTER] if weights_only else reader.unit_fields(unit)
    fields = [field for field in fields if averaged or field != AVERAGE]
    if MASTER not in fields:
        raise CheckpointInvalid(missing_tensor(f"{unit}/{MASTER}"))
    if isinstance(item, UpdatedMatrix) and isinstance(item.optimizer, MatrixOptimizer):
        expected = {MASTER: None, AVERAGE: None, **(item.optimizer.state_shapes(item.master) or {})}
        if foreign := sorted(set(fields) - expected.keys()):
            raise CheckpointInvalid(reader.problem(f"{unit}: {foreign[0]} is not part of the optimizer state"))
    tensors = {field: torch.empty(item.master.numel()) for field in fields}
    for part in pieces:
        for field, target in tensors.items():
            target[part.offset : part.offset + part.piece.elements] = reader.piece(part.piece, field)
    item.master.copy_(tensors.pop(MASTER).view(item.master.shape))
    step = None if weights_only else reader.step(unit)
    if tensors or step is not None:
        item.replace_state({key: value.to(item.master.device) for key, value in tensors.items()}, step)
    if isinstance(item, UpdatedMatrix) and not weights_only:
        item.replace_marks(reader.marks(part.piece.unit for part in pieces))


def _restore_matrices(
    optimizer: MasterOptimizer, reader: Reader, manifest: Manifest, *, weights_only: bool, averaged: bool
) -> None:
    """Restores the matrices that this rank updates as a whole; for `averaged` see `_restore_master`."""
    state: dict[str, Mapping[str, object]] = {}
    problems: list[Problem] = []
    for updated in optimizer.whole:
        matrix, held_master = updated.matrix, updated.master
        fields, scalars = reader.fields(matrix.name), reader.scalars(matrix.name)
        if fields:
            selected = [MASTER] if weights_only else fields
            tensors = {field: reader.tensor(matrix.name, field) for field in selected}
        elif weights_only or manifest.optimizer in ELEMENTWISE:
            tensors, scalars = _assemble_from_units(matrix, reader, weights_only=weights_only)
        else:
            saved = manifest.splitting
            reason = f"{manifest.optimizer} keeps its state per matrix, "
            reason += f"and the checkpoint was saved with another splitting: {saved}"
            fix = f"engine.splitting={saved}"
            problems.append(Problem(key="engine.splitting", value=matrix.name, reason=reason, fix=fix))
            continue
        master = tensors.pop(MASTER, None)
        if master is None or master.shape != held_master.shape:
            problems.append(missing_tensor(f"{matrix.name}/{MASTER} of shape {matrix.shape}"))
            continue
        if weights_only:
            held_master.copy_(master)
            continue
        average = {AVERAGE: tensor} if (tensor := tensors.pop(AVERAGE, None)) is not None and averaged else {}
        matrix_scalars = {key: value for key, value in scalars.items() if not key.startswith(GROUP)}
        group_scalars = {key.removeprefix(GROUP): value for key, value in scalars.items() if key.startswith(GROUP)}
        if isinstance(updated.optimizer, MatrixOptimizer):
            tensors = dict(updated.optimizer.convert_state(held_master, tensors))
        if mismatch := state_mismatch(updated.optimizer, held_master, tensors, matrix_scalars, group_scalars):
            problems.append(reader.problem(f"{matrix.name}: {mismatch}"))
            continue
        placed = {
            key: tensor.to(held_master.device) if tensor.dim() else tensor
            for key, tensor in (tensors | average).items()
        }
        state[matrix.name] = {"master": master, "state": {**placed, **matrix_scalars}, "group": group_scalars}
    refuse(problems, CheckpointInvalid)
    if not weights_only:
        optimizer.load_state_dict(state)


def state_mismatch(
    optimizer: torch.optim.Optimizer,
    master: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    matrix_scalars: Mapping[str, Scalar],
    group_scalars: Mapping[str, Scalar],
) -> str:
    """Describes how the stored state of a matrix differs from the state that its optimizer keeps.

    Returns an empty string if they match. If no state is stored, or if the optimizer is a user's own, only
    `group_scalars` is compared.

    Args:
        tensors: the stored tensors of the matrix, excluding its master.
        matrix_scalars: the stored scalars of the matrix.
        group_scalars: the stored values of the parameter group, which all matrices share.
    """
    for key, value in group_scalars.items():
        current = optimizer.param_groups[0].get(key, value)
        if not isinstance(current, bool | int | float | str) or isinstance(current, str) != isinstance(value, str):
            return f"{key} of a parameter group cannot be a {type(value).__name__}"
    expected = optimizer.state_shapes(master) if isinstance(optimizer, MatrixOptimizer) else None
    if expected is None or not (tensors or matrix_scalars.keys() & expected.keys()):
        return ""
    for key in sorted(expected.keys() | tensors.keys()):
        shape, stored = expected.get(key), tensors.get(key)
        if shape is None and key in expected:
            if not isinstance(matrix_scalars.get(key), int):
                return f"{key} is not a number of steps"
        elif shape is None or stored is None:
            return f"{key} is {'missing' if stored is None else 'not part of the optimizer state'}"
        elif stored.dtype != torch.float32 or stored.shape != shape:
            return f"{key} is {stored.dtype} {tuple(stored.shape)}, but the optimizer keeps fp32 {shape}"
    return ""


def _assemble_from_units(
    matrix: Matrix, reader: Reader, *, weights_only: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Scalar]]:
    """Assembles the master and the state of a matrix that was saved in another splitting.

    Returns:
        The tensors by field (with `weights_only` only the master), and the scalars (`Reader.marks`).
    """
    model = reader.model
    blocks = stored_blocks(matrix.name, (matrix.rows, matrix.cols), model)
    tensors = {}
    for field in [MASTER] if weights_only else reader.unit_fields(blocks[0].unit):
        assembled = torch.empty(matrix.rows, matrix.cols)
        for block in blocks:
            assembled[block.row : block.row + block.rows] = reader.block(block, field)
        tensors[field] = assembled
    return tensors, reader.marks(block.unit for block in blocks)


@torch.no_grad()
def load_weights(model: Model, folder: Path, manifest: Manifest) -> None:
    """Loads this rank's parameters from the stored masters, rounded as in training. All ranks have to call
    this.

    Raises:
        CheckpointInvalid: the manifest does not match the model, or a weight is not stored or not finite. All
            ranks raise this together.
    """
    world, config = model.world, model.setup.model
    with raise_on_all_ranks(world, folder):
        refuse(limit_problems(content_problems(folder, manifest, config)), CheckpointInvalid)
        with Reader(folder, manifest, config) as reader:
            for name, parameter in global_parameters(model.chunks):
                tp, rank = world.cut(name, config)
                for block in fragment_blocks(name, parameter.shape, config, tp=tp, rank=rank):
                    rows = parameter.view(-1, block.cols)  # a bias of a linear layer is one column
                    rows[block.row : block.row + block.rows].copy_(reader.block(block, MASTER))
