r"""Templates make one document from several fields of a JSONL object, or from the messages of a chat.

    {question}\n{answer}\n          fields of the object
    {meta.title}\n{body}            a field of a nested object
    {role}: {content}\n             once for each message, if the field of --text-key is a list of messages

`\n` and `\t` are written as two characters each, because shells pass them that way. Like all other text, the
text of a template never becomes a special token.
"""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Final


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
    if formatted or not all(re.fullmatch(r"[\w-]+(\.[\w-]+)*", name) for name in names):
        return "may only have plain names in braces"
    return ""


def fields_of(template: str) -> tuple[str, ...]:
    """Returns the names of a template's fields."""
    return tuple(name for _, name, _, _ in Formatter().parse(template) if name is not None)


def fill(template: str, record: Mapping[str, object], key: str) -> str:
    """Returns the text of an object: the template filled with its fields, or with each message of its list
    `key`.

    Raises:
        Unfilled: a field is missing or has no text, or the list contains something other than messages.
    """
    parts = [(text.replace("\\n", "\n").replace("\\t", "\t"), name) for text, name, _, _ in Formatter().parse(template)]
    messages = value_of(record, key)
    return "".join(_fill_one(parts, fields) for fields in (messages if isinstance(messages, list) else [record]))


def _fill_one(parts: list[tuple[str, str | None]], fields: object) -> str:
    if not isinstance(fields, Mapping):
        raise Unfilled(f": a message is a {type(fields).__name__}")
    filled = []
    for text, name in parts:
        filled.append(text)
        if name is None:
            continue
        value = value_of(fields, name)
        if value is MISSING:
            raise Unfilled(f": no field {name!r}, only {names_of(fields)}")
        filled.append(str(value) if isinstance(value, int | float) else text_of(value, name))
    return "".join(filled)


MISSING: Final = object()
"""The value of a field that an object does not have."""


def value_of(record: Mapping[str, object], name: str) -> object:
    """Returns the value of a field, or of a field of a nested object: `a.b`; `MISSING` if there is none."""
    value: object = record
    for part in [name] if name in record else name.split("."):
        value = value.get(part, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def text_of(value: object, name: str) -> str:
    """Returns a field's text: a text, or the texts of a message's content parts, joined.

    Raises:
        Unfilled: the field has no text, or a part that is not text, such as an image.
    """
    if isinstance(value, str):
        return value
    if value is None:
        raise Unfilled(f": field {name!r} is null")
    if not isinstance(value, list):
        raise Unfilled(f": field {name!r} is a {type(value).__name__}")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Unfilled(f": field {name!r} is a list with {'a message' if is_message(part) else repr(kind)}")
        texts.append(text)
    return "".join(texts)


def is_message(value: object) -> bool:
    """Returns True for an object that looks like a message of a chat."""
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def names_of(record: Mapping[str, object]) -> str:
    """Lists the fields of an object, and of its nested objects, for messages."""
    names = []
    for name, value in record.items():
        inner = [f"{name}.{part}" for part in value] if isinstance(value, Mapping) else []
        chat = " (a chat)" if isinstance(value, list) and value and is_message(value[0]) else ""
        names += [f"{part!r}{chat}" for part in inner or [name]]
    return ", ".join(names[:8]) or "nothing"
