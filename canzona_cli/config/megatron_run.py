"""A Megatron-LM run in canzona's terms."""

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
    """A Megatron-LM run in canzona's terms."""

    path: Path
    overrides: Mapping[str, str]
    """The overrides for `canzona train`: values by key. `recipe` is the first, unless the user gives it."""
    arguments: Mapping[str, str]
    """The arguments by the keys of the settings that they determine, each as the file writes it."""
    optimizer: Literal["adamw", "muon"]
    distributed: bool
    """True if data-parallel ranks divide the optimizer's work and states."""
    tp_mode: TpMode
    """The way in which Muon orthogonalises matrices that tensor parallelism divides."""
    tp_overlap: bool
    """True if tensor-parallel collectives overlap with matrix products, as they do not in canzona."""
    dispatch_overlap: bool
    """True if the travel of tokens to experts overlaps with computation, as it does not in canzona."""
    not_understood: tuple[str, ...]
    """The arguments that canzona does not know, as the file writes them."""
    left_out: tuple[str, ...]
    """The arguments, with their values, that change a step, but that canzona neither has nor simulates."""
    plans_only: tuple[str, ...]
    """The reasons why canzona cannot train the model; empty if it can."""
    no_effect: tuple[str, ...]
    """The arguments without effect on a plan, as the file writes them."""

    def command(self, config: RunConfig, typed: Sequence[str], recipes_dirs: Sequence[Path] = ()) -> tuple[str, ...]:
        """Returns the overrides that give the same run with canzona: those that change a setting of the
        recipe, and the user's.

        Args:
            config: the run that results from all overrides.
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
        """Returns a problem that names the argument which determines its setting; the same problem if there
        is none."""
        written = self.arguments.get(problem.key)
        return problem if written is None else replace(problem, key=f"{written} ({problem.key})")


def _leaf(key: str) -> str:
    return f"{key}.name" if key in GROUPS else key
