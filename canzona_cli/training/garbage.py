"""Python's garbage collector, kept out of the steps: left alone it stops each rank at another moment, and all wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

STEPS_BETWEEN = 50
"""Steps after which all ranks collect what is new, together. Cycles are rare, and none of ours holds a tensor."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Nothing is collected within; what is alive at its beginning is not looked at by `gc.collect` within either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_after(step: int) -> None:
    """Collect now if it is time; every rank calls it after every step."""
    if step % STEPS_BETWEEN == 0:
        gc.collect()
