"""Every random state of a rank as tensors, so that what is drawn after resuming is what would have been drawn."""

import random

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_PYTHON_VERSION = 3  # of the tuple random.getstate() returns
_MEGATRON = "megatron."


def random_states() -> dict[str, torch.Tensor]:
    """States of torch on host and device, Megatron's tracker, Python and numpy, as host tensors."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    found["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
    found["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    found |= {f"{_MEGATRON}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return found


def check_random_states(states: dict[str, torch.Tensor]) -> None:
    """Compare `states` with this process's own, and set generators to them that nobody uses.

    Raises:
        Exception: of whatever kind: they are no such states. Megatron's are of another length on another device.
    """
    for name, own in random_states().items():
        if name != "cuda" and not name.startswith(_MEGATRON):
            found = states[name]
            if found.dtype != own.dtype or (found.shape != own.shape and name != "python_gauss"):
                raise ValueError(f"{name} is no state of a random generator")
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(_of_python(states))
    np.random.RandomState().set_state(_of_numpy(states))


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """The inverse of `random_states`; a device's state is left out where there is no such device."""
    torch.set_rng_state(states["torch"])
    random.setstate(_of_python(states))
    np.random.set_state(_of_numpy(states))
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_MEGATRON): state for name, state in states.items() if name.startswith(_MEGATRON)}
    get_cuda_rng_tracker().set_states(tracked)


def _of_python(states: dict[str, torch.Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    gauss = states["python_gauss"].tolist()
    return _PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None


def _of_numpy(states: dict[str, torch.Tensor]) -> tuple[str, npt.NDArray[np.uint32], int, int, float]:
    *keys, position, has_gauss = states["numpy"].tolist()
    return "MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(states["numpy_gauss"].item())
