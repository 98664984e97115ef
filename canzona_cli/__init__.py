"""canzona: pre-train Qwen3 and Llama-like models with matrix-based optimizers inside Megatron-core."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canzona_cli.library import Engine, use_in_megatron_lm

__version__ = "0.1.0"
__all__ = ["Engine", "use_in_megatron_lm"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from canzona_cli import library  # imported when a name is first used, because it needs torch

    return getattr(library, name)
