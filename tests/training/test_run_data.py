"""The samples that a run reads, on real files: Megatron's own, the held-out ones never, and after a resumption each
set's next one."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from canzona_cli.checkpoint.manifest import Progress
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ConfigError
from canzona_cli.data.corpus import ensure_corpus
from canzona_cli.data.indexed import inspect_pair
from canzona_cli.records.corpus import DataPlan, PreparedCorpus
from canzona_cli.training.data import Samples, build_datasets, build_validation, plan_data
from tests.data.test_order import LENGTH, SEED, Ids
from tests.data.texts import drawn, prepare_documents

BATCH = 8
HELD_OUT = 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("a", "b")):
        prepare_documents(folder, name, documents=60, seed=seed)
    return folder


def run_of(folder: Path, *overrides: str) -> tuple[RunConfig, PreparedCorpus]:
    """A run of 10 steps of 8 sequences, a little more than an epoch of `a`."""
    small = (f"train.seq_length={LENGTH}", f"train.global_batch_size={BATCH}", "train.steps=10", "gpus=1")
    data = f"data.path={folder / 'a'}"
    where = () if any(override.startswith(("data.path", "data.blend")) for override in overrides) else (data,)
    own_set = any(override.startswith("data.validation=") for override in overrides)
    held_out = () if own_set else (f"data.validation_fraction={HELD_OUT}",)
    composed = compose_run(["recipe=qwen3-tiny", *small, *held_out, *where, *overrides]).config
    config, _ = resolve(composed)
    return config, ensure_corpus(config)


def blend(folder: Path, a: int, b: int) -> str:
    return f"data.blend={{{folder / 'a'}:{a},{folder / 'b'}:{b}}}"


def training(folder: Path, *overrides: str, plan: DataPlan | None = None) -> Samples:
    config, corpus = run_of(folder, *overrides)
    return build_datasets(config, corpus, cache=folder / "indices", plan=plan).train


def tokens(samples: Samples, indices: Sequence[int]) -> list[list[int]]:
    return [samples[index]["tokens"].tolist() for index in indices]


def size(samples: Samples) -> int:
    return len(samples)  # type: ignore[arg-type]


def megatrons(
    folder: Path, names: str, shares: list[float] | None, samples: int, cache: Path, *, held_out: float = HELD_OUT
) -> Samples:
    """Builds the samples of the documents to train on as Megatron does for a pair of only these, which it writes."""
    for name in names:
        documents = IndexedDataset(str(folder / name))
        builder = IndexedDatasetBuilder(str(cache / f"{name}.bin"), dtype=np.uint16)
        for number in np.flatnonzero(~drawn(folder / name, held_out)):
            builder.add_document(torch.from_numpy(documents[number].copy()), [len(documents[number])])
        builder.finalize(str(cache / f"{name}.idx"))
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([str(cache / name) for name in names], shares),
        split="100,0,0",
        path_to_cache=str(cache),
        tokenizer=Ids(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=max(0.005, (len(names) + 1 / min(shares or [1])) / samples),
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
    assert isinstance(built, GPTDataset | BlendedDataset)
    return cast(Samples, built)


@pytest.mark.parametrize(("names", "shares"), [("a", None), ("ab", [0.75, 0.25])])
def test_the_samples_are_megatrons_and_do_not_depend_on_validation(
    folder: Path, tmp_path: Path, names: str, shares: list[float] | None
) -> None:
    data = () if shares is None else (blend(folder, 3, 1),)
    expected = tokens(megatrons(folder, names, shares, 10 * BATCH, tmp_path), range(10 * BATCH))
    for interval in (0, 5):
        ours = training(folder, f"train.eval_interval={interval}", *data)
        assert tokens(ours, range(10 * BATCH)) == expected, interval


def test_a_validation_reads_the_same_held_out_samples_in_every_run(folder: Path) -> None:
    found = []
    for overrides in ((), ("train.seed=7",), ("train.global_batch_size=12",), ("train.steps=99", "gpus=4")):
        config, corpus = run_of(folder, *overrides)
        (part,) = build_validation(config, corpus, cache=folder / "indices")
        assert part.count == size(part.samples) == (corpus.validation_tokens - 1) // LENGTH, "fewer than 64"
        found.append(tokens(part.samples, range(part.count)))
        few = replace(config, train=replace(config.train, eval_sequences=5))
        assert build_validation(few, corpus, cache=folder / "indices")[0].count == 5
    assert all(each == found[0] for each in found)
    held_out = {tuple(row) for row in found[0]}
    assert not held_out & {tuple(row) for row in tokens(training(folder, "train.eval_interval=0"), range(10 * BATCH))}


@pytest.mark.parametrize(("names", "shares"), [("a", None), ("ab", [0.75, 0.25])])
def test_with_a_validation_set_all_documents_are_trained_on_whatever_the_set(
    folder: Path, tmp_path: Path, names: str, shares: list[float] | None
) -> None:
    data = () if shares is None else (blend(folder, 3, 1),)
    expected = tokens(megatrons(folder, names, shares, 10 * BATCH, tmp_path, held_out=0.0), range(10 * BATCH))
    for own_set in ("c", "d"):
        prefix = prepare_documents(folder, own_set, documents=20, seed=ord(own_set))
        for more in ((), ("train.eval_interval=0",)):
            ours = training(folder, f"data.validation={prefix}", *data, *more)
            assert tokens(ours, range(10 * BATCH)) == expected
        config, corpus = run_of(folder, f"data.validation={prefix}", *data)
        (part,) = build_validation(config, corpus, cache=folder / "indices")
        assert (part.name, part.share, part.count) == (own_set, 1.0, (inspect_pair(prefix).tokens - 1) // LENGTH)
        whole = megatrons(folder, own_set, None, part.count, tmp_path, held_out=0.0)
        assert tokens(part.samples, range(part.count)) == tokens(whole, range(part.count))


@pytest.mark.parametrize(("batch", "steps", "step"), [(4, 10, 5), (16, 10, 5), (2, 40, 20), (64, 22, 20), (8, 10, 5)])
def test_a_resumed_run_with_another_batch_has_a_sample_for_each_step_and_megatrons_order(
    folder: Path, tmp_path: Path, batch: int, steps: int, step: int
) -> None:
    """Some steps of eight are done: 20 of them are more than an epoch, which 40 steps of two would not be."""
    at = BATCH * step
    overrides = (f"train.global_batch_size={batch}", f"train.steps={steps}")
    config, corpus = run_of(folder, *overrides)
    done = Progress(step=step, samples=at, tokens=at * LENGTH)
    saved = plan_data(*run_of(folder))
    plan = plan_data(config, corpus, progress=done, saved=saved)
    needed = at + (steps - step) * batch
    assert plan.samples == needed
    train = training(folder, *overrides, plan=plan)
    assert size(train) >= needed, "the last step has its samples"
    read = range(at, needed)
    assert tokens(train, read) == tokens(megatrons(folder, "a", None, needed, tmp_path), read)
    again = plan_data(config, corpus, progress=Progress(step=step + 1, samples=at + batch, tokens=0), saved=plan)
    assert again == plan, "a later resumption has the same order"


def test_with_other_weights_each_set_goes_on_with_its_own_next_sample(folder: Path) -> None:
    """Also when it is resumed once more, and when a set is left out."""
    config, corpus = run_of(folder, blend(folder, 7, 1))
    blended = training(folder, blend(folder, 7, 1))
    assert isinstance(blended, BlendedDataset)
    read = [[int(place) for place, of in zip(blended.dataset_sample_index[:40], blended.dataset_index[:40], strict=True)
             if of == number] for number in (0, 1)]  # fmt: skip
    assert read == [[*range(len(each))] for each in read]
    done = Progress(step=5, samples=40, tokens=0)
    other = run_of(folder, blend(folder, 1, 1))
    plan = plan_data(*other, progress=done, saved=plan_data(config, corpus))
    assert (plan.blend_start, plan.set_starts) == (40, tuple(len(each) for each in read))
    resumed = training(folder, blend(folder, 1, 1), plan=plan)
    # In less than an epoch, the order of a set does not depend on the number of its samples.
    alone = [tokens(training(folder, f"data.path={folder / name}"), range(80)) for name in ("a", "b")]
    rest = tokens(resumed, range(40, 80))
    for number, samples in enumerate(alone):
        places = [samples.index(row) for row in rest if row in samples]
        assert places == [*range(len(read[number]), len(read[number]) + 20)]

    later = plan_data(*other, progress=Progress(step=7, samples=56, tokens=0), saved=plan)
    assert later == replace(plan, samples=later.samples), "with the same weights the mixture goes on"
    only_b = plan_data(
        *run_of(folder, f"data.path={folder / 'b'}"), progress=Progress(step=7, samples=56, tokens=0), saved=plan
    )
    assert only_b.set_starts == (len(read[1]) + 8,)


def test_an_index_belongs_to_its_data_and_is_whole_or_built_again(tmp_path: Path) -> None:
    """The documents in the opposite order: the same path and the same totals."""
    prepare_documents(tmp_path, "a", documents=60, seed=0)
    tokens(training(tmp_path), range(80))
    prepare_documents(tmp_path, "a", documents=60, seed=0, reverse=True)
    found = tokens(training(tmp_path), range(80))
    folders = sorted((tmp_path / "indices").iterdir())
    shutil.copytree(tmp_path / "indices", tmp_path / "whole")
    shutil.rmtree(tmp_path / "indices")
    assert found == tokens(training(tmp_path), range(80)), "as with no index of other data"

    for broken in ("truncated", "flipped", "missing"):
        for index in (tmp_path / "indices").iterdir():
            file = next(path for path in index.iterdir() if path.name.endswith("sample_index.npy"))
            content = bytearray(file.read_bytes())
            content[-5] ^= 1
            if broken == "missing":
                file.unlink()
            else:
                file.write_bytes(content if broken == "flipped" else content[:-9])
        assert tokens(training(tmp_path), range(80)) == found, broken
    partial = tmp_path / "indices" / f".{folders[0].name}.partial"
    partial.mkdir()
    (partial / "half").write_text("killed")
    shutil.rmtree(tmp_path / "indices" / folders[0].name, ignore_errors=True)
    assert tokens(training(tmp_path), range(80)) == found
    assert not [path for path in (tmp_path / "indices").iterdir() if path.name.startswith(".") and path != partial]


def test_one_set_under_two_names_is_refused(folder: Path, tmp_path: Path) -> None:
    for end in (".bin", ".idx", ".json"):
        shutil.copy(folder / f"a{end}", tmp_path / f"copy{end}")
    (tmp_path / "link").symlink_to(folder)
    for other in (tmp_path / "copy", tmp_path / "link" / "a"):
        with pytest.raises(ConfigError) as refused:
            run_of(folder, f"data.blend={{{folder / 'a'}:1,{other}:1}}")
        assert "same contents" in refused.value.problems[0].reason
