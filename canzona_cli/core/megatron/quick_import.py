"""Imports Megatron without loading torch's compiler, for processes that canzona starts. Must be imported
before Megatron.

Megatron and emerging-optimizers decorate about thirty functions with `torch.compile` when they are imported.
The decorator alone loads the compiler, which makes a rank's imports 40% longer (two seconds of processor
time), and a run on CPUs does not call any of these functions. While this module imports Megatron,
`torch.compile` is replaced by a decorator that compiles at the first call.

Megatron's timers import wandb if it is installed, which takes a quarter of Megatron's import time. canzona's
trackers use wandb in separate processes instead, so the import is blocked while Megatron is imported.
"""

import functools
import sys
from collections.abc import Callable
from typing import cast

import torch

_compile = torch.compile


def compile_at_first_call(function: Callable[..., object] | None = None, **options: object) -> Callable[..., object]:
    """Returns a function that compiles `function` with `torch.compile` at the first call. Within another
    function that torch compiles, `function` itself is called.

    Args:
        function: None to return a decorator with these options.
        options: the arguments of `torch.compile`.
    """
    if function is None:
        return lambda function: compile_at_first_call(function, **options)
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


torch.compile = compile_at_first_call  # type: ignore[assignment]
_wandb = sys.modules.get("wandb")
sys.modules["wandb"] = None  # type: ignore[assignment] # makes `import wandb` fail
try:
    import megatron.core.models.gpt.gpt_model  # noqa: F401 - decorates more functions than megatron.core alone
finally:
    torch.compile = _compile
    del sys.modules["wandb"]
    if _wandb is not None:
        sys.modules["wandb"] = _wandb
