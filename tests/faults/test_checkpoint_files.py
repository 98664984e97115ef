"""Whatever happens to a checkpoint's files or to the process that writes them is told from a whole one, and named."""

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from canzona_cli.checkpoint.commit import begin, finish, write_part
from canzona_cli.checkpoint.manifest import MANIFEST, Manifest, Shard, StoredFile, StoredTensor, manifest_text
from canzona_cli.checkpoint.store import CheckpointStore, resolve
from canzona_cli.checkpoint.verify import foreign_files, previous_usable, read_manifest, verify
from canzona_cli.core.errors import CheckpointInvalid, SaveFailed
from tests.checkpoint.checkpoints import RANKS, TEXTS, buffer, header, names, save, shard
from tests.cli.commands.support import canzona, ran
from tests.faults.disks import read_only, small_disk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with checkpoints of steps 10 and 20."""
    root = tmp_path / "run" / "checkpoints"
    root.parent.mkdir()
    for step in (10, 20):
        save(root, step)
    return root


def bad_files(folder: Path) -> dict[str, str]:
    """Returns the result of a full verification by file, the manifest included."""
    try:
        _, problems = verify(folder)
    except CheckpointInvalid as error:
        problems = list(error.problems)
    assert all("checkpoint.resume=step-00000010" in problem.fix for problem in problems), "the one before is offered"
    return {problem.key.removeprefix(f"{folder.name}/"): problem.reason for problem in problems}


def bad_at_launch(root: Path) -> list[str]:
    """Files that resuming names before any worker starts."""
    with pytest.raises(CheckpointInvalid) as caught:
        resolve(root, "auto")
    return [problem.key for problem in caught.value.problems]


def test_a_flipped_bit_is_found_in_every_file_wherever_it_is(root: Path) -> None:
    folder = root / "step-00000020"
    files = sorted(folder.iterdir())
    assert len(files) == 3 + len(TEXTS), "two ranks' files, the texts, the manifest"
    for path in files:
        content = path.read_bytes()
        for place in sorted({0, 7, 8, 70, len(content) // 2, len(content) - 1}):
            if place >= len(content):
                continue
            for bit in (0, 7):
                changed = bytearray(content)
                changed[place] ^= 1 << bit
                path.write_bytes(changed)
                assert list(bad_files(folder)) == [path.name], f"bit {bit} of byte {place}"
        path.write_bytes(content)
    assert bad_files(folder) == {}
    shard_file = folder / "rank-00001.safetensors"
    shard_file.write_bytes(shard_file.read_bytes()[:-1] + b"\x55")
    done = canzona("checkpoint", "verify", str(folder), code=5)
    assert "step-00000020/rank-00001.safetensors" in done.stderr
    assert "checkpoint.resume=step-00000010" in done.stderr


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "config.yaml", MANIFEST])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (truncate, "truncated"),
        (lengthen, "too long"),
        (Path.unlink, "missing"),
        (link, "links are not followed"),
        (pipe, "not a regular file"),
        (folder_instead, "not a regular file"),
    ],
)
def test_a_file_that_is_not_all_there_is_named_before_workers_start(
    root: Path, harm: Callable[[Path], None], said: str, name: str
) -> None:
    folder = root / "step-00000020"
    harm(folder / name)
    assert list(bad_files(folder)) == [name]
    if name != MANIFEST:
        assert said in bad_files(folder)[name]
    assert bad_at_launch(root) == [f"step-00000020/{name}"]
    assert previous_usable(folder) == root / "step-00000010"


def test_a_foreign_file_is_told_and_never_read(root: Path) -> None:
    folder = root / "step-00000020"
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    manifest, problems = verify(folder)
    assert problems == []
    assert foreign_files(folder, manifest) == (".metadata",)
    done = canzona("checkpoint", "verify", str(folder), code=0)
    assert "which canzona ignores: .metadata" in done.stdout


@pytest.mark.parametrize("change", ["missing", "additional", "other shape"])
def test_tensors_that_are_not_those_of_the_manifest_are_noticed(root: Path, change: str) -> None:
    folder = root / "step-00000020"
    manifest = read_manifest(folder)
    tensors = dict(manifest.tensors)
    name = "layers.1.q/master"
    match change:
        case "missing":
            del tensors[name]
        case "additional":
            tensors["layers.9.q/master"] = StoredTensor(file=tensors[name].file, dtype="F32", shape=(0, 8))
        case _:
            tensors[name] = StoredTensor(file=tensors[name].file, dtype="F32", shape=(8, 16))
    fields = {key: getattr(manifest, key) for key in Manifest.__dataclass_fields__} | {"tensors": tensors}
    (folder / MANIFEST).write_text(manifest_text(Manifest(**fields)))
    found = bad_files(folder)
    assert list(found) == ["rank-00001.safetensors"]
    assert "its tensors differ from those in the manifest" in found["rank-00001.safetensors"]


def test_many_bad_files_are_told_in_a_few_lines(root: Path) -> None:
    folder = root / "step-00000020"
    manifest = read_manifest(folder)
    files = {**manifest.files, **{f"lost-{n}": StoredFile(bytes=1, blake3="0" * 64) for n in range(1000)}}
    fields = {key: getattr(manifest, key) for key in Manifest.__dataclass_fields__} | {"files": files}
    (folder / MANIFEST).write_text(manifest_text(Manifest(**fields)))
    with pytest.raises(CheckpointInvalid) as caught:
        read_manifest(folder)
    assert len(caught.value.problems) == 11
    assert caught.value.problems[-1].reason == "and 990 more"


OUTCOMES: dict[str, list[list[int] | None]] = {
    "first save": [None, [10, 320]],
    "save": [[10, 320], [20, 640]],
    "save again": [[20, 1], [20, 2]],
    "removal": [[30, 960]],
}
"""Step and samples of the newest checkpoint, before and after."""


@pytest.mark.parametrize(
    "scenario",
    ["save", "removal", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("first save", "save again"))],
)
def test_a_process_killed_at_any_call_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, scenario: str) -> None:
    done = ran(sys.executable, "-m", "tests.faults.kill_points", str(tmp_path), scenario)
    results: list[dict[str, Any]] = json.loads(done.stdout)
    kills = len(results) - 1
    assert kills >= (10 if scenario == "removal" else 40), "too few kills to mean anything"
    outcomes = OUTCOMES[scenario]
    newest = [result["newest"] for result in results]
    assert [newest[0], newest[-1]] == [outcomes[0], outcomes[-1]]
    changes = [later for later, earlier in zip(newest[1:], newest, strict=False) if later != earlier]
    assert changes == outcomes[1:], "from the old to the new, once"
    for stage, result in enumerate(results):
        assert result["whole"] == (result["newest"] is not None), stage
        assert all(sound for _, sound in result["all"]), f"{stage}: a half checkpoint is to be seen"
        assert result["same_after_clearing"] == (result["newest"] is not None), stage
        assert result["hidden"] == [], stage
        assert result["saves_again"], stage


LARGE = Shard(tensors={"w": buffer("U8", (3 << 20,), bytes(3 << 20))}, scalars={})


def test_a_full_disk_fails_the_save_with_words_and_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2048) as mounted:
        root = tmp_path / "disk" / "checkpoints"
        old = save(root, 10)
        partial = begin(root, 20)
        write_part(partial, 0, shard(0, 20))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:  # the next best thing for a user who may not mount: no file larger than 2 MiB
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
        try:
            with pytest.raises(SaveFailed) as caught:
                write_part(partial, 1, LARGE)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said = "No space left on device" if mounted else "File too large"
        assert caught.value.problems[0].reason == f"cannot be written: {said}"
        assert caught.value.problems[0].fix
        with pytest.raises(SaveFailed) as caught:
            finish(partial, RANKS, header(20), TEXTS, 60.0)
        assert caught.value.problems[0].reason == f"rank 1: cannot be written: {said}"
        assert os.listdir(root) == ["step-00000010"], "room has been made again"
        assert verify(old)[1] == []
        save(root, 20)
        assert names(CheckpointStore(root)) == ["step-00000010", "step-00000020"]


def test_rank_0_on_a_full_disk_cleans_up_after_all_ranks(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 512) as mounted:
        root = tmp_path / "disk" / "checkpoints"
        save(root, 10)
        partial = begin(root, 20)
        write_part(partial, 0, shard(0, 20))
        texts = {"layout.json": "x" * (1 << 20)}
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
        try:
            with pytest.raises(SaveFailed, match=r"No space left|too large"):
                finish(partial, 1, header(20), texts, 60.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert os.listdir(root) == ["step-00000010"]


def test_a_read_only_disk_fails_the_save_with_words_and_can_be_listed_and_verified(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2048) as mounted:
        root = tmp_path / "disk" / "checkpoints"
        folder = save(root, 10)
        with read_only(tmp_path / "disk" if mounted else root, mounted=mounted):
            with pytest.raises(SaveFailed) as caught:
                begin(root, 20)
            assert "cannot be written: " in caught.value.problems[0].reason
            assert "writ" in caught.value.problems[0].fix
            if mounted or os.geteuid() != 65534:
                assert verify(folder)[1] == []
                assert resolve(root, "auto") == folder
        assert os.listdir(root) == ["step-00000010"]
