"""Garbage is collected on all ranks after the same step, and only what is new is looked at."""

import gc
import weakref

from canzona_cli.training.loop import STEPS_BETWEEN, collect_garbage, suspend_garbage_collection


class Thing:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_live_until_it_is_time() -> None:
    old = weakref.ref(Thing())
    with suspend_garbage_collection():
        assert old() is None, "what was garbage at the beginning stays for ever"
        assert gc.get_freeze_count() > 1000
        new = weakref.ref(Thing())
        for step in range(1, STEPS_BETWEEN):
            collect_garbage(step)
            assert not gc.isenabled()
        assert new() is not None
        collect_garbage(STEPS_BETWEEN)
        assert new() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
