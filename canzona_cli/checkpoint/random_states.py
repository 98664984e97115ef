"""The random states of a rank as tensors, so that a resumed run draws the numbers an unbroken one would draw."""

import random

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_PYTHON_VERSION = 3  # of the tuple random.getstate() returns
_MEGATRON = "megatron."


def random_states() -> dict[str, torch.Tensor]:
    """Copies the random states of torch (host and device), Megatron's tracker, Python and numpy to host tensors."""
    version, words, gauss = random.getstate()
    assert version == _PYTHON_VERSION
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
    states["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    states |= {f"{_MEGATRON}{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    return states


def check_random_states(states: dict[str, torch.Tensor]) -> None:
    """Compares `states` with those of this process, and tries them on generators that nobody uses.

    Raises:
        Exception: of whatever kind: they are no such states. Megatron's are of another length on another device.
    """
    for name, current in random_states().items():
        if name != "cuda" and not name.startswith(_MEGATRON):
            state = states[name]
            if state.dtype != current.dtype or (state.shape != current.shape and name != "python_gauss"):
                raise ValueError(f"{name} is no state of a random generator")
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(_of_python(states))
    np.random.RandomState().set_state(_of_numpy(states))


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """Restores what `random_states` copied; skips a device's state if there is no such device."""
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
