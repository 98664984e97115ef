"""`canzona train --prepare-only` leaves all that workers need: what it prints trains to the end, in any shell."""

from pathlib import Path

import pytest

from canzona_cli.records.codec import read_lines
from canzona_cli.records.files import RunFiles, read_json
from canzona_cli.records.records import StepMetrics, read_rank
from tests.cli.commands.support import canzona, ran

TINY = ("recipe=qwen3-tiny", "gpus=1", "model.num_layers=1", "train.seq_length=16", "train.global_batch_size=2")
SHORT = ("train.steps=2", "train.eval_interval=0", "checkpoint.every_minutes=null")


@pytest.mark.sweep  # jobs on a real Slurm start prepared runs too
def test_what_is_printed_trains_the_prepared_run_to_its_end(tmp_path: Path) -> None:
    arguments = ("train", "--prepare-only", *TINY, *SHORT, "run.dir=run")
    done = canzona(*arguments, cwd=tmp_path, code=0)
    files = RunFiles(tmp_path / "run")
    for path in (files.config, files.layout, files.plan, files.corpus, files.command, files.predicted):
        assert path.stat().st_size > 0
    assert not files.metrics.exists(), "nothing was started"
    assert f"Prepared {files.root}" in " ".join(done.stdout.split())

    printed = done.stdout[done.stdout.index("\nenvironment\n") : done.stdout.index("\nPrepared ")]
    shell = printed.replace("\nenvironment\n", "\n").replace("\ncommand\n", "\n")
    ran("bash", "-ec", shell, cwd=Path("/"))
    assert read_rank(files, 0).status == "done"
    assert [line.step for line in read_lines(files.metrics, StepMetrics)[0]] == [1, 2]
    assert (read_json(files.checkpoints / "step-00000002" / "manifest.json") or {}) != {}
