"""Limits on every configuration: it may not hold secrets, run code unasked, or carry characters that end up
in file names, commands and terminals. Texts of others are written down without their secrets.

Tokens, keys and passwords are recognised by their name, by how they look, or because an environment variable
of such a name holds them. Standard library and the schema only: workers use it before their slow imports.
"""

import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from canzona_cli.config.schema import CustomConfig, RunConfig
from canzona_cli.errors import Problem

HIDDEN = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = frozenset(
    (
        *("token", "secret", "secrets", "password", "passwd", "pwd", "passphrase", "credential", "credentials", "jwt"),
        *("apikey", "accesskey", "secretkey", "privatekey", "authtoken", "bearer"),
    )
)
_KEY_KINDS = frozenset(("api", "access", "private", "secret", "signing", "encryption", "ssh", "auth", "license"))
_PLACES = frozenset(("file", "path", "dir", "folder", "name", "id", "type", "count", "budget"))
"""The last word of a name that says where a secret lies or how much of something there is, not what it is."""
_LOOKS = re.compile(
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----)?",
    re.DOTALL,
)
_IN_URL = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)(?P<secret>[^\s/@]+)(?=@)", re.IGNORECASE)
_NAMED = re.compile(r"""(?P<name>[A-Za-z_][\w.-]*)(?P<between>["']?\s*[=:]\s*["']?)(?P<value>[^\s"',;&]+)""")
_DIRECTORIES = ("PWD", "OLDPWD")
"""The shells' variables of the current and the last directory: no passwords,
and the beginning of many a path."""
_SHORTEST = 8
"""Characters. A shorter value of an environment variable would be found in innocent words."""

REFERENCE = re.compile(r"\$\{\s*([\w.\[\]]+)\s*\}")
"""A reference to another setting, by its name."""
_ARGUMENTS = ("run.dir", "cluster.rdzv_endpoint")
"""Settings that, or whose last part, become arguments of torchrun:
a leading dash would make an option of them."""
_OWN_RULES = ("name", "cluster.rdzv_id")
"""Settings that `canzona_cli.config.checks` is stricter about."""
_PROSE = ("description",)
"""Settings that may have several lines."""
_FOLDERS = ("run.dir", "run.root")


def secret_name(name: str) -> bool:
    """Returns True if a name is probably a secret's: `HF_TOKEN`, `apiKey`, `options.password`;
    not `tokenizer`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _PLACES:
        return False
    keyed = any(kind in _KEY_KINDS and word == "key" for kind, word in pairwise(words))
    return words == ["key"] or keyed or bool(_SECRET_WORDS & set(words))


def redacted(text: str) -> str:
    """The text with every secret that can be recognised in it replaced by `***`."""
    for secret in _from_environment():
        text = text.replace(secret, HIDDEN)
    text = _LOOKS.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\g<before>{HIDDEN}", text)
    return _NAMED.sub(_hide_named, text)


def shown_value(key: str, value: object) -> object:
    """A setting's value for an error message: hidden where the setting's name says that it is a secret."""
    if isinstance(value, bool | int | float | None):
        return value
    if secret_name(key.rpartition(".")[2]):
        return HIDDEN
    return redacted(str(value))


def secret_problems(settings: Mapping[str, object]) -> Iterator[Problem]:
    """Settings that hold a secret, by dotted key. Their values are not in the problems.

    Args:
        settings: a configuration as nested mappings and sequences.
    """
    in_environment = _from_environment()
    for key, name, value in _texts(settings):
        if secret_name(name) and value:
            what = "is named like a secret"
        elif _LOOKS.search(value) or _IN_URL.search(value):
            what = "looks like a secret (a token, a private key, or a password in an address)"
        elif any(secret in value for secret in in_environment):
            what = "holds the value of an environment variable that is named like a secret"
        else:
            continue
        reason = f"{what}, and config.yaml in the run directory would show it to whoever can read that"
        fix = "leave it out; let the code that needs it read it from an environment variable"
        yield Problem(key=key, value=HIDDEN, reason=reason, fix=fix)


def safety_problems(config: RunConfig) -> Iterator[Problem]:
    """Secrets, and characters that no name or path may have."""
    tree = asdict(config)
    yield from secret_problems(tree)
    for key, _, text in _texts(tree, names=True):
        if key in _OWN_RULES:
            continue
        strange = sorted({char for char in text if not char.isprintable() and not (char in "\n\t" and key in _PROSE)})
        if strange:
            named = ", ".join(char.encode("unicode_escape").decode("ascii") for char in strange[:4])
            reason = (
                f"has characters that are not printable ({named}); they could hide what a terminal, a file name "
                "or a command really says"
            )
            yield Problem(key=key, value=text, reason=reason, fix="leave them out")
        elif key in _ARGUMENTS and Path(text).name.startswith("-"):
            reason = "begins with a dash, so a command would take it for an option"
            yield Problem(key=key, value=text, reason=reason, fix="begin with a letter")


def unasked_problems(config: RunConfig, explicit: Collection[str], *, training: bool) -> Iterator[Problem]:
    """Lists what a recipe asks for that only the command line may.

    Args:
        explicit: dotted keys that the command line sets.
        training: True if a run would load code.
    """
    custom = config.optimizer
    if training and isinstance(custom, CustomConfig) and custom.source and not custom.built_in:
        code_settings = {"optimizer.source", "optimizer.allow"}
        if not code_settings & set(explicit):
            reason = "a recipe asks to run this code, and code is only run when the command line asks for it"
            fix = f"if you trust it: optimizer.source={custom.source}"
            yield Problem(key="optimizer.source", value=custom.source, reason=reason, fix=fix)
    for key in _FOLDERS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None and key not in explicit and ".." in Path(value).parts:
            fix = f"if it is meant: {key}={value} on the command line"
            yield Problem(key=key, value=value, reason="a recipe leads out of the folder it is used in", fix=fix)


def content_problems(content: object, where: str, key: str = "") -> Iterator[Problem]:
    """`_target_` keys and resolvers anywhere in a YAML tree."""
    for place, name, text in _texts(content, key, names=True):
        if name == text == "_target_":
            yield target_problem(place, f"in {where}")
        elif name != "_target_" and (refused := resolver_problem(place, text)) is not None:
            yield refused


def target_problem(key: str, where: str) -> Problem:
    """`_target_` would let a recipe name code to run."""
    return Problem(key=key, reason=f"_target_ {where} would run code; a recipe only holds values", fix="remove it")


def resolver_problem(key: str, value: str) -> Problem | None:
    """Refuses all but `${section.setting}`: what resolvers give would stand in the run directory, secrets included.

    Whatever is not plainly a reference is refused, because resolvers' names may be put together:
    `${oc.${name}:HOME}`.
    """
    if "${" not in REFERENCE.sub("", value):
        return None
    reason = (
        "only other settings can be referred to; environment variables and other resolvers would end up, "
        "secrets included, in the run directory's config.yaml"
    )
    return Problem(key=key, value=value, reason=reason, fix=f'let the shell fill it in: {key}="$VARIABLE"')


class RedactingFormatter(logging.Formatter):
    """Log lines, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def _from_environment() -> list[str]:
    """Values of this process's variables that are named like secrets; the longest first,
    for one may hold another."""
    variables = {
        value
        for name, value in os.environ.items()
        if name not in _DIRECTORIES and secret_name(name) and len(value) >= _SHORTEST and not value.isdecimal()
    }
    return sorted(variables, key=len, reverse=True)


def _hide_named(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    # "key: value" and "the token: missing" are sentences.
    sentence = name.lower() in ("key", "token") and ":" in match["between"]
    harmless = re.fullmatch(r"-?[\d.]+(e-?\d+)?|None|null|true|false|(VALUE|NAME)[?.]?|\$\w+", value) is not None
    if sentence or harmless or not secret_name(name):
        return match[0]
    return f"{name}{match['between']}{HIDDEN}"


def _texts(value: object, key: str = "", name: str = "", *, names: bool = False) -> Iterator[tuple[str, str, str]]:
    """(dotted key, own name, text) of every text in a tree; entries of a list have the list's.

    With `names`, the names are texts too: those of an optimizer's options are as free as their values.
    """
    if isinstance(value, Mapping):
        for inner_key, inner in value.items():
            below = f"{key}.{inner_key}" if key else str(inner_key)
            if names:
                yield below, str(inner_key), str(inner_key)
            yield from _texts(inner, below, str(inner_key), names=names)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key, name, names=names)
    elif isinstance(value, str):
        yield key, name, value
