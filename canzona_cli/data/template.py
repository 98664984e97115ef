r"""Templates make one document from several fields of a JSONL object, or from the messages of a chat.

    {question}\n{answer}\n          fields of the object
    {role}: {content}\n             once for each message, if the field of --text-key is a list of messages

`\n` and `\t` are written as two characters each, because shells pass them that way. Like all other text, the
text of a template never becomes a special token.
"""

import re
from collections.abc import Mapping
from string import Formatter


class Unfilled(ValueError):
    """An error for an object that cannot fill a template; the message gives the reason."""


def template_problem(template: str) -> str:
    """Returns the reason why a template cannot be used; empty for a valid template."""
    try:
        parts = [*Formatter().parse(template)]
    except ValueError as error:
        return f"is not a template: {error}"
    names = [name for _, name, _, _ in parts if name is not None]
    if not names:
        return "names no field"
    formatted = any(spec or conversion for _, _, spec, conversion in parts)
    if formatted or not all(re.fullmatch(r"[\w-]+", name) for name in names):
        return "may only have plain names in braces"
    return ""


def fill(template: str, record: Mapping[str, object], key: str) -> str:
    """Returns the text of an object: the template filled with its fields, or with each message of its list
    `key`.

    Raises:
        Unfilled: a field is missing or has no text, or the list contains something other than messages.
    """
    parts = [(text.replace("\\n", "\n").replace("\\t", "\t"), name) for text, name, _, _ in Formatter().parse(template)]
    messages = record.get(key)
    return "".join(_fill_one(parts, fields) for fields in (messages if isinstance(messages, list) else [record]))


def _fill_one(parts: list[tuple[str, str | None]], fields: object) -> str:
    if not isinstance(fields, Mapping):
        raise Unfilled(f": a message is a {type(fields).__name__}")
    filled = []
    for text, name in parts:
        filled.append(text)
        if name is None:
            continue
        if name not in fields:
            raise Unfilled(f": no field {name!r}, only {', '.join(map(repr, list(fields)[:8])) or 'nothing'}")
        value = fields[name]
        if not isinstance(value, str | int | float):
            raise Unfilled(f": field {name!r} is a {type(value).__name__}")
        filled.append(str(value))
    return "".join(filled)
