"""Drops values of a recipe that no longer apply because the command line sets a related setting, and resolves
learning rates."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Final

from canzona_cli.config.overrides import Overrides
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import leaves
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.reading import read_yaml
from canzona_cli.core.setup import OPTIMIZERS

_OVERRULED_BY: Final = {
    "optimizer.lr": "optimizer.lrs",
    "optimizer.min_lr": "optimizer.min_lr_ratio",
    "optimizer.adamw_lr": "optimizer.adamw_lr_ratio",
    "train.batch_tokens": "train.global_batch_size",
}
"""Pairs of settings: a value of the second takes precedence over the first. But if a recipe sets the first and
builds on a recipe that sets the second, the first is meant to apply."""


def overruling_settings(recipes: Sequence[Path], parsed: Overrides) -> Iterator[str]:
    """Yields the settings of a recipe that would have no effect because it builds on a recipe that sets the
    second setting of a pair (`_OVERRULED_BY`).

    `optimizer.lr` is not yielded if the command line chooses an optimizer: a recipe's learning rate is meant
    for its own optimizer.

    Args:
        recipes: the files of the recipe and of those that it builds on, in the order of application.
    """
    chain = [dict(leaves(read_yaml(file))) for file in recipes] if len(recipes) > 1 else []

    def last_recipe_with(name: str) -> int:
        """Returns the index of the last recipe that sets `name`; -1 if none does. An empty mapping adds nothing."""
        return max((index for index, tree in enumerate(chain) if tree.get(name, {}) != {}), default=-1)

    for key, overruling in _OVERRULED_BY.items():
        replaced = overruling in parsed.values or (key == "optimizer.lr" and "optimizer" in parsed.groups)
        if last_recipe_with(key) > last_recipe_with(overruling) >= 0 and not replaced:
            yield key


def drop_replaced(
    tree: Mapping[str, object], parsed: Overrides, set_keys: Collection[str], problems: list[Problem]
) -> None:
    """Drops the second setting of each pair in `_OVERRULED_BY` from a recipe's values if the first is set, and
    changes the data source if there is a data path or a blend, but the command line sets no source.

    If the command line sets both settings of a pair, `lr` takes precedence over `lrs`, and `global_batch_size`
    over `batch_tokens`, about which `config_warnings` warns.

    Args:
        tree: the recipe's values, overridden by the command line's; changed in place.
        set_keys: the settings that the command line sets, and those that `overruling_settings` yields.
        problems: gets a problem if the command line sets a rate and its ratio (`min_lr`, `adamw_lr`).
    """
    for key, overruling in _OVERRULED_BY.items():
        section, _, name = overruling.partition(".")
        values = tree.get(section)
        if key not in set_keys or not isinstance(values, dict):
            continue
        if name == "lrs":
            values[name] = {}
        elif parsed.values.get(overruling) is None:
            values[name] = None
        elif section == "optimizer":
            reason = f"cannot be combined with {key}"
            problems.append(Problem(overruling, reason, "keep one of them", value=parsed.texts[overruling]))
    _choose_source(tree, parsed)


def _choose_source(tree: Mapping[str, object], parsed: Overrides) -> None:
    """Changes `data.source` from stdlib to prepared if there is a path or a blend, but the command line sets no
    data group or source, so that users and recipes may leave out `data=prepared`. The tokenizer is dropped."""
    data = tree.get("data")
    if "data" in parsed.groups or "data.source" in parsed.values or not isinstance(data, dict):
        return
    if data.get("source") == "stdlib" and (data.get("path") or data.get("blend")):
        data["source"] = "prepared"
        if "data.tokenizer" not in parsed.values:
            data.pop("tokenizer", None)


def with_rates(config: RunConfig) -> RunConfig:
    """Resolves `optimizer.lr` from `lrs`, and `min_lr` and `adamw_lr` from their ratios.

    `lr` and a ratio are multiplied as decimals, so that 0.1 times 0.0003 is exactly the float 0.00003.

    Raises:
        ConfigError: `lrs` has a rate for an unknown optimizer.
    """
    optimizer = config.optimizer
    for name in optimizer.lrs.keys() - OPTIMIZERS.keys():
        fix = f"use {', '.join(OPTIMIZERS)}"
        raise ConfigError(Problem("optimizer.lrs", f"{name} is not a known optimizer", fix, value=optimizer.lrs))
    # A recipe's rate is meant for Muon, but most custom optimizers are closer to AdamW.
    default_lr = optimizer.lrs.get("adamw", optimizer.lr) if optimizer.name == "custom" else optimizer.lr
    lr = optimizer.lrs.get(optimizer.name, default_lr)

    def scaled(rate: float | None, ratio: float | None) -> float | None:
        return rate if ratio is None else float(Decimal(repr(ratio)) * Decimal(repr(lr)))

    min_lr = scaled(optimizer.min_lr, optimizer.min_lr_ratio) or 0.0
    adamw_lr = scaled(optimizer.adamw_lr, optimizer.adamw_lr_ratio)
    return replace(config, optimizer=replace(optimizer, lr=lr, lrs={}, min_lr=min_lr, adamw_lr=adamw_lr))
