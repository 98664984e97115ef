"""What several test folders share."""

import signal
from pathlib import Path

import pytest

# A shell that starts the tests in the background lets them ignore Ctrl-C, and so do all the processes they start:
# what they check of it would never happen.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for prepared corpora, empty at the start of the session and gone after it."""
    return tmp_path_factory.mktemp("corpora")
