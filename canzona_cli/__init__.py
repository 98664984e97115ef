"""canzona: pre-train Qwen3 and Llama-like models with matrix-based optimizers inside Megatron-core."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canzona_cli.core.api import Engine
    from canzona_cli.library_megatron_lm import use_in_megatron_lm

__version__ = "0.1.0"
__all__ = ["Engine", "use_in_megatron_lm"]
_PLACES = {"Engine": "canzona_cli.core.api", "use_in_megatron_lm": "canzona_cli.library_megatron_lm"}
"""The module of each public name. It is imported when the name is first used, because it needs torch."""


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
