"""Finds the setting that a user means by an unknown key: a misspelt or removed setting, or a name from another program,
by the tables in `hints.yaml`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Final, Literal

from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.settings import sections, settings
from canzona_cli.core.errors import Problem, closest
from canzona_cli.core.reading import read_yaml

_FILE: Final = Path(__file__).with_name("hints.yaml")


@cache
def hints(section: Literal["names", "features", "settings", "commands", "words"]) -> Mapping[str, str | Sequence[str]]:
    """Returns a section of `hints.yaml`."""
    entries = read_yaml(_FILE)[section]
    assert isinstance(entries, dict)
    return entries


@cache
def renamed() -> Mapping[str, str]:
    """Returns canzona's keys by the names of settings in other programs that take the same values."""
    return {name: key for key, names in hints("names").items() for name in str(names).split()}


def missing_feature_problem(name: str) -> Problem | None:
    """Returns a problem with advice if `name`, dotted or not, is the name of a feature that canzona does not
    have or sets in another way; otherwise None."""
    flat = name.replace("-", "_").lower()
    words = {*flat.replace(".", "_").split("_")}
    bare_name = flat.rpartition(".")[2]
    if {flat, bare_name} & renamed().keys():
        return None
    for listed, advice in hints("features").items():
        reason, fix = (advice, "leave it out") if isinstance(advice, str) else advice
        if matching := [word for word in listed.split() if word in words or word in (bare_name, flat)]:
            return Problem(name, reason, fix.format(min(matching)))
    return None


def unknown_key(key: str, text: object, *, where: str = "") -> Problem:
    """Returns a problem for a key that is not a setting. The fix suggests the most similar setting."""
    if (instead := hints("settings").get(key)) is not None:
        return Problem(key, f"no longer exists{where}", str(instead), value=text)
    names = sections().get(key)
    if names is not None:
        takers = [name for name in sorted(names) if text in settings()[f"{key}.{name}"].choices]
        example = f"{key}.{takers[0]}={text}" if takers else f"{key}.{min(names)}=VALUE"
        return Problem(key, f"is a section{where}, not a setting", f"for example {example}", value=text)
    if (advice := missing_feature_problem(key)) is not None:
        return replace(advice, value=text, reason=f"{advice.reason}{where}")
    group = None if "." in key or key in renamed() else closest(key, GROUPS, cutoff=0.8)
    hint = group or closest_key(key) or ""
    choices = settings()[hint].choices if hint in settings() else ()
    value = next((f"={typed}" for typed in (key, str(text)) if typed in choices), "")
    fix = f"did you mean {hint}{value}?" if hint else "`canzona recipes show NAME` lists every setting of a recipe"
    return Problem(key, f"there is no such setting{where}", fix, value=text)


def as_override(option: str, value: str, *, exact: bool) -> str | None:
    """Returns an option as an override, such as `gpus=4` for `--gpus 4`; None if it does not resemble a
    setting.

    Args:
        value: the option's value; empty if it has none.
        exact: True accepts only the exact names of settings; False also accepts similar names.
    """
    word = option.lstrip("-").replace("-", "_").lower()
    key = word if word in GROUPS else exact_key(word)
    if key is None and not exact and len(word) >= 2:
        key = closest_key(word)
    if key is None:
        return None
    placeholder = "DIR" if key == "run.dir" else "VALUE"
    if key in settings() and settings()[key].kind == "boolean":
        placeholder = "true"
    return f"{key}={value or placeholder}"


MIN_SIMILARITY = 0.8
"""The minimum similarity, from 0 to 1, of a key that is suggested for an unknown one."""


def exact_key(word: str) -> str | None:
    """Returns the key of the setting with this dotted key, bare name, or name in another program; None if
    there is no such setting, or if several share the bare name."""
    flat = word.replace("-", "_").lower()
    if flat in renamed() or flat in settings():
        return renamed().get(flat, flat)
    with_name = [key for key in settings() if key.rpartition(".")[2] == flat]
    return with_name[0] if len(with_name) == 1 else None


def closest_key(key: str) -> str | None:
    """Returns the setting that the user probably meant by `key`; None if none is similar enough.

    The bare name has more weight than the section: `tp` means `parallel.tp`, and `train.lr` means
    `optimizer.lr`. Missing words have little weight: `wsd_steps` means `wsd_decay_steps`, although `ns_steps`
    looks more like it.
    """
    flat = key.strip("/").replace("/", ".").replace("-", "_").lower()
    bare_key = flat.rpartition(".")[2]
    if (name := flat if flat in renamed() else bare_key) in renamed():
        return renamed()[name]
    best, best_score = None, 0.0
    for name in settings():
        section, _, bare_name = name.rpartition(".")
        key_similarity = SequenceMatcher(None, flat, name).ratio()
        name_similarity = SequenceMatcher(None, bare_key, bare_name).ratio()
        missing_words = set(bare_name.split("_")) - set(bare_key.split("_"))
        if set(bare_key.split("_")) < set(bare_name.split("_")):
            name_similarity = max(name_similarity, 0.95 - 0.05 * len(missing_words))
        if sorted(bare_key) == sorted(bare_name):  # letters in another order, such as gpsu
            name_similarity = max(name_similarity, 0.95)
        given_section = flat.rpartition(".")[0] or section
        section_similarity = SequenceMatcher(None, given_section, section).ratio()
        score = max(key_similarity, 0.9 * name_similarity + 0.1 * section_similarity)
        if score > best_score:
            best, best_score = name, score
    return best if best_score >= MIN_SIMILARITY else None
