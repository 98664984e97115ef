"""Runs Megatron-core on a machine without CUDA.

Megatron-core asks `torch.cuda` for the device, streams and random state, and passes `'cuda'` where it creates
tensors. On a machine without CUDA each of these calls raises an error. `install` replaces all of them by CPU
versions, so that the same Megatron code runs over gloo. It also replaces two functions that are imprecise on CPUs:
Megatron's norm of gradients, and torch's embedding in bf16. Each replaced name is a `Replacement` and has a contract
test (`tests/core/megatron/test_cpu_backend.py`) that runs the Megatron code that needs it.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.autograd.function import FunctionCtx

from canzona_cli.core.optimizers.matrix_optimizer import sum_of_squares

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


@dataclass(frozen=True)
class Replacement:
    """The replacement of a name that Megatron-core uses and that does not work, or is imprecise, without CUDA."""

    owner: ModuleType | type
    name: str
    on_cpu: object
    """The CPU version."""
    used_by: str
    """The Megatron-core code that needs the replacement."""

    @property
    def label(self) -> str:
        """The name with its module or class."""
        return f"{self.owner.__name__}.{self.name}"


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _factory_on_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps a function that creates tensors: it uses the CPU in place of `cuda`, and never pins memory. Other
    arguments are passed on."""

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


def _counts_to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Replaces the function that copies token counts to the host. Megatron's function converts only GPU
    tensors to numpy arrays; the replacement converts CPU tensors, because collectives do not accept tensors
    as sizes."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _l2_norm(
    _chunk_size: int, _overflow: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Replaces the norm of all gradients of a rank, (1,). Without the kernels of Transformer Engine or APEX,
    Megatron's function takes torch's norm of each gradient, which on CPUs is 0.1% too small at 2e7 elements
    (`optimizers.matrix_optimizer`)."""
    [gradients] = tensor_lists
    return sum_of_squares(gradients).sqrt().view(1), None


class _PreciseEmbedding(torch.autograd.Function):
    """An embedding whose weight gradient is summed in fp32 and rounded once, as on CUDA.

    On CPUs, torch adds up the gradients of equal tokens in the weight's dtype. In bf16, a sum of ones stops growing
    at 256, because half a unit in the last place is then one."""

    @staticmethod
    def forward(ctx: FunctionCtx, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.weight_shape = weight.shape  # type: ignore[attr-defined]
        return torch.embedding(weight, ids)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,) = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_weight = grad.new_zeros(ctx.weight_shape)  # type: ignore[attr-defined]
        # The sums in fp32 have one row for each token that occurs, not one for each token of the vocabulary.
        tokens, rows = ids.unique(return_inverse=True)
        sums = torch.zeros(tokens.numel(), grad.size(-1), dtype=torch.float32)
        sums.index_add_(0, rows.view(-1), grad.reshape(-1, grad.size(-1)).float())
        return None, grad_weight.index_copy_(0, tokens, sums.to(grad.dtype))


def _embedding(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps torch's embedding, to use `_PreciseEmbedding` for bf16 weights. Calls with options, which Megatron
    does not use, are passed on."""

    @functools.wraps(original)
    def embed(*args: object, **kwargs: object) -> object:
        match args:
            case (ids, torch.Tensor(dtype=torch.bfloat16) as weight) if not kwargs:
                return _PreciseEmbedding.apply(ids, weight)
        return original(*args, **kwargs)

    return embed


def _set_rng_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _replacements() -> tuple[Replacement, ...]:
    """Returns all replacements. Imports the Megatron-core modules whose names are replaced."""
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    cuda, functional = torch.cuda, torch.nn.functional
    module = "transformer.moe.token_dispatcher"
    type_name, wrap = _megatron_type_name(torch.Tensor.type), _factory_on_cpu
    return (
        Replacement(cuda, "current_device", lambda: CPU, "every `device=torch.cuda.current_device()`"),
        Replacement(cuda, "current_stream", lambda device=None: _STREAM, "distributed.param_and_grad_buffer"),
        Replacement(dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _STREAM, f"{module}, which creates one"),
        Replacement(dispatcher, "maybe_move_tensor_to_cpu", _counts_to_host, module),
        Replacement(cuda, "manual_seed", torch.manual_seed, "tensor_parallel.random"),
        Replacement(cuda, "get_rng_state", _get_rng_state, "tensor_parallel.random"),
        Replacement(mcore_random, "_get_cuda_rng_state", _get_rng_state, "tensor_parallel.random fork"),
        Replacement(mcore_random, "_set_cuda_rng_state", _set_rng_state, "tensor_parallel.random fork"),
        Replacement(clip_grads, "l2_norm_impl", _l2_norm, "optimizer.clip_grads"),
        Replacement(functional, "embedding", _embedding(functional.embedding), "tensor_parallel.layers"),
        Replacement(torch.Tensor, "type", type_name, "optimizer.optimizer, .distrib_optimizer, .clip_grads"),
        Replacement(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor, "models.common.language_module"),
        Replacement(torch, "tensor", wrap(torch.tensor), "optimizer.optimizer (loss scale), rotary tables under cp"),
        Replacement(torch, "zeros", wrap(torch.zeros), "pipeline_parallel.schedules, optimizer.clip_grads"),
        Replacement(torch, "ones", wrap(torch.ones), "transformer.utils (attention masks)"),
    )


_originals: dict[str, object] = {}
"""The original of each replaced name, by `Replacement.label`, while the replacements are installed."""


def install() -> None:
    """Replaces every name by its CPU version. Further calls have no effect.

    Raises:
        RuntimeError: CUDA is available, so the replacements would move GPU work to the CPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("the CPU backend must not be installed where CUDA is available")
    for item in _replacements():
        if item.label not in _originals:
            _originals[item.label] = getattr(item.owner, item.name)
            setattr(item.owner, item.name, item.on_cpu)


def uninstall() -> None:
    """Restores the original names (for tests)."""
    for item in _replacements():
        if item.label in _originals:
            setattr(item.owner, item.name, _originals.pop(item.label))
