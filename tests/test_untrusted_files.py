"""Files that somebody else may have written: read as data or refused, never run."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from canzona_cli.config.compose import compose_run, load_known, load_resolved
from canzona_cli.core.errors import CanzonaError
from canzona_cli.core.planner.plan_file import read_plan
from canzona_cli.data.tokenizers import load_json_tokenizer


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        import os

        return os.mkdir, (str(self._made),)


def yaml_trap(made: Path) -> bytes:
    return f"name: !!python/object/apply:os.mkdir ['{made}']\n".encode()


READERS: dict[str, Callable[[Path], object]] = {
    "run's config.yaml": load_resolved,
    "run's config.yaml to report": load_known,
    "recipe": lambda path: compose_run([f"recipe={path}"]),
    "cluster profile": lambda path: compose_run(["recipe=tiny", f"cluster={path}"]),
    "plan": read_plan,
    "tokenizer": lambda path: load_json_tokenizer(str(path), None),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", ["pickle", "yaml", "bytes"])
def test_a_trap_in_a_file_is_refused(reader: str, content: str, tmp_path: Path) -> None:
    made, path = tmp_path / "made", tmp_path / "x.yaml"
    traps = {"pickle": pickle.dumps(Trap(made)), "yaml": yaml_trap(made), "bytes": bytes(range(256)) * 8}
    path.write_bytes(traps[content])
    with pytest.raises(CanzonaError) as refused:
        READERS[reader](path)
    assert refused.value.problems
    assert not made.exists()


def test_a_trap_in_megatrons_cache_of_sample_indices_is_not_sprung(tmp_path: Path) -> None:
    """It asks numpy for pickles, which its own loader then holds back; checked because we give it a cache to read."""
    from megatron.core.datasets import gpt_dataset

    made, path = tmp_path / "made", tmp_path / "index.npy"
    trapped = np.empty(1, dtype=object)
    trapped[0] = Trap(made)
    np.save(path, trapped, allow_pickle=True)
    with pytest.raises(pickle.UnpicklingError):
        gpt_dataset.safe_numpy_load(str(path), allow_pickle=True)
    assert not made.exists()
    # The trap works where nothing holds it back: else this test would say nothing.
    np.load(path, allow_pickle=True)
    assert made.exists()
