"""`canzona plan` of one or several runs and `canzona train --dry-run` show the same memory for the same run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.commands.support import canzona

SIZES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")


def _shown(folder: Path, *arguments: str) -> Mapping[str, object]:
    result = canzona(*arguments, "--json", cwd=folder, environment={"CUDA_VISIBLE_DEVICES": ""}, code=0)
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    assert isinstance(content["version"], int)
    return content


def _bytes_in(content: object, *path: str) -> object:
    for name in path:
        assert isinstance(content, Mapping)
        content = content[name]
    return content


def _rows(folder: Path, recipe: str) -> Sequence[Mapping[str, object]]:
    plans = _shown(folder, "plan", f"recipe={recipe}", "gpus=1,8,64,1024")["plans"]
    assert isinstance(plans, list)
    return [row for row in plans if row["fits"]]


@pytest.mark.parametrize("recipe", ["qwen3-tiny", *(pytest.param(size, marks=pytest.mark.sweep) for size in SIZES)])
def test_three_commands_show_one_account(recipe: str, tmp_path: Path) -> None:
    """The commands agree to the byte on the fewest and on the most GPUs."""
    mine = tmp_path / "mine.yaml"  # in which little is left to search
    mine.write_text(f"defaults: [{recipe}]\ntrain: {{micro_batch_size: 1, recompute: full}}\n")
    rows = _rows(tmp_path, str(mine))
    assert len(rows) >= 2
    for row in (rows[0], rows[1 if recipe == "qwen3-tiny" else -1]):
        run = (f"recipe={mine}", f"gpus={row['gpus']}")
        planned = _shown(tmp_path, "plan", *run, "--dry-run")
        trained = _shown(tmp_path, "train", *run, "--dry-run")
        assert _layout(planned).items() <= _layout(trained).items()
        assert (
            row["memory_bytes"]
            == _bytes_in(planned, "memory", "per_gpu_bytes", "total")
            == _bytes_in(trained, "memory", "total_bytes")
        ), run


def _layout(content: Mapping[str, object]) -> Mapping[str, object]:
    layout = content["layout"]
    assert isinstance(layout, Mapping)
    return layout
