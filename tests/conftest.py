"""Fixtures that several test folders share."""

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup a closed terminal, and so do all the
# processes they start: what they check of it would never happen.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What torch and Megatron leave when they are imported is no garbage, however often it is looked at; as in the command.
gc.set_threshold(50_000)

# How long an example takes says how busy the machine is.
settings.register_profile("canzona", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("canzona")


@pytest.fixture(scope="session", autouse=True)
def corpus_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of whatever the session starts, empty at its start and gone after it: tests neither see what is
    in the user's own nor write there."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CANZONA_CACHE", str(folder))
        yield folder
