"""Protects configurations and logs: refuses secrets, code that the user did not name, and characters that are
unsafe in file names, commands or terminals; and redacts secrets in text.

A text counts as a secret if its setting is named like a token, key or password, if it has the format of one,
or if it contains the value of an environment variable with such a name. This module imports nothing slow,
because workers use it before their slow imports.
"""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core.errors import Problem
from canzona_cli.core.setup import CustomConfig

HIDDEN = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    (
        *("token", "secret", "secrets", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "jwt"),
        *("apikey", "accesskey", "secretkey", "privatekey", "authtoken", "bearer"),
    )
)
_KEY_KINDS = frozenset(("api", "access", "private", "secret", "signing", "encryption", "ssh", "auth", "license"))
_HARMLESS_ENDINGS = frozenset(("file", "path", "dir", "folder", "name", "id", "type", "count", "budget"))
"""The last words of names whose value is a path, a label or a count, not a secret."""
_SECRET_FORMATS = re.compile(
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----)?",
    re.DOTALL,
)
_IN_URL = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)(?P<secret>[^\s/@]+)(?=@)", re.IGNORECASE)
_NAME_AND_VALUE = re.compile(r"""(?P<name>[A-Za-z_][\w.-]*)(?P<between>["']?\s*[=:]\s*["']?)(?P<value>[^\s"',;&]+)""")
_DIRECTORIES = ("PWD", "OLDPWD")
"""The shell's variables for the current and the previous directory. They are named `PWD` but are not
passwords, and many paths start with their values."""
_SHORTEST = 8
"""The minimum length of an environment variable's value that is treated as a secret. Shorter values could be
ordinary words."""

REFERENCE = re.compile(r"\$\{\s*([\w.\[\]]+)\s*\}")
"""A reference to another setting by name."""
_ARGUMENTS = ("run.dir", "cluster.rdzv_endpoint")
"""The settings whose value, or its last path component, becomes an argument of torchrun. A leading dash would
turn the argument into an option."""
_PROSE = ("description",)
"""The settings that may contain line breaks and tabs."""
_FOLDERS = ("run.dir", "run.root")


def is_secret_name(name: str) -> bool:
    """Returns True if a name probably belongs to a secret: `HF_TOKEN`, `apiKey`, `options.password`; not
    `tokenizer`, nor `experts_per_token`, in which a token is a unit."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _HARMLESS_ENDINGS or words[-2:] == ["per", "token"]:
        return False
    keyed = any(kind in _KEY_KINDS and word == "key" for kind, word in pairwise(words))
    return words == ["key"] or keyed or bool(_SECRET_WORDS & set(words))


def redact(text: str) -> str:
    """Returns the text with every recognised secret replaced by `***`."""
    for secret in _secret_values():
        text = text.replace(secret, HIDDEN)
    text = _SECRET_FORMATS.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\g<before>{HIDDEN}", text)
    return _NAME_AND_VALUE.sub(_hide_value, text)


def shown_value(key: str, value: object) -> object:
    """Returns a setting's value for an error message: numbers, booleans and None as they are, `***` for
    another value of a setting named like a secret, otherwise the value with secrets redacted."""
    if isinstance(value, bool | int | float | None):
        return value
    if is_secret_name(key.rpartition(".")[2]):
        return HIDDEN
    return redact(override_text(value))


def secret_problems(settings: Mapping[str, object]) -> Iterator[Problem]:
    """Yields a problem for each setting that contains a secret. The problems do not show the values.

    Args:
        settings: a configuration as nested mappings and sequences.
    """
    secret_values = _secret_values()
    for key, name, value in _texts(settings):
        if is_secret_name(name) and value:
            finding = "is named like a secret"
        elif _SECRET_FORMATS.search(value) or _IN_URL.search(value):
            finding = "looks like a secret (a token, a private key, or a password in an address)"
        elif any(secret in value for secret in secret_values):
            finding = "contains the value of an environment variable that is named like a secret"
        else:
            continue
        reason = f"{finding}, and anyone who can read the run directory would see it in config.yaml"
        fix = "leave it out; let the code that needs it read it from an environment variable"
        yield Problem(key, reason, fix, value=HIDDEN)


def safety_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields a problem for each setting that contains a secret or unprintable characters, or that would
    become an argument of torchrun with a leading dash."""
    tree = asdict(config)
    yield from secret_problems(tree)
    for key, _, text in _texts(tree, names=True):
        if key == "name":  # checked more strictly by `config.checks`
            continue
        allowed = "\n\t" if key in _PROSE else ""
        unprintable = sorted({char for char in text if not char.isprintable() and char not in allowed})
        if unprintable:
            escaped = ", ".join(char.encode("unicode_escape").decode("ascii") for char in unprintable[:4])
            reason = (
                f"contains unprintable characters ({escaped}), which "
                "could disguise a file name, a command or terminal output"
            )
            yield Problem(key, reason, "leave them out", value=text)
        elif key in _ARGUMENTS and Path(text).name.startswith("-"):
            reason = "starts with a dash, so torchrun would read it as an option"
            yield Problem(key, reason, "start with a letter", value=text)


def consent_problems(config: RunConfig, explicit: Collection[str], *, training: bool) -> Iterator[Problem]:
    """Yields a problem if the recipe names custom code, or a folder with `..`, to which the user has not
    consented by naming it on the command line.

    Args:
        explicit: the dotted keys that the command line sets.
        training: True if a run would load the code.
    """
    custom = config.optimizer
    if training and isinstance(custom, CustomConfig) and custom.source and not custom.built_in:
        code_settings = {"optimizer.source", "optimizer.allow"}
        if not code_settings & set(explicit):
            reason = "the recipe names this code, but code only runs if the command line names it"
            fix = f"if you trust it: optimizer.source={custom.source}"
            yield Problem("optimizer.source", reason, fix, value=custom.source)
    for key in _FOLDERS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None and key not in explicit and ".." in Path(value).parts:
            fix = f"if this is intended: {key}={value} on the command line"
            yield Problem(key, "the recipe points outside the current folder with ..", fix, value=value)


def content_problems(content: object, where: str, key: str = "") -> Iterator[Problem]:
    """Yields a problem for each `_target_` key and each resolver in a YAML tree."""
    for place, name, text in _texts(content, key, names=True):
        if name == text == "_target_":
            yield target_problem(place, f"in {where}")
        elif name != "_target_" and (refused := resolver_problem(place, text)) is not None:
            yield refused


def target_problem(key: str, where: str) -> Problem:
    """Returns the problem of a `_target_` key, which could name code to run."""
    return Problem(key, f"_target_ {where} would run code; a recipe contains only values", "remove it")


def resolver_problem(key: str, value: str) -> Problem | None:
    """Returns a problem if a value contains any interpolation except `${section.setting}`; otherwise None.

    The results of resolvers, which may be secrets, would be written to the run directory. Everything except
    plain references is refused, because the name of a resolver can be assembled: `${oc.${name}:HOME}`.
    """
    if "${" not in REFERENCE.sub("", value):
        return None
    reason = (
        "a value can refer only to other settings, because environment variables "
        "and resolvers could put secrets into config.yaml in the run directory"
    )
    return Problem(key, reason, f'let the shell expand it: {key}="$VARIABLE"', value=value)


class RedactingFormatter(logging.Formatter):
    """A log formatter that redacts secrets, even in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _secret_values() -> list[str]:
    """Returns the values of environment variables that are named like secrets, longest first, because a value
    may contain another."""
    variables = {
        value
        for name, value in os.environ.items()
        if name not in _DIRECTORIES and is_secret_name(name) and len(value) >= _SHORTEST and not value.isdecimal()
    }
    return sorted(variables, key=len, reverse=True)


def _hide_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    # "key: value" and "the token: missing" are prose.
    prose = name.lower() in ("key", "token") and ":" in match["between"]
    harmless = re.fullmatch(r"-?[\d.]+(e-?\d+)?|None|null|true|false|(VALUE|NAME)[?.]?|\$\w+", value) is not None
    if prose or harmless or not is_secret_name(name):
        return match[0]
    return f"{name}{match['between']}{HIDDEN}"


def _texts(value: object, key: str = "", name: str = "", *, names: bool = False) -> Iterator[tuple[str, str, str]]:
    """Yields (dotted key, name, text) for every text in a tree. The entries of a list get the list's key and
    name.

    Args:
        names: True to yield names in mappings as texts too, because users choose the names of optimizer
            options.
    """
    if isinstance(value, Mapping):
        for inner_key, inner in value.items():
            dotted_key = f"{key}.{inner_key}" if key else str(inner_key)
            if names:
                yield dotted_key, str(inner_key), str(inner_key)
            yield from _texts(inner, dotted_key, str(inner_key), names=names)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key, name, names=names)
    elif isinstance(value, str):
        yield key, name, value
