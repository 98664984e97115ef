"""Ranks meet through files: a checkpoint is seen once all of them have written, never before; failures have names."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from canzona_cli.checkpoint import commit
from canzona_cli.checkpoint.commit import abandon, begin, bytes_written, finish, write_part
from canzona_cli.checkpoint.manifest import Scalar, Shard, partial_path, tensor_bytes
from canzona_cli.checkpoint.store import CheckpointStore
from canzona_cli.checkpoint.verify import foreign_files, verify
from canzona_cli.core.errors import CanzonaError, ExitCode, SaveFailed
from tests.checkpoint.checkpoints import RANKS, TEXTS, buffer, header, manifest_of, save, shard


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture(autouse=True)
def run_directory(root: Path) -> None:
    root.parent.mkdir()


def raised(action: Callable[[], object]) -> CanzonaError:
    with pytest.raises(SaveFailed) as caught:
        action()
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    return caught.value


def test_a_checkpoint_holds_what_all_ranks_gave_and_nothing_else(root: Path) -> None:
    folder = save(root, 30)
    assert folder == root / "step-00000030"
    assert os.listdir(root) == ["step-00000030"]
    manifest, problems = verify(folder)
    assert problems == []
    assert foreign_files(folder, manifest) == ()
    assert set(manifest.files) == {"rank-00000.safetensors", "rank-00001.safetensors", *TEXTS}
    assert manifest.scalars == {"layers.0.q/step": 30, "layers.1.q/step": 30}
    assert {name: t.file for name, t in manifest.tensors.items()} == {
        f"layers.{rank}.q/{kind}": f"rank-{rank:05d}.safetensors"
        for rank in range(2)
        for kind in ("master", "momentum_buffer")
    }
    kept = sum(tensor_bytes(t.dtype, t.shape) for t in manifest.tensors.values())
    assert kept == 2 * (16 * 8 * 4 + 16 * 8 * 4)


def test_nothing_is_to_be_seen_before_the_last_rank_has_written(root: Path) -> None:
    store = CheckpointStore(root)
    partial = begin(root, 30)
    assert partial == partial_path(root, 30)
    done: list[Path] = []
    rank_0 = threading.Thread(target=lambda: done.append(finish(partial, RANKS, header(30), TEXTS, 30.0)))
    rank_0.start()
    for rank in reversed(range(RANKS)):
        time.sleep(0.1)  # rank 0 is looking for parts meanwhile
        assert store.checkpoints() == ()
        assert not done
        write_part(partial, rank, shard(rank, 30))
    rank_0.join()
    assert done == [root / "step-00000030"]
    assert manifest_of(store.latest()).progress.step == 30


def test_a_rank_that_could_not_write_is_named_with_its_reason_at_once(root: Path) -> None:
    old = save(root, 20)
    partial = begin(root, 30)
    write_part(partial, 0, shard(0, 30))
    (partial / "rank-00001.safetensors").mkdir()
    error = raised(lambda: write_part(partial, 1, shard(1, 30)))
    assert "File exists" in error.problems[0].reason
    (partial / "rank-00001.safetensors").rmdir()
    error = raised(lambda: finish(partial, RANKS, header(30), TEXTS, 600.0))
    assert error.problems[0].reason == "rank 1: cannot be written: File exists"
    assert os.listdir(root) == ["step-00000020"]
    assert verify(old)[1] == []
    partial = begin(root, 30)
    with pytest.raises(ValueError, match="w: F32"):
        write_part(partial, 0, Shard(tensors={"w": buffer("F32", (3,), b"")}, scalars={}))
    error = raised(lambda: finish(partial, 1, header(30), TEXTS, 600.0))
    assert error.problems[0].reason.startswith("rank 0: cannot be written: ValueError: w: F32"), "a mistake of ours"


def test_ranks_that_never_write_are_named_after_the_timeout(root: Path) -> None:
    partial = begin(root, 30)
    write_part(partial, 1, shard(1, 30))
    error = raised(lambda: finish(partial, RANKS, header(30), TEXTS, 0.1))
    assert error.problems[0].reason == "ranks 0, 2 did not write their parts, and no file grew for 0 s"
    assert os.listdir(root) == []


def test_a_slow_rank_is_waited_for_while_its_file_grows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is longer than the timeout, by a clock that advances with each look of rank 0."""
    partial = begin(root, 30)
    for rank in (0, 2):
        write_part(partial, rank, shard(rank, 30))
    slow = partial / "slow"

    before, now = bytes_written(partial), 0.0

    def grow(_: float) -> None:
        nonlocal now
        now += 0.4
        if now < 5:
            with slow.open("ab") as file:
                file.write(b"x")
        elif slow.exists():
            slow.unlink()
            write_part(partial, 1, shard(1, 30))

    monkeypatch.setattr(commit, "time", SimpleNamespace(monotonic=lambda: now, sleep=grow))
    assert finish(partial, RANKS, header(30), TEXTS, 0.5).name == "step-00000030"
    assert before > 0
    assert bytes_written(partial) == 0


def test_what_two_ranks_write_is_refused(root: Path) -> None:
    tensors, scalars = {"a": buffer("U8", (1,), b"x")}, dict[str, Scalar]({"n": 2})
    for name, second in (("a", Shard(tensors=tensors, scalars={})), ("n", Shard(tensors={}, scalars=scalars))):
        partial = begin(root, 30)
        write_part(partial, 0, Shard(tensors=tensors, scalars=scalars))
        write_part(partial, 1, second)
        error = raised(lambda partial=partial: finish(partial, 2, header(30), TEXTS, 5.0))  # type: ignore[misc]
        assert error.problems[0].reason == f"rank 1: {name} is also written by another rank"


def test_a_file_that_lost_bytes_since_its_rank_wrote_it_is_noticed(root: Path) -> None:
    partial = begin(root, 30)
    for rank in range(RANKS):
        write_part(partial, rank, shard(rank, 30))
    os.truncate(partial / "rank-00001.safetensors", 100)
    error = raised(lambda: finish(partial, RANKS, header(30), TEXTS, 5.0))
    assert error.problems[0].reason.startswith("rank 1: its file has 100 of the ")


def test_saving_a_step_again_replaces_it_and_readers_always_find_one(root: Path) -> None:
    store, ended = CheckpointStore(root), threading.Event()
    seen: list[int | None] = []
    save(root, 30, samples=0)

    def read() -> None:
        while not ended.is_set():
            latest = store.latest()
            seen.append(latest.step if latest is not None and latest.usable else None)

    reader = threading.Thread(target=read)
    reader.start()
    for samples in range(1, 20):
        save(root, 30, samples=samples)
        assert manifest_of(store.latest()).progress.samples == samples
    ended.set()
    reader.join()
    assert set(seen) == {30}
    assert os.listdir(root) == ["step-00000030"]


def test_beginning_removes_what_killed_saves_left_and_nothing_else(root: Path) -> None:
    save(root, 20)
    for step in (25, 30):
        partial_path(root, step).mkdir()
        (partial_path(root, step) / "rank-00000.safetensors").write_text("half")
    partial = begin(root, 30)
    assert list(partial.iterdir()) == []
    assert sorted(os.listdir(root)) == [".step-00000030.partial", "step-00000020"]
    abandon(partial)
    abandon(partial)
    error = raised(lambda: write_part(partial, 1, shard(1, 30)))
    assert "No such file or directory" in error.problems[0].reason, "a rank whose save was given up fails alone"
    assert os.listdir(root) == ["step-00000020"]


def test_files_are_not_for_others_to_write(root: Path) -> None:
    before = os.umask(0)
    try:
        folder = save(root, 30)
    finally:
        os.umask(before)
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o022 == 0, path
