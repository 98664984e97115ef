"""Everything that touches Megatron-core's internals. Import it before Megatron.

Megatron and emerging-optimizers decorate some thirty functions with `torch.compile` when they are imported,
and the decorator alone loads the whole compiler: more than half of a worker's start-up, on four ranks of two
cores ten seconds. A run on CPUs calls none of them. Here compilation waits for the first call.

Its timers import wandb where that is installed, a quarter of the time Megatron takes, to write what canzona's
trackers write in processes of their own. Here it is not there meanwhile.
"""

import functools
import sys
from collections.abc import Callable
from typing import cast

import torch

_compile = torch.compile


def compile_when_called(function: Callable[..., object] | None = None, **options: object) -> Callable[..., object]:
    """`torch.compile`, at the first call of what it returns.
    Inside of other compiled functions it is not there."""
    if function is None:
        return lambda function: compile_when_called(function, **options)
    compiled: Callable[..., object] | None = None

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        nonlocal compiled
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if compiled is None:
            compiled = cast(Callable[..., Callable[..., object]], _compile)(function, **options)
        return compiled(*args, **kwargs)

    return call


torch.compile = compile_when_called  # type: ignore[assignment]
_wandb = sys.modules.get("wandb")
sys.modules["wandb"] = None  # type: ignore[assignment] # an import of it fails
try:
    import megatron.core.models.gpt.gpt_model  # noqa: F401 - decorates what megatron.core alone does not
finally:
    torch.compile = _compile
    del sys.modules["wandb"]
    if _wandb is not None:
        sys.modules["wandb"] = _wandb
