"""What several test folders share."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup a closed terminal, and so do all the
# processes they start: what they check of it would never happen.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says how busy the machine is.
settings.register_profile("canzona", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("canzona")


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for prepared corpora, empty at the start of the session and gone after it."""
    return tmp_path_factory.mktemp("corpora")
