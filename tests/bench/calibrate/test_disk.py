"""The rate at which a machine writes checkpoints is that of a save by all of its ranks, of which nothing is left."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from canzona_cli.bench.calibrate import calibrate
from canzona_cli.checkpoint.commit import write_part
from canzona_cli.checkpoint.manifest import Shard
from canzona_cli.cli.views.header import outlook, outlook_rows
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve


def test_all_bytes_are_saved_by_all_ranks_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[int, int] = {}

    def write(partial: Path, rank: int, shard: Shard) -> None:
        assert tmp_path in partial.parents
        write_part(partial, rank, shard)
        written[rank] = sum(file.stat().st_size for file in partial.glob(f"rank*{rank}.safetensors"))

    clock = iter([10.0, 10.5])
    monkeypatch.setattr(calibrate, "write_part", write)
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(calibrate, "CHECKPOINT_BYTES", 3 << 16)
    assert calibrate.checkpoint_rate(tmp_path / "runs" / "not yet", 3) == pytest.approx(2 * (3 << 16) / 1e9)
    assert sorted(written) == [0, 1, 2]
    assert all(size >= 1 << 16 for size in written.values()), written
    assert not list(tmp_path.iterdir())


def test_where_nothing_can_be_written_there_is_no_rate() -> None:
    assert calibrate.checkpoint_rate(Path("/proc/runs"), 2) is None


def test_a_dry_run_has_the_seconds_of_a_save_only_if_they_were_measured() -> None:
    rate = "cluster.checkpoint_gb_per_s=0.5"
    for given in ((), (rate,)):
        config, layout = resolve(compose_run(["recipe=qwen3-8b", "gpus=16", *given]).config)
        forecast = outlook(config, layout, 1.0)
        text = dict(outlook_rows(config, forecast))["checkpoints"]
        assert ("at 0.5 GB/s, measured on one machine alone" in text) == bool(given)
        assert ("how fast: canzona calibrate" in text) != bool(given)
        expected = forecast.checkpoint_bytes / 2 / 0.5e9 if given else None
        assert forecast.save_s == (None if expected is None else pytest.approx(expected))
