"""Cluster profiles as files: the built-in ones, the user's own,
and whether each could be of a real machine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.cluster.gpus import with_layers_here
from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import (
    builtin_recipes_dir,
    find_file,
    find_option,
    group_options,
    is_file_name,
    user_recipes_dirs,
)
from canzona_cli.config.schema import ClusterConfig
from canzona_cli.errors import ConfigError, Problem

WITHOUT_FUSED_LAYERS = "13 to 20% fewer tokens a second"
"""The loss of `canzona train --dry-run` with cluster.transformer_engine=false, 0.6B to 32B on 1 to 256 H100."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One file."""

    name: str
    path: Path
    builtin: bool
    cluster: ClusterConfig | None
    """None where it has problems."""
    problems: tuple[Problem, ...] = ()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def renamed(self, name: str) -> str:
        """The file's text under another name."""
        line = f"name: {name}"
        text, replaced = re.subn(r"^name:.*$", line, self.text, count=1, flags=re.MULTILINE)
        return text if replaced else f"{line}\n{text}"


def list_profiles(recipes_dirs: Sequence[Path] = ()) -> list[Profile]:
    """The user's own by name, then the built-in ones. Raises ConfigError for a folder that is not there."""
    dirs = (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir())
    profiles = [_read(name, path, str(path)) for name, path in group_options("cluster", dirs).items()]
    return sorted(profiles, key=lambda profile: (profile.builtin, profile.name))


def find_profile(asked: str, recipes_dirs: Sequence[Path] = ()) -> Profile:
    """The profile of a name, or in a file. Raises ConfigError when there is none."""
    dirs = (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir())
    if is_file_name(asked):
        path = find_file("cluster", asked, dirs)
        return _read(path.stem, path, asked)
    name = find_option("cluster", asked, dirs)
    path = group_options("cluster", dirs)[name]
    return _read(name, path, str(path))


def _read(name: str, path: Path, asked: str) -> Profile:
    builtin = path.parent.parent == builtin_recipes_dir()
    try:
        # Under a recipe that any machine has room for, since a profile by itself is not a run.
        cluster = compose_run(["recipe=qwen3-tiny", "gpus=1", f"cluster={asked}"], training=False).config.cluster
    except ConfigError as error:
        return Profile(name=name, path=path, builtin=builtin, cluster=None, problems=error.problems)
    return Profile(name=name, path=path, builtin=builtin, cluster=cluster)


def profile_warnings(cluster: ClusterConfig, *, training: bool = True) -> tuple[str, ...]:
    """Lists what a user of a profile should know. Without `training` it may be for another machine, as in a plan."""
    warnings = []
    if cluster.not_measured:
        warnings.append(
            f"cluster profile {cluster.name} is incomplete, its calibration was interrupted: "
            f"{', '.join(cluster.not_measured)} come from profile {cluster.measured_on.get('base', 'it started from')}"
        )
    if cluster.fused_layers and not with_layers_here(cluster).transformer_engine:
        from canzona_cli.cluster.machine import install_fused_layers

        warnings.append(
            "Transformer Engine is not installed here: layers are Megatron's own, which train the same, with "
            f"{WITHOUT_FUSED_LAYERS} in simulations; to install it: {install_fused_layers()}"
        )
    if training:
        from canzona_cli.cluster.machine import profile_mismatches  # here, for plans do without

        warnings += profile_mismatches(cluster)
    return tuple(warnings)
