"""A checkpoint's weights, into a model that nothing trains: no optimizer, no buffers, on any layout."""

from pathlib import Path

import torch

from canzona_cli.checkpoint.contents import MASTER, content_problems
from canzona_cli.checkpoint.manifest import Manifest
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.checkpoint.restore import together
from canzona_cli.checkpoint.verify import shortened
from canzona_cli.errors import CheckpointInvalid, refuse
from canzona_cli.megatron.matrix_buffers import global_parameters
from canzona_cli.megatron.trainee import Model
from canzona_cli.model.geometry import fragment_blocks


@torch.no_grad()
def load_weights(model: Model, folder: Path, manifest: Manifest) -> None:
    """Every parameter of this rank from its master, rounded as training rounds it. Collective.

    Raises:
        CheckpointInvalid: on all ranks together: a weight is not in it, or is no number.
    """
    world, shape = model.world, model.config.model
    with together(world, folder):
        refuse(shortened(content_problems(folder, manifest, shape)), CheckpointInvalid)
        with Reader(folder, manifest, shape) as reader:
            for name, parameter in global_parameters(model.chunks):
                rows = parameter.view(-1, parameter.size(-1))
                for block in fragment_blocks(name, parameter.shape, shape, tp=world.layout.tp, rank=world.tp_rank):
                    region = reader.region(
                        block.unit, MASTER, row=block.unit_row, rows=block.rows, col=block.unit_col, cols=block.cols
                    )
                    rows[block.row : block.row + block.rows].copy_(region)
