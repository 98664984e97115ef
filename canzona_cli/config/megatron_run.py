"""Describes a Megatron-LM run in canzona's terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import Problem
from canzona_cli.core.setup import Overlap
from canzona_cli.core.setup.problems import value_of

TpMode = Literal["blockwise", "duplicated", "distributed"]


@dataclass(frozen=True, kw_only=True)
class MegatronRun:
    """The settings of a Megatron-LM run, translated to canzona's."""

    path: Path
    overrides: Mapping[str, str]
    """The overrides for `canzona train`: values by key. The first is `recipe`, unless the user sets it."""
    arguments: Mapping[str, str]
    """The argument that determines each setting, as written, by the setting's key."""
    optimizer: Literal["adamw", "muon"]
    distributed: bool
    """True if data-parallel ranks divide the optimizer's work and state."""
    tp_mode: TpMode
    """The method by which Muon orthogonalises matrices that tensor parallelism divides."""
    overlaps: tuple[Overlap, ...]
    """The transfers that overlap with computation, which canzona does not do, as in `cluster.overlaps`."""
    not_understood: tuple[str, ...]
    """The arguments that canzona does not know, as written."""
    assumed: tuple[str, ...]
    """The arguments that a log does not have, although the installed Megatron has them and they have an
    effect. Their defaults are taken."""
    left_out: tuple[str, ...]
    """The arguments, with their values, that change a step in a way that canzona neither offers nor
    simulates."""
    plans_only: tuple[str, ...]
    """The reasons why canzona cannot train the model; empty if it can."""
    no_effect: tuple[str, ...]
    """The arguments that have no effect on a plan, as written."""

    def command(
        self, config: RunConfig, user_overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()
    ) -> tuple[str, ...]:
        """Returns the overrides that train the same model with canzona: the recipe, the translated values that
        differ from it, and the user's overrides.

        Args:
            config: the run with all overrides.
            user_overrides: the user's overrides.
        """
        recipe = [f"{key}={value}" for key, value in self.overrides.items() if key == "recipe"]
        groups = [override for override in user_overrides if key_of(override) in GROUPS]
        base = compose_run([*recipe, *groups], recipes_dirs=recipes_dirs, training=False).config
        changed = [
            f"{key}={value}"
            for key, value in self.overrides.items()
            if key != "recipe" and value_of(base, _leaf(key)) != value_of(config, _leaf(key))
        ]
        return *recipe, *changed, *user_overrides

    def by_argument(self, problem: Problem) -> Problem:
        """Returns the problem with the key replaced by the argument that determines the setting; unchanged if
        no argument determines it."""
        written = self.arguments.get(problem.key)
        return problem if written is None else replace(problem, key=f"{written} ({problem.key})")


def _leaf(key: str) -> str:
    return f"{key}.name" if key in GROUPS else key
