"""Finds and reads the files of cluster profiles, both built-in and the user's, with their problems and
warnings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from canzona_cli.config.compose import compose_run
from canzona_cli.config.recipes import builtin_recipes_dir, find_option, group_options, user_recipes_dirs
from canzona_cli.core.costs.gpus import with_layers_here
from canzona_cli.core.errors import Problem, collect_problems
from canzona_cli.core.setup import ClusterConfig

WITHOUT_FUSED_LAYERS = "13 to 20% fewer tokens per second"
"""The cost of cluster.transformer_engine=false that `canzona train --dry-run` predicts for models of 0.6B
to 32B on 1 to 256 H100s."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile's file and its contents."""

    name: str
    path: Path
    builtin: bool
    cluster: ClusterConfig | None
    """The profile; None if it has problems."""
    problems: tuple[Problem, ...] = ()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def text_with_name(self, name: str) -> str:
        """Returns the file's text with another `name`."""
        line = f"name: {name}"
        text, replaced = re.subn(r"^name:.*$", line, self.text, count=1, flags=re.MULTILINE)
        return text if replaced else f"{line}\n{text}"


def list_profiles(recipes_dirs: Sequence[Path] = ()) -> list[Profile]:
    """Lists the user's profiles by name, then the built-in profiles.

    Raises:
        ConfigError: a folder in `recipes_dirs` or $CANZONA_RECIPES_DIR does not exist.
    """
    dirs = (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir())
    profiles = [_read(path) for path in group_options("cluster", dirs).values()]
    return sorted(profiles, key=lambda profile: (profile.builtin, profile.name))


def find_profile(name_or_file: str, recipes_dirs: Sequence[Path]) -> Profile:
    """Returns the profile that has the given name or is in the given file.

    Raises:
        ConfigError: there is no such profile, its file is refused (see `find_option`), or a folder of recipes
            does not exist.
    """
    return _read(find_option("cluster", name_or_file, (*user_recipes_dirs(recipes_dirs), builtin_recipes_dir())))


def _read(path: Path) -> Profile:
    cluster = None
    problems: list[Problem] = []
    with collect_problems(problems):
        # A profile is checked as part of a run, so use a recipe that fits on any machine.
        cluster = compose_run(["recipe=qwen3-tiny", "gpus=1", f"cluster={path}"], training=False).config.cluster
    builtin = path.parent.parent == builtin_recipes_dir()
    return Profile(name=path.stem, path=path, builtin=builtin, cluster=cluster, problems=tuple(problems))


def profile_warnings(cluster: ClusterConfig, *, training: bool = True) -> tuple[str, ...]:
    """Lists warnings for the user of a profile.

    Args:
        training: True if a run starts here, so that the profile should describe this machine.
    """
    warnings = []
    if cluster.not_measured:
        warnings.append(
            f"cluster profile {cluster.name} is incomplete because its calibration was interrupted: "
            f"{', '.join(cluster.not_measured)} come from profile {cluster.measured_on.get('base', 'it started from')}"
        )
    if cluster.fused_layers and not with_layers_here(cluster).transformer_engine:
        from canzona_cli.core.costs.machine import install_fused_layers

        warnings.append(
            "Transformer Engine is not installed here. Megatron's own layers train the same model, but with "
            f"{WITHOUT_FUSED_LAYERS} in simulations; to install it: {install_fused_layers()}"
        )
    if training:
        from canzona_cli.core.costs.machine import profile_mismatches  # imported here, because plans do not need it

        warnings += profile_mismatches(cluster)
    return tuple(warnings)
