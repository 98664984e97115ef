"""What pydantic checks a type with."""

import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_NO_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def adapter[T](kind: type[T]) -> "TypeAdapter[T]":
    """Made once: that takes longer than all it then reads. And without pydantic's plugins, as Typer does: to look for
    them it reads the entry points of every package there is."""
    found: TypeAdapter[T] = _made(kind)  # type: ignore[arg-type]
    return found


@cache
def _made[T](kind: type[T]) -> "TypeAdapter[T]":
    from pydantic import TypeAdapter

    before = os.environ.get(_NO_PLUGINS)
    os.environ[_NO_PLUGINS] = "1"
    try:
        return TypeAdapter(kind)
    finally:
        if before is None:
            del os.environ[_NO_PLUGINS]
        else:
            os.environ[_NO_PLUGINS] = before
