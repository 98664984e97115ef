"""A run of Megatron-LM in canzona's terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import key_of
from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import value_of
from canzona_cli.errors import Problem

TpMode = Literal["blockwise", "duplicated", "distributed"]


@dataclass(frozen=True, kw_only=True)
class MegatronRun:
    """A run of Megatron-LM, in canzona's terms."""

    path: Path
    overrides: Mapping[str, str]
    """The values by key, as they are typed after `canzona train`; `recipe` is the first, unless the user gives it."""
    arguments: Mapping[str, str]
    """The name of an argument, as it is written, by the key of the setting that it determines."""
    optimizer: Literal["adamw", "muon"]
    distributed: bool
    """True if data-parallel ranks share the optimizer's work and states."""
    tp_mode: TpMode
    """The way in which Muon orthogonalises what tensor parallelism divides."""
    tp_overlap: bool
    """True if tensor-parallel collectives overlap with matrix products, which canzona's own do not."""
    dispatch_overlap: bool
    """True if the travel of tokens to experts overlaps with computation, which canzona's own does not."""
    not_understood: tuple[str, ...]
    """The arguments that canzona does not know, as they are written."""
    left_out: tuple[str, ...]
    """The arguments, with their values, that change a step and that canzona neither has nor simulates."""
    plans_only: tuple[str, ...]
    """The reasons why canzona cannot train the model; empty if it can."""
    no_effect: tuple[str, ...]
    """The arguments without effect on a plan, as they are written."""

    def command(self, config: RunConfig, typed: Sequence[str], recipes_dirs: Sequence[Path] = ()) -> tuple[str, ...]:
        """Returns the overrides that give the run with canzona: those that change something, and the user's.

        Args:
            config: the run that all overrides together give.
        """
        recipe = [f"{key}={value}" for key, value in self.overrides.items() if key == "recipe"]
        groups = [override for override in typed if key_of(override) in GROUPS]
        base = compose_run([*recipe, *groups], recipes_dirs=recipes_dirs, training=False).config
        changed = [
            f"{key}={value}"
            for key, value in self.overrides.items()
            if key != "recipe" and value_of(base, _leaf(key)) != value_of(config, _leaf(key))
        ]
        return *recipe, *changed, *typed

    def by_argument(self, problem: Problem) -> Problem:
        """Returns a problem with a setting as a problem with the argument that determines it."""
        written = self.arguments.get(problem.key)
        return problem if written is None else replace(problem, key=f"{written} ({problem.key})")


def _leaf(key: str) -> str:
    return f"{key}.name" if key in GROUPS else key
