"""`canzona checkpoint`: lists and verifies; exit codes and JSON for scripts, words for people, no torch."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canzona_cli.config.compose import dump_resolved
from tests.checkpoint.checkpoints import save
from tests.cli.commands.support import canzona, imports_none_of
from tests.records.runs import CONFIG, LAYOUT

SMALL = replace(CONFIG.model, hidden_size=8, num_attention_heads=4, num_query_groups=2, head_dim=4)
"""Has the matrices that small checkpoints hold."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 10 and 20, as the workers leave them."""
    run = tmp_path / "runs" / "tiny"
    run.mkdir(parents=True)
    settings = dump_resolved(replace(CONFIG, model=SMALL))
    (run / "config.yaml").write_text(settings)
    texts = {"config.yaml": settings, "layout.json": json.dumps(asdict(LAYOUT))}
    for step in (10, 20):
        save(run / "checkpoints", step, texts=texts)
    return run


def damage(run: Path, step: int, *, size: bool) -> str:
    """Truncate one file of a checkpoint, or change a byte of it; its key in messages."""
    path = run / "checkpoints" / f"step-{step:08d}" / "rank-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] if size else content[:-1] + bytes([content[-1] ^ 1]))
    return f"step-{step:08d}/rank-00001.safetensors"


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_list_has_a_line_for_each_and_fits_the_terminal(run: Path) -> None:
    done = canzona("checkpoint", "list", str(run), code=0)
    assert max(map(len, done.stdout.splitlines())) <= max(80, len(f"checkpoints in {run}/checkpoints"))
    for step in (10, 20):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"step-{step:08d}"))
        for part in ("KiB", "3", "TP 2 × DP 2", "muon (canzona)", "intact"):
            assert part in line


def test_the_newest_run_is_meant_where_none_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "unsaved").mkdir()
    (tmp_path / "runs" / "older" / "checkpoints").mkdir(parents=True)
    os.utime(tmp_path / "runs" / "older" / "checkpoints", (0, 0))
    for place in (tmp_path, run):
        listed = json.loads(canzona("checkpoint", "list", "--json", cwd=place).stdout)
        assert listed["root"] == str(run / "checkpoints")


def test_the_list_as_json_tells_damaged_ones_too(run: Path) -> None:
    key = damage(run, 20, size=True)
    done = canzona("checkpoint", "list", "--json", str(run), code=0)
    first, second = json.loads(done.stdout)["checkpoints"]
    assert (first["name"], first["step"], first["sound"], first["problems"]) == ("step-00000010", 10, True, [])
    assert first["layout"] == {"tp": 2, "pp": 1, "vpp": 1, "cp": 1, "dp": 2}
    assert first["world_size"] == 3
    assert first["bytes"] == sum(p.stat().st_size for p in Path(first["path"]).iterdir() if p.name != "manifest.json")
    assert second["sound"] is False
    assert second["problems"][0]["file"] == key
    assert key in words(canzona("checkpoint", "list", str(run)).stdout)


def test_verifying_reads_everything_and_names_every_bad_file(run: Path) -> None:
    done = canzona("checkpoint", "verify", str(run))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["step-00000010", "step-00000020"]
    save(run / "checkpoints", 30)
    keys = [damage(run, 20, size=False), damage(run, 30, size=True)]
    done = canzona("checkpoint", "verify", str(run), code=5)
    assert "Checkpoint cannot be used: 2 problems" in done.stderr
    for key in keys:
        assert key in done.stderr
    assert done.stderr.count("checkpoint.resume=step-00000010") == 2, "the one before that is whole to its last byte"
    as_json = canzona("checkpoint", "verify", "--json", str(run))
    assert (as_json.returncode, as_json.stderr) == (5, "")
    verified = json.loads(as_json.stdout)
    assert verified["sound"] is False
    assert [one["sound"] for one in verified["checkpoints"]] == [True, False, False]
    assert [problem["file"] for one in verified["checkpoints"] for problem in one["problems"]] == keys
    assert verified["checkpoints"][0]["bytes"] > 0


def test_one_checkpoint_is_verified_by_its_path(run: Path) -> None:
    damage(run, 10, size=False)
    for step, code in ((10, 5), (20, 0)):
        path = run / "checkpoints" / f"step-{step:08d}"
        assert canzona("checkpoint", "verify", str(path)).returncode == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "nosuch"], "there is no such directory"),
        (["list", "empty"], "contains neither a run nor a checkpoint"),
        (["verify", "new"], "the run has no checkpoint yet"),
        (["verify", "new/checkpoints/step-00000010"], "there is no such checkpoint"),
        (["list"], "no run has been saved under runs"),
    ],
)
def test_where_there_is_none_is_exit_code_2_with_a_hint(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("")
    done = canzona("checkpoint", *arguments, cwd=tmp_path, code=2)
    assert said in words(done.stderr)
    assert "step-00000030" in words(done.stderr)


def test_a_run_that_has_not_been_saved_yet_has_an_empty_list(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    done = canzona("checkpoint", "list", str(tmp_path), code=0)
    assert "no checkpoints yet" in done.stdout


def test_neither_torch_nor_numpy_is_imported(run: Path) -> None:
    imports_none_of(("torch", "megatron", "numpy", "safetensors"), "checkpoint", "list", str(run))
