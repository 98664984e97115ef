"""Runs Megatron-core on a machine without CUDA.

Megatron-core asks `torch.cuda` for the device, streams and random state, and passes `'cuda'` where it creates
tensors. On a machine without CUDA each of these calls raises an error. `install` replaces all of them by CPU
versions, so that the same Megatron code runs over gloo. Each replaced name is a `Replacement` and has a
contract test (`tests/megatron/test_cpu_backend.py`) that runs the Megatron code that needs it.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch

CPU = torch.device("cpu")


class CpuStream:
    """A stand-in for a CUDA stream. On a CPU, work is done when a call returns, so the methods that wait do
    nothing."""

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self) -> "CpuStream":
        """Returns an object whose `synchronize` does nothing."""
        return self

    def synchronize(self) -> None: ...


_STREAM = CpuStream()


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """The replacement of a name that Megatron-core uses and that does not work without CUDA."""

    owner: ModuleType | type
    name: str
    make: Callable[[Callable[..., object]], object]
    """A function that returns the CPU version, given the original."""
    used_by: str
    """The Megatron-core code that needs the replacement."""

    @property
    def label(self) -> str:
        """The name with its module or class, as `install` returns it."""
        return f"{self.owner.__name__}.{self.name}"


def _returning(value: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Returns a `Replacement.make` whose CPU version ignores its arguments and returns `value`."""
    return lambda original: lambda *args, **kwargs: value


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _factory_on_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps a function that creates tensors: the device `cuda` becomes the CPU, and memory is never pinned.
    Other arguments are passed on."""

    @functools.wraps(original)
    def create(*args: object, **kwargs: object) -> object:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return create


def _megatron_type_name(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps `Tensor.type()` to return CUDA type names to callers in Megatron, whose optimizers sort
    parameters by type name (`'torch.cuda.FloatTensor'`). All other callers get the real name."""

    @functools.wraps(original)
    def type_name(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        name = original(tensor, *args, **kwargs)
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(name, str) and caller.startswith("megatron.") and not name.startswith("torch.cuda."):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    return type_name


def _counts_as_numpy(original: Callable[..., object]) -> Callable[..., object]:
    """Replaces the function that copies token counts to the host. Megatron's function converts only GPU
    tensors to numpy arrays; the replacement converts CPU tensors, because collectives do not accept tensors
    as sizes."""

    @functools.wraps(original)
    def counts_to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    return counts_to_host


def _set_rng_state(original: Callable[..., object]) -> Callable[..., None]:
    def set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
        del device, graph_safe
        torch.set_rng_state(new_state)

    return set_state


def _get_rng_state(original: Callable[..., object]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: torch.get_rng_state()


def _manual_seed(original: Callable[..., object]) -> Callable[..., object]:
    return lambda seed: torch.manual_seed(seed)


def _tensor_cuda(original: Callable[..., object]) -> Callable[..., torch.Tensor]:
    def cuda(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return tensor

    return cuda


def _replacements() -> tuple[Replacement, ...]:
    """Returns all replacements. Imports the Megatron-core modules whose names are replaced."""
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    cuda = torch.cuda
    table: tuple[tuple[ModuleType | type, str, Callable[[Callable[..., object]], object], str], ...] = (
        (cuda, "current_device", _returning(CPU), "every `device=torch.cuda.current_device()`"),
        (cuda, "current_stream", _returning(_STREAM), "distributed.param_and_grad_buffer"),
        (
            dispatcher.MoEAlltoAllTokenDispatcher,
            "cuda_dtoh_stream",
            lambda original: _STREAM,
            "transformer.moe.token_dispatcher, which would create one",
        ),
        (dispatcher, "maybe_move_tensor_to_cpu", _counts_as_numpy, "transformer.moe.token_dispatcher"),
        (cuda, "manual_seed", _manual_seed, "tensor_parallel.random"),
        (cuda, "get_rng_state", _get_rng_state, "tensor_parallel.random"),
        (mcore_random, "_get_cuda_rng_state", _get_rng_state, "tensor_parallel.random fork"),
        (mcore_random, "_set_cuda_rng_state", _set_rng_state, "tensor_parallel.random fork"),
        (torch.Tensor, "type", _megatron_type_name, "optimizer.optimizer, .distrib_optimizer, .clip_grads"),
        (torch.Tensor, "cuda", _tensor_cuda, "models.common.language_module (tied weights)"),
        (
            torch,
            "tensor",
            _factory_on_cpu,
            "optimizer.optimizer (found_inf, loss scale), rotary tables under cp",
        ),
        (torch, "zeros", _factory_on_cpu, "pipeline_parallel.schedules (token count), optimizer.clip_grads"),
        (torch, "ones", _factory_on_cpu, "transformer.utils (attention masks)"),
    )
    return tuple(
        Replacement(owner=owner, name=name, make=make, used_by=used_by) for owner, name, make, used_by in table
    )


_originals: dict[str, Callable[..., object]] = {}
"""The original of each replaced name, by `Replacement.label`, while the replacements are installed."""


def install() -> Mapping[str, str]:
    """Replaces every name by its CPU version. Further calls have no effect.

    Returns:
        The replaced names, each with the Megatron-core code that needs the replacement.

    Raises:
        RuntimeError: CUDA is available, so the replacements would move GPU work to the CPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU backend must not be installed where CUDA is available")
    replacements = _replacements()
    for item in replacements:
        if item.label not in _originals:
            original = getattr(item.owner, item.name)
            _originals[item.label] = original
            setattr(item.owner, item.name, item.make(original))
    return {item.label: item.used_by for item in replacements}


def uninstall() -> None:
    """Restores the original names (for tests)."""
    for item in _replacements():
        if item.label in _originals:
            setattr(item.owner, item.name, _originals.pop(item.label))
