"""What several test folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for prepared corpora, empty at the start of the session and gone after it."""
    return tmp_path_factory.mktemp("corpora")
