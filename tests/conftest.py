"""Fixtures that several test folders share."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup a closed terminal, and so do all the
# processes they start: what they check of it would never happen.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The million objects that torch and Megatron are made of are no garbage. To look through them while they are imported,
# with the tests' own, and when the process is taken apart, took each process of tests three seconds.
gc.disable()
gc.set_threshold(50_000)
_process = os.getpid()
_sessions: list[pytest.Session] = []
"""The session of this process, once a test has run."""


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _session(request: pytest.FixtureRequest) -> None:
    _sessions.append(request.session)


@atexit.register  # before most modules, and so it runs after theirs
def _end() -> None:
    if _sessions and os.getpid() == _process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(_sessions[0].exitstatus))


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
