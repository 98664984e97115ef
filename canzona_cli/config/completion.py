"""Shell completion of overrides: keys, and values after `=` (recipe names, the options of other groups,
choices).

Bash splits the command line at every `=` (COMP_WORDBREAKS), and inserts a completion after the last one.
`bash_words` joins the words again before Typer reads them, and removes everything up to the last `=` from each
completion. This module must stay fast, because it runs at every press of Tab.
"""

import io
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from canzona_cli.config.recipes import FROM_FILES, GROUPS, builtin_recipes_dir, group_options, user_recipes_dirs
from canzona_cli.core.errors import ConfigError

COMPLETE_VARIABLE = "_CANZONA_COMPLETE"

# Typer's script for bash with one change: no space follows a key. Files are offered if there is no other
# completion.
BASH_SCRIPT = """
%(complete_func)s() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" \\
                   COMP_CWORD=$COMP_CWORD \\
                   %(autocomplete_var)s=complete_bash $1 ) )
    if [[ ${#COMPREPLY[@]} -gt 0 && ${COMPREPLY[0]} == *= ]]; then compopt -o nospace; fi
    return 0
}

complete -o default -F %(complete_func)s %(prog_name)s
"""


def complete_override(incomplete: str) -> list[str]:
    """Returns the completions of one `KEY=VALUE`. For a key without a fixed set of values there are none, and
    the shell offers files."""
    key, equals, _ = incomplete.partition("=")
    words = [f"{key}={value}" for value in _values(key)] if equals else [f"{name}=" for name in _keys(incomplete)]
    return [word for word in words if word.startswith(incomplete)]


@contextmanager
def bash_words() -> Iterator[None]:
    """Joins the words that Typer reads in a bash completion, and shortens the completions that Typer prints.

    Does nothing outside of a bash completion, and joins nothing if COMP_WORDBREAKS does not contain `=`.
    """
    if not os.environ.get(COMPLETE_VARIABLE, "").endswith("_bash"):
        yield
        return
    words = os.environ.get("COMP_WORDS", "").split("\n")
    joined, current, prefix = joined_words(words, int(os.environ.get("COMP_CWORD", "0")))
    os.environ["COMP_WORDS"] = "\n".join(shlex.quote(word) if word else "" for word in joined)
    os.environ["COMP_CWORD"] = str(current)
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        sys.stdout.write("".join(f"{line.removeprefix(prefix)}\n" for line in printed.getvalue().splitlines()))


def joined_words(words: Sequence[str], current: int) -> tuple[list[str], int, str]:
    """Joins the words that bash split at `=`.

    Args:
        words: COMP_WORDS; the first is the command itself.
        current: COMP_CWORD, the index of the word at the cursor.

    Returns:
        The joined words, the index of the word at the cursor among them, and the prefix of this word after
        which bash inserts a completion.
    """
    joined: list[str] = []
    cursor = len(words)
    prefix = ""
    after_equals = False
    for index, word in enumerate(words):
        left_part = ""
        if len(joined) > 1 and (word == "=" or after_equals):
            left_part = joined.pop()
        joined.append(left_part + word)
        if index == current:
            cursor = len(joined) - 1
            prefix = joined[-1] if word == "=" else left_part
        after_equals = word == "="
    return joined, (cursor if current < len(words) else len(joined)), prefix


def prepare_completion_options(arguments: list[str]) -> None:
    """Makes Typer's --install-completion and --show-completion write `BASH_SCRIPT`, and accept a shell's
    name.

    Without a name, Typer looks for a shell among the parent processes; in a script or a container, there may
    be none.
    """
    from typer import _completion_shared

    _completion_shared._completion_scripts["bash"] = BASH_SCRIPT
    if arguments[-1] in _completion_shared._completion_scripts:
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"


def _keys(prefix: str) -> list[str]:
    """Returns the keys to offer for a prefix.

    Settings of a section are offered only if the prefix matches a single section, so that an empty word does
    not list every setting.
    """
    from canzona_cli.config.settings import sections, settings

    if "." in prefix:
        return [key for key in settings() if key != "optimizer.name"]  # chosen by optimizer=NAME
    top_level = [key for key in settings() if "." not in key]
    deeper = [key for key in settings() if prefix and key.startswith(prefix) and "." in key and key != "optimizer.name"]
    matching = [section for section in sections() if section.startswith(prefix)]
    return [*GROUPS, *top_level, *(deeper if len(matching) == 1 else [])]


def _values(key: str) -> list[str]:
    from canzona_cli.config.settings import settings

    if key in GROUPS:
        try:
            dirs = (*user_recipes_dirs(), builtin_recipes_dir())
        except ConfigError:
            dirs = (builtin_recipes_dir(),)
        files = [f"./{file}" for file in sorted(Path().glob("*.yaml"))]
        return [*group_options(key, dirs), *(files if key in FROM_FILES else ())]
    setting = settings().get(key)
    if setting is None:
        return []
    values = ("true", "false") if setting.kind == "boolean" else setting.choices
    return [*values, "null"] if values and setting.optional else list(values)
