"""`canzona checkpoint import` and `export` of Megatron's distributed checkpoints: each program goes on where the other
stopped."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.checkpoint.torch_dist.test_files import QWEN3, saved, state
from tests.cli.commands.support import canzona
from tests.dist.jobs import prepare

if TYPE_CHECKING:  # Megatron-LM's training takes seconds to import
    from tests.library.pretraining import Pretrained

SAVED, STEPS, BATCH, LENGTH, VOCABULARY = 4, 8, 4, 64, 384
TP = ("--tensor-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
FP32, BF16 = ("--muon-fp32-matmul-prec", "high"), ("--bf16", "--accumulate-allreduce-grads-in-fp32")
ADAMW = (*BF16, *SHARDED, "--optimizer", "adam")
TEXT = ("data=stdlib-bytes", "data.validation_fraction=0", "train.eval_interval=0")
HERE = (*TEXT, "gpus=2", "cluster=cpu", "parallel.tp=1", "parallel.pp=1")


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The samples of `canzona train`, in its order."""

    def __init__(self, cache: Path) -> None:
        from canzona_cli.training.data import build_datasets

        config, _, corpus = prepare(*RUN)
        self._samples = build_datasets(config, corpus, cache=cache / "indices").train

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._samples[index]
        return {key: sample[name] for key, name in (("tokens", "tokens"), ("labels", "labels"), ("mask", "loss_mask"))}


RUN = (
    *("gpus=1", *TEXT, "train.seed=7", f"train.steps={STEPS}", f"train.seq_length={LENGTH}"),
    *(f"train.global_batch_size={BATCH}", "train.micro_batch_size=1"),
)


def _pretrain(cache: Path, *flags: str, engine: tuple[str, ...] | None = None, ranks: int = 2) -> "list[Pretrained]":
    from tests.library.pretraining import LOOP, MUON, pretrain
    from tests.library.pretraining import QWEN3 as SHAPE

    words = ("--vocab-size", str(VOCABULARY - 1))
    return pretrain(*SHAPE, *LOOP, *words, *MUON, *flags, ranks=ranks, canzona=engine, samples=partial(Samples, cache))


def _experts(ep: int) -> tuple[str, ...]:
    from tests.library.test_pretrain import EXPERTS

    return (*EXPERTS, "--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", "1")


def _losses(ranks: "list[Pretrained]") -> list[float]:
    """Returns those of the steps after the checkpoint."""
    return next(rank.losses for rank in ranks if rank.losses)[-(STEPS - SAVED) :]


def _imported(folder: Path, run: Path, *overrides: str) -> dict[str, object]:
    done = canzona("checkpoint", "import", folder, "--out", run, "--json", *overrides, code=0)
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def _resumed(run: Path, *settings: str) -> list[float]:
    canzona("resume", run, *HERE, *settings, code=0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["step"] > SAVED]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    prepare(*RUN)  # once, where the ranks find it
    return cache


@pytest.fixture(scope="module")
def muon(cache: Path) -> tuple[Path, list[float]]:
    """A folder that Megatron's Muon saved after step 4, in fp32, and its losses after that."""
    folder = cache / "muon"
    ranks = _pretrain(cache, *FP32, "--save", str(folder), "--save-interval", str(SAVED))
    return folder / f"iter_{SAVED:07d}", _losses(ranks)


@pytest.mark.sweep  # four trainings; `test_files` compares what is read and written
def test_canzona_and_megatron_go_on_from_each_other(
    muon: tuple[Path, list[float]], cache: Path, tmp_path: Path
) -> None:
    """The same samples in the same order; fp32, so that losses differ by roundings: as far as two layouts of
    Megatron's do (1e-6)."""
    folder, losses = muon
    facts = _imported(folder, tmp_path / "run")
    assert (facts["step"], facts["optimizer_state"]) == (SAVED, "muon")
    assert canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron").returncode == 0
    _imported(tmp_path / "out", tmp_path / "again")
    once, twice = state(tmp_path / "run"), state(tmp_path / "again")
    assert once.keys() == twice.keys()
    assert all(np.array_equal(once[name], twice[name]) for name in once)
    np.testing.assert_allclose(_resumed(tmp_path / "run"), losses, rtol=1e-6)
    loading = ("--load", str(tmp_path / "out"))
    resumed = _pretrain(cache, *FP32, *SHARDED, *TP, *loading, engine=())
    np.testing.assert_allclose(_losses(resumed), losses, rtol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("ids", [128, 16384])
def test_megatron_goes_on_after_a_round_trip_with_few_and_with_many_ids(ids: int, tmp_path: Path) -> None:
    """Megatron's own layer-wise Muon saves and loads. The tokenizers of built-in text have more than 128 ids, and
    `VOCABULARY` lies between the two."""
    from tests.library.pretraining import LOOP, MUON, pretrain
    from tests.library.pretraining import QWEN3 as SHAPE

    run = (*SHAPE, *LOOP, "--vocab-size", str(ids - 1), *MUON, *BF16, *SHARDED)
    losses = _losses(pretrain(*run, "--save", str(tmp_path / "saved"), "--save-interval", str(SAVED)))
    _imported(tmp_path / "saved" / f"iter_{SAVED:07d}", tmp_path / "run")
    assert canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron").returncode == 0
    _imported(tmp_path / "out", tmp_path / "again")
    once, twice = state(tmp_path / "run"), state(tmp_path / "again")
    assert once.keys() == twice.keys()
    assert all(np.array_equal(once[name], twice[name]) for name in once)
    loaded = pretrain(*run, "--load", str(tmp_path / "out"), "--use-checkpoint-args")
    np.testing.assert_array_equal(_losses(loaded), losses)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("flags", "engine", "apart"),
    [
        (ADAMW, None, 4e-4),
        ((*BF16, *SHARDED), None, 4e-4),
        ((*FP32, *SHARDED), (), 1e-6),
    ],
    ids=["adamw", "layer-wise muon", "the engine"],
)
def test_each_goes_on_from_the_other(
    flags: tuple[str, ...], engine: tuple[str, ...] | None, apart: float, cache: Path, tmp_path: Path
) -> None:
    """Losses in bf16 differ as much as those of Megatron's own Muons (1e-4), which round in another order."""
    saving = ("--save", str(tmp_path / "saved"), "--save-interval", str(SAVED))
    losses = _losses(_pretrain(cache, *flags, *saving, engine=engine))
    facts = _imported(tmp_path / "saved" / f"iter_{SAVED:07d}", tmp_path / "run")
    assert facts["optimizer_state"] == ("adamw" if "adam" in flags else "muon")
    assert canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron").returncode == 0
    np.testing.assert_allclose(_resumed(tmp_path / "run"), losses, rtol=apart)
    loading = ("--load", str(tmp_path / "out"), "--use-checkpoint-args")
    loaded = _losses(_pretrain(cache, *flags, *loading, engine=engine))
    np.testing.assert_allclose(loaded, losses, rtol=apart)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("saver", "loader", "engine", "numbers"),
    [
        (FP32, (*FP32, *SHARDED), (), (1, 2, 4)),
        ((*SHARDED, "--optimizer", "adam"), (*SHARDED, "--optimizer", "adam"), None, (1, 2, 4)),
        ((*BF16, *SHARDED), (*BF16, *SHARDED), None, (2,)),
    ],
    ids=["duplicated muon and the engine, fp32", "adamw, fp32", "layer-wise muon, bf16"],
)
def test_experts_go_on_with_any_number_of_expert_parallel_ranks(
    saver: tuple[str, ...],
    loader: tuple[str, ...],
    engine: tuple[str, ...] | None,
    numbers: tuple[int, ...],
    cache: Path,
    tmp_path: Path,
) -> None:
    """From EP 2, here and, after a round trip that keeps every tensor of Megatron's bit for bit, there. In bf16,
    rounding sends single tokens to other experts in later steps, but the same program on the same ranks repeats every
    loss. Megatron's AdamW cannot go on with EP 1 itself."""
    from tests.library.pretraining import tensors_of

    saving = ("--save", str(tmp_path / "saved"), "--save-interval", str(SAVED))
    losses, folder = _losses(_pretrain(cache, *saver, *_experts(2), *saving)), f"iter_{SAVED:07d}"
    kind = "adamw" if "adam" in saver else "muon"
    facts = _imported(tmp_path / "saved" / folder, tmp_path / "run")
    assert (facts["step"], facts["optimizer_state"]) == (SAVED, kind)
    canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron", code=0)
    theirs, ours = tensors_of(tmp_path / "saved" / folder), tensors_of(tmp_path / "out" / folder)
    assert any(key.startswith("optimizer.") and ".experts." in key for key in theirs)
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor, err_msg=key)
    compared = 1 if "--bf16" in saver else len(losses)
    for ep in numbers:
        _imported(tmp_path / "out", tmp_path / f"ep{ep}")
        here = _resumed(tmp_path / f"ep{ep}", "gpus=4", f"parallel.ep={ep}")
        np.testing.assert_allclose(here[:compared], losses[:compared], rtol=1e-6 if compared > 1 else 4e-4)
        if kind == "adamw" and ep == 1:
            continue
        loading = (*_experts(ep), "--load", str(tmp_path / "out"), "--use-checkpoint-args")
        there = _losses(_pretrain(cache, *loader, *loading, engine=engine, ranks=max(2, ep)))
        np.testing.assert_allclose(there, losses, rtol=0 if ep == 2 and engine is None else 1e-6)


@pytest.mark.sweep
def test_state_without_steps_or_of_another_optimizer_is_left_out(cache: Path, tmp_path: Path) -> None:
    for name, flags, engine in (
        ("buckets", (*BF16, "--use-distributed-optimizer"), None),
        ("soap", (*FP32, *SHARDED), ("optimizer=soap",)),
    ):
        saving = ("--save", str(tmp_path / name), "--save-interval", str(SAVED), "--train-iters", str(SAVED))
        _pretrain(cache, *flags, *saving, engine=engine)
        facts = _imported(tmp_path / name, tmp_path / f"run of {name}")
        assert (facts["step"], facts["optimizer_state"]) == (0, None)


@pytest.mark.sweep
def test_the_engine_refuses_a_checkpoint_that_does_not_say_its_steps(cache: Path, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", "muon", *QWEN3, "train.precision=fp32")
    assert canzona("checkpoint", "export", run, tmp_path / "out", "--to", "megatron").returncode == 0
    path = tmp_path / "out" / f"iter_{SAVED:07d}" / "common.pt"
    common = torch.load(path, weights_only=False)
    for group in common["optimizer"][1]["optimizer"]["param_groups"]:
        del group["step"]
    torch.save(common, path)
    with pytest.raises(AssertionError, match="the number of AdamW's steps"):
        _pretrain(cache, *FP32, *SHARDED, "--load", str(tmp_path / "out"), engine=())


@pytest.mark.sweep
def test_megatron_goes_on_with_a_rate_of_embeddings_of_their_own(
    muon: tuple[Path, list[float]], cache: Path, tmp_path: Path
) -> None:
    """`--decoupled-lr` is the flag of this rate. Megatron refuses state whose groups have another rate."""
    _imported(muon[0], tmp_path / "run", "optimizer.adamw_lr=0.004")
    assert canzona("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--to", "megatron").returncode == 0
    loading = (*BF16, *SHARDED, "--load", str(tmp_path / "out"), "--use-checkpoint-args")
    assert len(_losses(_pretrain(cache, *loading, "--decoupled-lr", "0.004", "--decoupled-min-lr", "0.0004"))) == 4
    with pytest.raises(AssertionError, match="param"):
        _pretrain(cache, *loading)
