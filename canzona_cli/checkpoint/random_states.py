"""Every random state of a rank as tensors, so that what is drawn after resuming is what would have been drawn."""

import random

import numpy as np
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


def set_random_states(states: dict[str, torch.Tensor]) -> None:
    """The inverse of `random_states`; a device's state is left out where there is no such device."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    cached = float(states["numpy_gauss"].item())
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_MEGATRON): state for name, state in states.items() if name.startswith(_MEGATRON)}
    get_cuda_rng_tracker().set_states(tracked)
