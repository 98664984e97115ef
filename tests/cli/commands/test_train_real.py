"""`canzona train` with real workers: it executes the plan that `canzona plan` shows, with a user's own optimizer too,
and leaves the profiles it was asked for, the plan beside the measured. `canzona eval` finds
what the run itself found."""

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from canzona_cli.config.compose import load_resolved
from canzona_cli.core.model.families import flops_per_token
from canzona_cli.core.planner.plan_file import read_plan
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import load_timelines
from tests.cli.commands.support import canzona, canzona_process, importable
from tests.data.texts import prepare_documents
from tests.training.test_trackers import of_tensorboard

RUN = ("recipe=tiny", "gpus=2", "parallel.tp=2", "optimizer=custom", "optimizer.source=sign.py:Sign")
OPTIONS = (
    "optimizer.options.momentum=0.8",
    "optimizer.cost_like=adamw",
    "optimizer.lr=1e-4",
    "optimizer.min_lr_ratio=0",
)
SMALL = ("model.num_layers=2", "train.seq_length=32", "train.global_batch_size=2", "train.eval_interval=6")
RECORDED = ("train.steps=6", "run.profile_steps=[4,4]")
SIGN = """
import os
import shutil
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay, momentum=0.9):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))
        hidden = torch.cuda.is_available()
        before = os.environ.pop("CUDA_VISIBLE_DEVICES")
        with open(f"gpu-{os.getpid()}", "w") as file:
            file.write(f"{hidden} {torch.cuda.is_available()}")
        os.environ["CUDA_VISIBLE_DEVICES"] = before

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * mean.sign())
"""
"""It says whether torch tells of a GPU: to the rank, and where nothing hides it."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that has ended well."""

    folder: Path
    """The folder it was started in, which contains `run`."""
    text: str
    """The output of the command."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains with all options, on a machine on which torch reports a GPU."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "sign.py").write_text(SIGN, encoding="utf-8")
    canzona("plan", *RUN, *OPTIONS, *SMALL, *RECORDED, "--out", "mine.json", cwd=folder, code=0)
    with_gpu = os.pathsep.join([str(Path(__file__).parents[2] / "visible_gpu"), importable()["PYTHONPATH"]])
    wanted = ("train.steps=6", "run.dir=run", "run.trackers=[tensorboard]", "run.profile_steps=[4,4]")
    done = canzona_process(
        *("train", *RUN, *OPTIONS, *SMALL, "train.eval_sequences=6", *wanted),
        cwd=folder,
        environment={"PYTHONPATH": with_gpu, "CUDA_VISIBLE_DEVICES": "0", "COLUMNS": "120"},
        code=0,
    )
    return Trained(folder=folder, text=done.stdout)


def test_beside_a_gpu_the_run_keeps_the_very_plan_that_plan_writes_and_says_which_it_is(trained: Trained) -> None:
    told = [file.read_text() for file in trained.folder.glob("gpu-*")]
    assert set(told) == {"False True"}, "hidden from each rank, and else visible"
    names = ("mine.json", "run/plan.json")
    mine, runs = (json.loads((trained.folder / name).read_text(encoding="utf-8")) for name in names)
    assert mine.pop("about") == {"recipe": "qwen3-tiny", "gpus": 2}
    runs.pop("about", None)
    assert json.dumps(mine) == json.dumps(runs)
    plan = read_plan(trained.folder / "run" / "plan.json")
    assert plan.hash == mine["hash"] == read_plan(trained.folder / "mine.json").hash
    assert f"{plan.name}: load balance" in trained.text
    assert "custom sign.py:Sign (canzona)" in trained.text
    lines = [json.loads(line) for line in (trained.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped"], line["fallbacks"]) for line in lines] == [(n, 0, 0) for n in range(1, 7)]
    assert "skipped" not in trained.text


def test_a_run_leaves_the_profiles_and_the_timelines_whose_phases_are_the_step(trained: Trained) -> None:
    text = " ".join(trained.text.split())
    for part in ("planned run `canzona calibrate` on this machine", "3 steps measured", "1 profiled"):
        assert part in text
    run = trained.folder / "run"
    assert f"{run}/profile/" in trained.text
    timelines = load_timelines(RunFiles(run))
    for rank, timeline in enumerate(timelines):
        assert [step.number for step in timeline.steps] == [5, 6]
        for step in timeline.steps:
            seconds = math.fsum(phase.end_s - phase.start_s for phase in step.phases)
            assert seconds == pytest.approx(step.end_s - step.start_s, rel=0.01)
            assert {"data", "forward", "backward", "norm_clip", "matrix_update"} <= {
                phase.name for phase in step.phases
            }
            exchanges = [transfer for transfer in step.transfers if transfer.name == "exchange"]
            assert exchanges, "two TP ranks exchange fragments"
            assert all(step.start_s <= transfer.start_s <= step.end_s for transfer in exchanges)
        profiled = json.loads((run / "profile" / f"rank-{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in profiled if event.get("cat") == "user_annotation"]
        assert {"canzona: forward", "canzona: backward", "canzona: matrix_update"} <= set(names)
        assert names.count("canzona: adamw_update") == 1, "one step"
    # A rank cannot end a step before the others have begun it, by the one clock of their machine.
    for steps in zip(*(timeline.steps for timeline in timelines), strict=True):
        assert max(step.start_s for step in steps) < min(step.end_s for step in steps)

    report = json.loads(canzona("report", run, "--json").stdout)["breakdown"]
    assert report["planned"]["strategy"] == "canzona"
    assert report["tokens_per_s_per_gpu"] == pytest.approx(report["tokens_per_s"] / 2), "two ranks, DP 1"
    tflops = report["tokens_per_s"] / 2 * flops_per_token(load_resolved(run / "config.yaml").model, 32) / 1e12
    assert report["mfu"] * report["peak_tflops_per_gpu"] == pytest.approx(tflops)
    assert report["planned"]["phases"]["matrix_update"] > 0
    assert report["why"]["text"]


def test_a_tracker_has_the_numbers_of_the_runs_own_files(trained: Trained) -> None:
    run = RunFiles(trained.folder / "run")
    curves = of_tensorboard(run, "")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "step_s", "tokens", "skipped", "fallbacks"):
        assert curves[name] == {line["step"]: [pytest.approx(line[name], rel=1e-6)] for line in lines}


def test_an_evaluation_finds_what_the_run_found_and_leaves_the_run_as_it_is(trained: Trained, tmp_path: Path) -> None:
    """The evaluation runs in a folder without the user's optimizer, whose code it does not need."""
    run = trained.folder / "run"
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    done = canzona("eval", run, "--json", cwd=tmp_path, code=0)
    assert "own validation" not in done.stderr
    assert "values of its own" not in done.stderr, "an evaluation has no learning rate"
    found = json.loads(done.stdout)
    validations = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    assert (found["step"], found["loss"]) == (6, validations[-1]["loss"])
    assert found["loss"] != validations[0]["loss"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert (found["version"], found["documents"], found["tokens"]) == (1, "held-out", 3 * 2 * 32)
    # Byte by byte, but for a few ends of documents.
    assert found["tokens"] - 3 < found["text_bytes"] <= found["tokens"]
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * found["tokens"] / found["text_bytes"])
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before
    (folder,) = (tmp_path / "evals").iterdir()
    assert json.loads((folder / "evaluation.json").read_text())["loss"] == found["loss"]


@pytest.mark.sweep  # four launches; the test above evaluates too
def test_any_checkpoint_is_evaluated_on_all_of_other_data_in_another_layout(trained: Trained, tmp_path: Path) -> None:
    text = "".join(f"line {number} is {number * number}, größer\n" for number in range(150))
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    asked = ("--output", "other", "--tokenizer", "byte", "--document", "line")
    assert canzona("data", "prepare", "in.txt", *asked, cwd=tmp_path).returncode == 0
    other = ("data=prepared", "data.path=other", "gpus=1", "train.global_batch_size=1", "--all-sequences")
    done = canzona("eval", trained.folder / "run", "--step", "6", *other, "--json", cwd=tmp_path, code=0)
    assert "other is none of the run's data" in " ".join(done.stderr.split())
    found = json.loads(done.stdout)
    assert (found["documents"], found["layout"]["tp"], found["bytes_counted"]) == ("all", 1, True)
    tokens = json.loads((tmp_path / "other.json").read_text())["tokens"]
    assert tokens - 33 <= found["tokens"] < tokens, "each token once, but for those that make no whole sample"
    size = len(text.encode()) - 150  # a document has not the line's end
    assert size - 33 * 8 <= found["text_bytes"] <= size
    assert found["epochs"] == pytest.approx(1, abs=0.03)
    assert 0 < found["loss"] < 2 * math.log(257)


@pytest.mark.sweep  # a run and two evaluations
def test_a_validation_set_of_its_own_is_what_the_run_and_its_evaluation_read(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "own", "other")):
        prepare_documents(tmp_path, name, documents=90, seed=seed)
    asked = ("recipe=tiny", "gpus=1", *SMALL, "train.steps=2", "train.eval_interval=2", "run.dir=run")
    done = canzona("train", *asked, "data.path=a", "data.validation=own", cwd=tmp_path, code=0)
    assert "; validated on own" in " ".join(done.stdout.split())
    validations = [json.loads(line) for line in (tmp_path / "run" / "validation.jsonl").read_text().splitlines()]
    done = canzona("eval", "run", "--json", cwd=tmp_path, code=0)
    assert "own validation" not in done.stderr
    found = json.loads(done.stdout)
    assert (found["loss"], found["documents"], found["data"]) == (validations[-1]["loss"], "all", str(tmp_path / "own"))
    done = canzona("eval", "run", "data.validation=other", "--json", cwd=tmp_path, code=0)
    assert "other is none of the run's data" in " ".join(done.stderr.split())
    other = json.loads(done.stdout)
    assert other["data"] == str(tmp_path / "other")
    assert other["loss"] != found["loss"]
    assert "data.validation = a" in canzona("eval", "run", "data.validation=a", cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "code", "key"),
    [
        (("--step", "5"), 2, "--step = 5"),
        (("model.hidden_size=128",), 2, "model.hidden_size = 128"),
        (
            ("--documents", "held-out", "train.eval_interval=0", "data.validation_fraction=0"),
            2,
            "data.validation_fraction = 0",
        ),
        # It learns the tokenizer first.
        pytest.param(
            *(("data.tokenizer=bpe", "model.vocab_size=384"), 2, "data.tokenizer = bpe"), marks=pytest.mark.sweep
        ),
        (("gpus=64", "cluster.gpus_per_node=8", "train.global_batch_size=64"), 2, "gpus = 64"),
        (("gpus=3",), 2, "train.global_batch_size = 2"),
        (("cluster.memory_gib=0.751",), 4, "gpus = 2"),
        (("data=prepared", "data.path=nothing"), 2, "data.path"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    trained: Trained, tmp_path: Path, arguments: tuple[str, ...], code: int, key: str
) -> None:
    done = canzona("eval", trained.folder / "run", *arguments, "--json", cwd=tmp_path, code=code)
    assert key in done.stderr
    assert done.stdout == ""
    assert [*tmp_path.iterdir()] == []


def test_a_damaged_checkpoint_is_not_evaluated(trained: Trained, tmp_path: Path) -> None:
    (checkpoint,) = (trained.folder / "run" / "checkpoints").iterdir()
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    file = next(copy.glob("rank-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    done = canzona("eval", copy, cwd=tmp_path, code=5)
    assert file.name in done.stderr


def test_a_dry_run_shows_the_plan_and_where_it_comes_from(tmp_path: Path) -> None:
    arguments = ("recipe=tiny", "gpus=2", "parallel.tp=2")
    shown = " ".join(canzona("train", *arguments, "--dry-run", cwd=tmp_path).stdout.split())
    assert "plan " in shown
    assert "load balance 1." in shown
    assert "from plans/" not in shown
    assert canzona("plan", *arguments, cwd=tmp_path).returncode == 0
    (path,) = (tmp_path / "plans").iterdir()
    for more in ((), (f"engine.plan=plans/{path.name}",)):
        shown = "".join(canzona("train", *arguments, *more, "--dry-run", cwd=tmp_path).stdout.split())
        assert f"fromplans/{path.name}" in shown
    shown = canzona("train", *arguments, "engine.strategy=layerwise", "--dry-run", cwd=tmp_path).stdout
    assert "load balance" not in shown
