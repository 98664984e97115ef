"""Resolves the runs that scripts plan and simulate: recipes on GPUs, in the layouts that `canzona train` chooses."""

from collections.abc import Sequence
from typing import get_args

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.setup import FastPath, Layout

VERIFIED = f"cluster.verified=[{','.join(get_args(FastPath))}]"
"""The override with which plans for GPUs may choose every fast path; without it, they are as shipped."""


def resolved(recipe: str, gpus: int, overrides: Sequence[str]) -> tuple[RunConfig, Layout] | None:
    """Returns the resolved run and its layout; None if no layout fits in memory."""
    try:
        return resolve(compose_run([f"recipe={recipe}", f"gpus={gpus}", *overrides]).config)
    except DoesNotFit:
        return None


def mesh_label(layout: Layout) -> str:
    """Formats a layout: `TP4 PP2x8 DP128`."""
    return f"TP{layout.tp} PP{layout.pp}x{layout.vpp} DP{layout.dp}"
