"""The methods of Megatron's optimizers that the engine's optimizers do not have.

Megatron's versions would silently ignore the matrices, so these methods raise an error instead.
"""

from collections.abc import Callable
from typing import Final, NoReturn

from canzona_cli.core.errors import Problem, Unsupported

_ON_DEVICE: Final = "fp32 masters and optimizer state of matrices stay on the device that updates them"
_IN_STEP: Final = "the norm is computed, and gradients are clipped, within step()"
_SAVED: Final = "no rank has the state of all matrices, and Megatron's format `torch` cannot store it by host"
_WEIGHTS: Final = "use sharded_state_dict and load_state_dict (Megatron-LM: --ckpt-format torch_dist)"


def refuse_masters(state_dict: object) -> None:
    """Raises Unsupported if the caller wants masters to be copied from a loaded state instead of the
    weights."""
    if state_dict is not None:
        reason = "masters of matrices are copied from the weights"
        fix = "call it without state_dict (Megatron-LM: remove --load-main-params-from-ckpt)"
        raise Unsupported(Problem(key="reload_model_params", value="state_dict", reason=reason, fix=fix))


def _refused(name: str, reason: str, fix: str) -> Callable[..., NoReturn]:
    """Returns a method that raises Unsupported."""

    def method(*_: object, **__: object) -> NoReturn:
        raise Unsupported(Problem(key=name, reason=reason, fix=fix))

    method.__name__ = name
    return method


class Refusals:
    """The methods that raise Unsupported on the part of `CanzonaOptimizer` that updates matrices, and, except
    `sharded_state_dict`, on `CanzonaOptimizer` itself."""

    offload_to_cpu = _refused("offload_to_cpu", _ON_DEVICE, "free other memory, or build the engine again")
    restore_from_cpu = _refused("restore_from_cpu", _ON_DEVICE, "remove the call")
    count_zeros = _refused("count_zeros", "no rank has the gradients of all matrices", "remove the call")
    clip_grad_norm = _refused("clip_grad_norm", _IN_STEP, "call step()")
    get_grads_for_grad_norm = _refused("get_grads_for_grad_norm", _IN_STEP, "call get_grad_norm()")
    has_grad_norm_group = _refused("has_grad_norm_group", _IN_STEP, "call step()")
    sharded_state_dict = _refused("sharded_state_dict", _SAVED, _WEIGHTS)
    save_parameter_state = _refused("save_parameter_state", _SAVED, _WEIGHTS)
    load_parameter_state = _refused("load_parameter_state", _SAVED, _WEIGHTS)
    save_state_dict_to_file = _refused("save_state_dict_to_file", _SAVED, _WEIGHTS)
    load_state_dict_from_file = _refused("load_state_dict_from_file", _SAVED, _WEIGHTS)


class SavingRefusals(Refusals):
    """The methods that raise Unsupported on `CanzonaOptimizer`, which loads only sharded state, but work on
    the part of it that updates matrices."""

    state_dict = _refused("state_dict", _SAVED, _WEIGHTS)
    load_state_dict = _refused("load_state_dict", _SAVED, _WEIGHTS)
