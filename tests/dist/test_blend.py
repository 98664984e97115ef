"""A blend's sets are in the batches by their weights, to the sample, and each is validated by itself."""

import json
import math
import resource
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from rich.console import Console

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.cli.views.run import RunView
from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.core.errors import ConfigError, EnvironmentProblem
from canzona_cli.core.megatron.parallel import World
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.data.prepare import PrepareRequest, prepare
from canzona_cli.records.files import RunFiles
from canzona_cli.records.summary import load_summary
from canzona_cli.training.assemble import assemble
from canzona_cli.training.data import Batch, BatchStream, build_datasets
from canzona_cli.training.loop import Start, Training
from canzona_cli.training.records import Journal, RankRecord
from tests.cli.commands import support
from tests.dist import jobs

WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}
STEPS = 40


def sets_in(folder: Path) -> None:
    """Each of one letter, so that a batch tells which set it comes from, in documents of different lengths."""
    for letter in WEIGHTS:
        (folder / letter).write_text("".join(letter * length + "\n" for length in range(1, 301)))
        request = PrepareRequest(
            inputs=(str(folder / letter),), output=str(folder / "sets.1" / letter), document="line"
        )
        prepare(request, lambda _: None)


def blend(folder: Path, weights: Mapping[str, float]) -> tuple[str, str]:
    entries = ",".join(f"{folder / 'sets.1' / name}:{weight}" for name, weight in weights.items())
    return "data=prepared", f"data.blend={{{entries}}}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    letters: list[str]
    """The letter of each sample that this rank read in all steps, in order."""
    from_the_middle: list[str]
    """The letters of a stream that a resumed run reads."""
    validations: list[dict[str, object]]
    report: str
    summary: dict[str, object]


@cache
def _seen() -> list[Seen]:
    with TemporaryDirectory() as name:
        folder = Path(name)
        sets_in(folder)
        more = (
            f"train.steps={STEPS}",
            "train.eval_interval=1",
            "train.eval_sequences=8",
            "data.validation_fraction=0.1",
        )
        # Whole numbers: what counts is their relation.
        ten_times = {name: round(10 * weight) for name, weight in WEIGHTS.items()}
        config, layout, corpus = jobs.prepare("gpus=2", *more, *blend(folder, ten_times))
        files = RunFiles(folder / "run")
        files.root.mkdir()
        files.config.write_text(dump_resolved(config))

        def work(_: int, world: World) -> Seen:
            datasets = build_datasets(config, corpus, cache=folder / "indices")

            def letters(first_step: int) -> list[str]:
                samples = BatchStream(datasets.train, world, first_sample=first_step * layout.global_batch_size)
                steps = islice(samples, (STEPS - first_step) * layout.num_microbatches)
                rows = [row for batch in steps for row in batch["tokens"].tolist()]
                assert all(len({*row} - {ord("\n"), 256}) == 1 for row in rows), "a sample is of one set"
                return [chr(next(token for token in row if token not in (10, 256))) for row in rows]

            trainee = assemble(config, world, jobs.planned(config, layout))
            last = STEPS - 1  # all but one of the steps are done
            start = Start(progress=Progress(step=last, samples=last * layout.global_batch_size, tokens=0))
            journal = Journal(files, writes=world.rank == 0)
            Training(config, trainee, datasets, files, journal, RankRecord(files, world.rank), start=start).run()
            lines = [json.loads(line) for line in files.validation.read_text().splitlines()] if world.rank == 0 else []
            summary = load_summary(files.root)
            console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
            console.print(RunView(summary=summary))
            return Seen(
                letters=letters(0),
                from_the_middle=letters(STEPS // 2),
                validations=lines,
                report=console.export_text(),
                summary=summary.as_json(),
            )

        return jobs.on_ranks({0: (config, layout)}, work)[0]


def test_the_shares_of_the_batches_are_the_weights() -> None:
    read = Counter(letter for seen in _seen() for letter in seen.letters)
    total = read.total()
    assert total > 300
    for letter, weight in WEIGHTS.items():
        assert abs(read[letter] - weight * total) <= 2, "Megatron takes turns, it does not draw lots"
        assert abs(read[letter] / total - weight) < 1 / math.sqrt(total)


def test_a_resumed_run_reads_on_where_the_other_stopped() -> None:
    for seen in _seen():
        half = len(seen.letters) // 2
        assert seen.from_the_middle == seen.letters[half:]


def test_each_set_is_validated_and_shown_and_their_mean_by_shares_is_the_validation() -> None:
    seen = _seen()[0]
    assert len(seen.validations) == 2
    for line in seen.validations:
        losses = line["sets"]
        assert isinstance(losses, dict)
        assert losses.keys() == WEIGHTS.keys()
        assert len({*losses.values()}) == 3
        assert line["loss"] == pytest.approx(sum(WEIGHTS[name] * loss for name, loss in losses.items()), rel=1e-12)
        assert f"{losses['b']:.4f}" in seen.report
    assert isinstance(seen.summary["validation_by_set"], dict)
    assert seen.summary["validation_by_set"].keys() == WEIGHTS.keys()


def test_what_is_prepared_anew_in_the_same_place_is_what_the_next_run_reads(tmp_path: Path) -> None:
    """Megatron finds its sample indices again by the path of the data."""
    found = []
    for lines in (300, 40):
        (tmp_path / "in").write_text("".join("a" * length + "\n" for length in range(100, 100 + lines)))
        request = PrepareRequest(
            inputs=(str(tmp_path / "in"),), output=str(tmp_path / "p"), document="line", overwrite=True
        )
        prepare(request, lambda _: None)
        config, _, corpus = jobs.prepare("gpus=1", "data=prepared", f"data.path={tmp_path / 'p'}")
        samples = build_datasets(config, corpus, cache=tmp_path / "indices").train
        found.append(samples[0]["tokens"].tolist())
    assert found[1].count(ord("a")) > 60


def test_what_makes_no_blend_is_told_at_once(tmp_path: Path) -> None:
    sets_in(tmp_path)
    run = ("recipe=qwen3-tiny", "train.seq_length=64")
    corpus = ensure_corpus(compose_run([*run, *blend(tmp_path, {"a": 7, "b": 3})]).config)
    assert [(one.name, one.share) for one in corpus.sets] == [("a", 0.7), ("b", 0.3)]

    arguments = [*run, *blend(tmp_path, {"a": 7, "b": 3}), "train.steps=200", "train.batch_tokens=512"]
    dry = support.canzona("train", *arguments, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    data = json.loads(dry.stdout)["data"]
    assert [(one["name"], one["share"], one["tokens"]) for one in data] == [("a", 0.7, 45_450), ("b", 0.3, 45_450)]
    wanted = 200 * 512
    assert [one["epochs"] * one["train_tokens"] / wanted for one in data] == pytest.approx([0.7, 0.3])
    plan = support.canzona("plan", *arguments, "--dry-run", "-v")
    assert f"a {data[0]['epochs']:.2g}, b {data[1]['epochs']:.2g}" in plan.stdout

    (tmp_path / "in.txt").write_text("one two three " * 500)
    words = PrepareRequest(
        inputs=(str(tmp_path / "in.txt"),), output=str(tmp_path / "sets.1" / "w"), tokenizer="bpe", vocab_size=270
    )
    prepare(words, lambda _: None)
    with pytest.raises(ConfigError) as caught:
        ensure_corpus(compose_run([*run, *blend(tmp_path, {"a": 1, "w": 1})]).config)
    (problem,) = (each for each in caught.value.problems if each.key == "data.blend")
    assert "the same id means different text" in problem.reason
    assert problem.fix.startswith("canzona data prepare ... --tokenizer byte")

    with pytest.raises(ConfigError) as caught:
        ensure_corpus(compose_run([*run, *blend(tmp_path, {"none": 1, "nought": 1})]).config)
    assert {problem.key for problem in caught.value.problems} == {"data.blend"}
    assert len(caught.value.problems) == 4, "two files of each"
    for bad in ({"a": 0}, {"a": -1}):
        with pytest.raises(ConfigError, match="above 0"):
            compose_run([*run, *blend(tmp_path, {**bad, "b": 1})])
    with pytest.raises(ConfigError, match="is listed twice"):
        compose_run([*run, *blend(tmp_path, {"a": 1, "../sets.1/a": 1})])
    with pytest.raises(ConfigError, match=r"data\.path=elsewhere"):
        compose_run([*run, *blend(tmp_path, {"a": 1}), "data.path=elsewhere"])


def test_a_cache_that_becomes_full_is_named_with_its_variable_by_every_rank(tmp_path: Path) -> None:
    """Megatron's index of samples does not fit any more; nothing of it stays, and it fits once there is room."""
    sets_in(tmp_path)
    run = ("gpus=2", "train.steps=200", *blend(tmp_path, {"a": 1, "b": 1}))
    config, layout, corpus = jobs.prepare(*run)
    cache = tmp_path / "indices"

    def work(_: int, world: World) -> tuple[int, str, list[str], int]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        with pytest.raises(EnvironmentProblem) as refused:
            build_datasets(config, corpus, cache=cache)
        left = [path.name for path in cache.iterdir()]
        torch.distributed.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        samples: torch.utils.data.Dataset[Batch] = build_datasets(config, corpus, cache=cache).train
        return refused.value.exit_code, str(refused.value), left, len(samples)  # type: ignore[arg-type]

    for code, said, left, samples in jobs.on_ranks({0: (config, layout)}, work)[0]:
        assert (code, left) == (3, [])
        assert said.startswith("CANZONA_CACHE: the index of samples cannot be written: No space left")
        assert "make room there" in said
        assert samples >= 200 * layout.global_batch_size
