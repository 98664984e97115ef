"""The checkpoint that a launch continues from is chosen before anything is moved, and files of earlier launches
stay."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canzona_cli.checkpoint.commit import begin, finish, write_part
from canzona_cli.checkpoint.manifest import Header, LossMemory, Progress, Shard
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import CheckpointConfig, DataConfig, RunConfig
from canzona_cli.core.errors import CheckpointInvalid, ConfigError, Problem
from canzona_cli.core.setup import AdamWConfig, CustomConfig, Layout
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.launch.resume import Resumption, choose_resumption
from canzona_cli.launch.resumed_data import data_changes
from canzona_cli.launch.run_dir import RunDirectory
from canzona_cli.records import codec
from canzona_cli.records.codec import JsonLines, load_if_valid, record_dict
from canzona_cli.records.corpus import DATA_FILE, DataPlan, read_corpus
from canzona_cli.records.files import RunFiles, append_json_line, read_json, write_json_atomic
from canzona_cli.records.records import ResumePoint, RunResult, RunStatus, ValidationLoss
from canzona_cli.records.words import jsonable
from tests.checkpoint.checkpoints import buffer
from tests.cli.commands.support import canzona
from tests.data.texts import drawn, prepare_documents
from tests.faults.support import LAYOUT, run_config
from tests.records.runs import with_tokens
from tests.refusals import refused

NORM = {"final_layernorm.weight/master": buffer("F32", (256,), bytes(1024))}
INTERVAL = 2
"""Steps between two validations."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    found = run_config(run_dir=tmp_path / "run")
    return replace(found, train=replace(found.train, steps=40, eval_interval=INTERVAL))


def files_of(config: RunConfig) -> RunFiles:
    return RunFiles(Path(str(config.run.dir)))


def save(config: RunConfig, step: int, *, losses: LossMemory = LossMemory(), data: object = None) -> Path:
    """A checkpoint of one rank, as a run of this configuration writes it, with this data.json."""
    files = files_of(config)
    files.root.mkdir(parents=True, exist_ok=True)
    batch = LAYOUT.global_batch_size
    header = Header(
        progress=Progress(step=step, samples=step * batch, tokens=step * batch * 32, losses=losses),
        optimizer=config.optimizer.name,
        strategy=config.engine.strategy,
        splitting=config.engine.splitting,
        world_size=1,
        created=1000.0 + step,
        canzona="0",
    )
    partial = begin(files.checkpoints, step)
    write_part(partial, 0, Shard(tensors=NORM, scalars={}))
    texts = {"config.yaml": dump_resolved(config), "layout.json": json.dumps(asdict(LAYOUT))}
    if data is not None:
        texts[DATA_FILE] = json.dumps(data)
    return finish(partial, 1, header, texts, 5.0)


def train(config: RunConfig, *, steps: int, saved: tuple[int, ...] = ()) -> None:
    """Leaves the files of a run that was killed after `steps` steps."""
    with_claim = RunDirectory.create(config, resumes=True)
    files = with_claim.files
    files.config.write_text(dump_resolved(config))
    files.command.write_text("torchrun\n")
    (files.logs / "node-0.log").write_text("log\n")
    append_json_line(files.events, {"time": 999.0, "event": "stage", "stage": "train"})
    append_json_line(files.validation, {"time": 1000.0, "step": 0, "loss": 9.0})
    for step in range(1, steps + 1):
        append_json_line(files.metrics, {"time": 1000.0 + step, "step": step, "loss": 9.0 / step})
        if step % INTERVAL == 0:
            append_json_line(files.validation, {"time": 1000.0 + step, "step": step, "loss": 8.0 / step})
    append_json_line(files.events, {"time": 1000.5 + steps, "event": "stage", "stage": "validate"})
    for step in saved:
        append_json_line(files.events, {"time": 1000.1 + step, "event": "checkpoint", "step": step})
        save(config, step)


def resumed(config: RunConfig, layout: Layout = LAYOUT) -> Resumption:
    checkpoint = choose_resumption(config, layout)
    assert checkpoint is not None
    return checkpoint


def relaunched(config: RunConfig) -> tuple[RunDirectory, Resumption]:
    run = RunDirectory.create(config, resumes=True)
    checkpoint = run.resume(config, LAYOUT)
    assert checkpoint is not None
    return run, checkpoint


def refusal(config: RunConfig, layout: Layout = LAYOUT) -> tuple[Problem, ...]:
    """The problems for which a resumption is refused."""
    with pytest.raises(ConfigError) as refused:
        choose_resumption(config, layout)
    return refused.value.problems


def resuming(config: RunConfig, name: str) -> RunConfig:
    return replace(config, checkpoint=CheckpointConfig(resume=name))


@pytest.mark.parametrize(
    ("status", "last_good", "asked", "step"),
    [
        ("diverged", "step-00000003", "auto", 3),
        ("diverged", "step-00000003", "step-00000005", 5),
        ("diverged", None, "auto", 5),
        ("failed", None, "auto", 5),
    ],
)
def test_a_run_that_diverged_goes_on_from_before_it_did(
    config: RunConfig, status: RunStatus, last_good: str | None, asked: str, step: int
) -> None:
    train(config, steps=7, saved=(3,))
    save(config, 5, losses=LossMemory(first=9.0, excess=4.0, since=4))
    result = RunResult(status=status, exit_code=70, step=7, last_good=last_good)
    write_json_atomic(files_of(config).result, asdict(result))
    found = resumed(resuming(config, asked))
    assert found.step == step
    doubts = [warning for warning in found.warnings if "may have diverged" in warning]
    assert len(doubts) == (step == 5), "what was saved while the loss was too high is said"


def test_a_run_goes_on_from_its_newest_checkpoint_and_later_lines_are_put_aside(config: RunConfig) -> None:
    train(config, steps=7, saved=(3, 5))
    with files_of(config).metrics.open("a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    files_of(config).request_stop("preempted")
    (files_of(config).checkpoints / ".step-00000006.partial").mkdir()
    run, found = relaunched(config)
    assert (found.checkpoint, found.progress.samples) == (run.files.checkpoints / "step-00000005", 10)
    assert run.earlier is not None
    assert (run.earlier.step, run.earlier.origin) == (5, "step-00000005")
    assert [line.step for line in run.earlier.metrics] == [1, 2, 3, 4, 5]
    steps = {path.name: [line.get("step") for line in JsonLines(path).read()] for path in run.path.glob("*.jsonl")}
    assert steps == {
        "metrics.jsonl": [1, 2, 3, 4, 5],
        "validation.jsonl": [0, 2, 4],
        "events.jsonl": [None, 3, 5],
    }
    aside = run.files.attempts / "1"
    assert [line["step"] for line in JsonLines(aside / "metrics.jsonl").read()] == [6, 7]
    assert (aside / "metrics.jsonl").read_text().endswith('{"step": 8, "lo')
    assert [line["step"] for line in JsonLines(aside / "validation.jsonl").read()] == [6]
    assert (aside / "logs" / "node-0.log").read_text() == "log\n"
    assert {"command.txt", "config.yaml", "stop", "ranks"} <= {path.name for path in aside.iterdir()}
    assert not run.files.stop_requested()
    assert {path.name for path in run.files.checkpoints.iterdir()} == {"step-00000003", "step-00000005"}
    assert read_json(run.files.resume) == {
        "checkpoint": str(found.checkpoint), "step": 5, "validate": False, "validation": None, "asked": "auto",
        "weights_only": False,
    }  # fmt: skip


@pytest.mark.parametrize(("step", "validated", "due"), [(4, True, False), (4, False, True), (5, False, False)])
def test_a_validation_that_a_stop_prevented_is_made_up_for_and_none_is_repeated(
    config: RunConfig, step: int, validated: bool, due: bool
) -> None:
    train(config, steps=5, saved=(step,))
    if not validated:
        lines = [line for line in files_of(config).validation.read_text().splitlines() if '"step": 4' not in line]
        files_of(config).validation.write_text("\n".join(lines) + "\n")
    run = RunDirectory.create(config, resumes=True)
    run.resume(config, LAYOUT)
    told = load_if_valid(run.files.resume, ResumePoint)
    assert told is not None
    assert told.validate is due
    # What was found behind a save is told to the guards again.
    assert told.validation == (ValidationLoss(step=4, loss=2.0, time=1004.0) if validated and step == 4 else None)


def test_a_directory_without_a_checkpoint_starts_over_and_keeps_what_there_was(config: RunConfig) -> None:
    train(config, steps=3)
    run = RunDirectory.create(config, resumes=True)
    assert run.resume(config, LAYOUT) is None
    assert run.earlier is None
    assert "starts over" in run.notes[0]
    assert not run.files.metrics.exists()
    assert len(JsonLines(run.files.attempts / "1" / "metrics.jsonl").read()) == 3
    assert not run.files.resume.exists()
    assert not any(run.files.logs.iterdir())


def test_going_back_moves_the_later_checkpoints_out_of_the_way(config: RunConfig) -> None:
    train(config, steps=9, saved=(3, 6, 9))
    back = resuming(config, "step-00000003")
    run, found = relaunched(back)
    assert found.step == 3
    assert [path.name for path in run.files.checkpoints.iterdir()] == ["step-00000003"]
    aside = run.files.attempts / "1" / "checkpoints"
    assert {path.name for path in aside.iterdir()} == {"step-00000006", "step-00000009"}
    assert str(aside) in run.notes[0]


def test_a_requeued_job_does_not_go_back_twice(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config, steps=9, saved=(3, 6))
    back = resuming(config, "step-00000003")
    RunDirectory.create(back, resumes=True).resume(back, LAYOUT)
    save(config, 5)
    again = resumed(back)
    assert again.step == 3, "a person who asks for it gets it"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    requeued = resumed(back)
    assert requeued.step == 5


def test_a_new_run_from_another_ones_checkpoint_and_its_requeue(config: RunConfig, tmp_path: Path) -> None:
    train(config, steps=4, saved=(4,))
    new = replace(resuming(config, str(tmp_path / "run")), run=replace(config.run, dir=str(tmp_path / "new")))
    run, found = relaunched(new)
    assert (found.of_this_run, found.origin) == (False, str(tmp_path / "run" / "checkpoints" / "step-00000004"))
    assert (read_json(run.files.resume) or {})["validate"] is True, "before its first step, as every new run does"
    del run
    save(new, 6)
    again = resumed(new)
    assert (again.of_this_run, again.step) == (True, 6)
    other = replace(new, checkpoint=CheckpointConfig(resume=str(tmp_path / "run" / "checkpoints" / "step-00000004")))
    assert "its own checkpoints" in refusal(other)[0].reason


def test_a_launch_that_restarts_goes_on_from_what_it_saved(config: RunConfig) -> None:
    train(config, steps=5, saved=(2, 4))
    asked = resuming(config, "step-00000002")
    run = RunDirectory.create(asked, resumes=True)
    first = run.resume(asked, LAYOUT)
    save(config, 3)
    second = run.resume(asked, LAYOUT)
    assert first is not None
    assert second is not None
    assert (first.step, second.step) == (2, 3)


def beginning(config: RunConfig, where: Path | str, **checkpoint: str) -> RunConfig:
    return replace(config, checkpoint=CheckpointConfig(weights_from=str(where), **checkpoint))  # type: ignore[arg-type]


def test_a_run_begins_with_the_weights_of_another_until_it_has_saved(config: RunConfig, tmp_path: Path) -> None:
    train(config, steps=4, saved=(2, 4))
    other = replace(
        config,
        run=replace(config.run, dir=str(tmp_path / "annealed")),
        optimizer=replace(config.optimizer, lr=3e-4),
        train=replace(config.train, steps=3),
        data=replace(config.data, tokenizer="bpe"),
    )
    of_step = beginning(other, files_of(config).checkpoints / "step-00000002")
    found = resumed(of_step)
    assert found.checkpoint.name == "step-00000002"
    new = beginning(other, files_of(config).root)
    run, found = relaunched(new)
    assert (found.step, found.progress.samples, found.of_this_run, run.earlier) == (0, 0, False, None)
    assert (warning := found.warnings[0]).startswith("data.tokenizer is bpe")
    assert warning.endswith(f"the ids of {config.data.tokenizer}")
    newest = files_of(config).checkpoints / "step-00000004"
    assert read_json(run.files.resume) == {
        "checkpoint": str(newest), "step": 0, "validate": True, "validation": None, "asked": "auto",
        "weights_only": True,
    }  # fmt: skip
    del run
    save(new, 2)
    again = resumed(new)
    assert (again.of_this_run, again.step, again.weights_only) == (True, 2, False)


def test_weights_that_do_not_fit_or_are_missing_are_refused_with_a_fix(config: RunConfig, tmp_path: Path) -> None:
    train(config, steps=4, saved=(4,))
    source, checkpoint = files_of(config).root, files_of(config).checkpoints / "step-00000004"
    new = replace(config, run=replace(config.run, dir=str(tmp_path / "new")))
    wider = replace(new, model=replace(config.model, vocab_size=512, num_layers=7))
    refused = refusal(beginning(wider, source))
    model = config.model
    assert [(problem.key, problem.value, problem.fix) for problem in refused] == [
        ("model.num_layers", 7, f"use model.num_layers={model.num_layers}"),
        ("model.vocab_size", 512, f"use model.vocab_size={model.vocab_size}"),
    ]
    for where in ("step-00000004", "auto", tmp_path / "nowhere", tmp_path):
        assert refusal(beginning(new, where))[0].key == "checkpoint.weights_from"
    assert "leave one of them out" in refusal(beginning(new, source, resume=str(checkpoint)))[0].fix
    text = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(text.replace("tiny", "tinY"))
    with pytest.raises(CheckpointInvalid, match=r"config\.yaml"):
        choose_resumption(beginning(new, source), LAYOUT)


def test_a_finished_run_is_refused_unless_it_has_grown(config: RunConfig) -> None:
    train(config, steps=40, saved=(40,))
    codec.save(files_of(config).result, RunResult(status="done", exit_code=0, step=40))
    [problem] = refusal(config)
    assert "has finished all 40 steps" in problem.reason
    assert "train.steps=80" in problem.fix
    assert f"run.dir={files_of(config).root}-2" in problem.fix
    grown = resumed(replace(config, train=replace(config.train, steps=60)))
    assert grown.step == 40
    assert [warning.split(" is ")[0] for warning in grown.warnings] == [
        "schedule.decay_steps", "schedule.warmup_steps"
    ], "a longer run has another schedule"  # fmt: skip


def test_another_model_or_optimizer_is_refused_with_every_difference(config: RunConfig) -> None:
    train(config, steps=3, saved=(3,))
    other = replace(config, model=replace(config.model, hidden_size=512, num_layers=7))
    problems = refusal(other, replace(LAYOUT, global_batch_size=4))
    assert [problem.key for problem in problems] == ["model.hidden_size", "model.num_layers"]


def test_another_optimizer_is_refused_but_not_the_same_class_in_another_file(config: RunConfig) -> None:
    custom = CustomConfig(name="custom", lr=1e-3, source="mine.py:Mine")
    saved = replace(config, optimizer=custom)
    train(saved, steps=3, saved=(3,))
    for optimizer, key in (
        (config.optimizer, "optimizer.name"),
        (replace(custom, source="mine.py:Its"), "optimizer.source"),
    ):
        assert key in [problem.key for problem in refusal(replace(config, optimizer=optimizer))]
    moved = resumed(replace(config, optimizer=replace(custom, source="lib/mine.py:Mine")))
    assert moved.warnings == ("optimizer.source is lib/mine.py:Mine now; up to step 3 it was mine.py:Mine",)


def test_what_bends_the_curve_is_said_and_what_does_not_is_one_line(config: RunConfig) -> None:
    train(config, steps=4, saved=(4,))
    assert isinstance(config.optimizer, AdamWConfig)
    other = replace(
        config,
        gpus=4,
        optimizer=replace(config.optimizer, lr=5e-4),
        data=replace(config.data, validation_fraction=0.1),
        engine=replace(config.engine, alpha=0.5),
        run=replace(config.run, trackers=("tensorboard",)),
    )
    found = resumed(other, replace(LAYOUT, tp=2, dp=2))
    assert found.warnings == (
        "data.validation_fraction is 0.1 now; up to step 4 it was 0.02",
        "optimizer.lr is 0.0005 now; up to step 4 it was 0.001",
    )
    assert found.spread == "DP 2 -> TP 2 x DP 2, gpus 2 -> 4, engine.alpha 1 -> 0.5"
    same = resumed(config)
    assert (same.warnings, same.spread) == ((), "")


def test_a_checkpoint_that_is_damaged_is_refused_and_the_one_before_offered(config: RunConfig) -> None:
    train(config, steps=5, saved=(3, 5))
    newest = files_of(config).checkpoints / "step-00000005"
    text = (newest / "config.yaml").read_text()
    (newest / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.009"))
    for broken in (newest / "config.yaml", newest / "rank-00000.safetensors"):
        with pytest.raises(CheckpointInvalid) as refused:
            choose_resumption(config, LAYOUT)
        assert any(f"step-00000005/{broken.name}" == problem.key for problem in refused.value.problems)
        assert "checkpoint.resume=step-00000003" in refused.value.problems[0].fix
        (newest / "config.yaml").write_text(text)
        (newest / "rank-00000.safetensors").unlink(missing_ok=True)
    found = resumed(resuming(config, "step-00000003"))
    assert found.step == 3


def test_two_launches_in_one_directory_and_none_after_the_first_has_gone(config: RunConfig) -> None:
    first = RunDirectory.create(config)
    problems = refused(RunDirectory.create, config, resumes=True)
    assert "is using it" in problems[0].reason
    del first
    assert RunDirectory.create(config, resumes=True).path == files_of(config).root


def test_a_checkpoint_beyond_the_end_of_the_run(config: RunConfig) -> None:
    train(config, steps=5, saved=(5,))
    short = replace(config, train=replace(config.train, steps=4))
    with pytest.raises(ConfigError, match="the run ends at step 4"):
        choose_resumption(short, LAYOUT)
    exact = choose_resumption(replace(config, train=replace(config.train, steps=5)), LAYOUT)
    assert exact is not None, "killed after its last save: what is left is to say that it is done"


@pytest.mark.parametrize(("steps", "tokens", "said"), [(60, 10**6, False), (60, 3000, True), (40, 3000, False)])
def test_more_steps_are_another_order_where_they_are_more_passes_over_the_data(
    config: RunConfig, steps: int, tokens: int, said: bool
) -> None:
    """40 steps of 64 tokens fit into 3,000; 60 do not."""
    train(config, steps=5, saved=(5,))
    longer = replace(config, train=replace(config.train, steps=steps))
    found = resumed(longer)
    warnings = data_changes(found, longer, LAYOUT, with_tokens(tokens))
    assert bool(warnings) is said
    changed = "changes the order of the data from step 6 on: 2 epochs, the last by itself instead of 1 epoch"
    assert all(f"train.steps=60 {changed}" in warning for warning in warnings)
    blended = data_changes(found, longer, LAYOUT, with_tokens(10**6, tokens // 2))
    assert bool(blended) is said, "half of the samples come from half of the tokens"
    assert all(changed.replace("the data", "set1") in warning for warning in blended)


def test_other_weights_are_refused_and_not_passed_over(config: RunConfig) -> None:
    train(config, steps=5, saved=(5,))
    for name in ("init", "checkpoint.weights_from"):
        done = canzona("resume", files_of(config).root, f"{name}=elsewhere", "--dry-run", code=2)
        assert "checkpoint.weights_from = elsewhere" in done.stderr
        assert "other weights would not be used" in " ".join(done.stderr.split())


def test_a_dry_run_has_the_warnings_of_the_run(config: RunConfig) -> None:
    """The order of the data too: those of the built-in corpus that the run has prepared before."""
    train(config, steps=5, saved=(5,))
    files = files_of(config)
    codec.save(files.corpus, with_tokens(3000))
    done = canzona("resume", files.root, "train.steps=60", "optimizer.lr=0.5", "--dry-run")
    said = " ".join(done.stderr.split())
    assert done.returncode == 0, said
    assert "continue from step 5" in said
    assert "2 epochs, the last by itself instead of 1 epoch" in said
    assert "optimizer.lr" in said


@pytest.mark.parametrize("named", [True, False])
def test_a_resumed_run_holds_out_the_documents_that_it_held_out_before(
    config: RunConfig, tmp_path: Path, named: bool
) -> None:
    """A checkpoint that does not name a division is an earlier one, of a run that held out the last documents."""
    prefix = prepare_documents(tmp_path, "a", documents=60, seed=0)
    data = DataConfig(source="prepared", path=str(prefix), validation_fraction=0.25)
    config = replace(config, data=data)
    train(config, steps=5)
    content = jsonable(record_dict(DataPlan(corpus=ensure_corpus(config), samples=80)))
    assert isinstance(content, dict)
    if not named:
        del content["corpus"]["sets"][0]["division"]
    save(config, 5, data=content)
    lengths = inspect_pair(prefix).lengths
    held_out = int(lengths[drawn(prefix, 0.25) if named else slice(45, None)].sum())
    done = canzona("resume", files_of(config).root, "--dry-run", "--json", code=0)
    assert json.loads(done.stdout)["data"][0]["validation_tokens"] == held_out
    run = files_of(config)
    canzona("train", f"recipe={run.config}", f"run.dir={run.root}", "--prepare-only", code=0)
    assert read_corpus(run).validation_tokens == held_out
    again = canzona(
        "train", "recipe=tiny", f"run.root={tmp_path}", f"data.path={prefix}", "--dry-run", "--json", code=0
    )
    assert json.loads(again.stdout)["data"][0]["division"] == "drawn", "a new run draws"


def test_the_epochs_of_a_resumed_run_count_old_steps_at_their_own_batch(config: RunConfig) -> None:
    """5 steps of 2 sequences and 35 of 10, of 32 tokens each: not 40 of 10."""
    train(config, steps=5, saved=(5,))
    done = canzona("resume", files_of(config).root, "train.global_batch_size=10", "--dry-run", code=0)
    assert "11.5 k tokens needed" in " ".join(done.stdout.split())


def test_a_run_that_was_sent_back_to_a_step_goes_on_from_its_newest(config: RunConfig) -> None:
    back = replace(config, checkpoint=replace(config.checkpoint, resume="step-00000003"))
    train(back, steps=5, saved=(3, 5))
    for typed, step in (([], 5), (["checkpoint.resume=step-00000003"], 3)):
        done = canzona("resume", files_of(config).root, *typed, "--dry-run")
        assert f"continue from step {step}" in " ".join(done.stderr.split())
