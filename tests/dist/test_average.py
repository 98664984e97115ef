"""The average of the weights, on two ranks in several layouts: it is that of torch, in fp64, over the weights that the
run saved, and training does not notice it."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from canzona_cli.checkpoint.contents import AVERAGE, MASTER
from canzona_cli.checkpoint.huggingface.folder import ExtraFiles
from canzona_cli.checkpoint.huggingface.foreign import tensor_names
from canzona_cli.checkpoint.huggingface.weights import export_weights
from canzona_cli.checkpoint.manifest import tensor_bytes
from canzona_cli.checkpoint.reader import Reader
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.core.costs.memory import checkpoint_bytes
from canzona_cli.core.planner.memory import memory_of
from canzona_cli.records.files import RunFiles
from canzona_cli.records.records import EMA
from tests.dist.jobs import SMALL, planned, resolve
from tests.dist.whole_runs import Run, checkpoint, lines, train

STEPS = 4
DECAY = 0.6
FIXED = (
    *(*SMALL, "gpus=2", "train.global_batch_size=4", f"train.steps={STEPS}", "train.eval_interval=1"),
    *("checkpoint.every_minutes=null", "checkpoint.every_steps=1", "checkpoint.keep=9", "schedule.decay=constant"),
)
ONE_LAYER = (*FIXED, "model.num_layers=1", "parallel.pp=1")
TP2 = (*ONE_LAYER, "optimizer=muon", "parallel.tp=2", "train.micro_batch_size=4", "engine.strategy=canzona")
DP2 = (*ONE_LAYER, "parallel.tp=1", "engine.strategy=canzona")
BF16 = (*FIXED, "optimizer=muon", "train.precision=bf16")
KEPT = f"train.ema={DECAY}"
FEW = 2
SHORT = f"train.steps={FEW}"
LAYOUTS = {
    "tp2": (*TP2, KEPT),
    "shared": (*TP2, KEPT, SHORT, "engine.mode=shared"),
    "pp2": (*BF16, "parallel.tp=1", "parallel.pp=2", "engine.strategy=layerwise", KEPT, SHORT),
    "sc": (*BF16, "parallel.tp=1", "parallel.pp=1", "engine.strategy=sc", KEPT, SHORT),
    "adamw": (*ONE_LAYER, "parallel.tp=2", "optimizer=adamw", KEPT, SHORT),
}
RUNS = {
    **{name: Run(settings=settings, validates=name == "tp2") for name, settings in LAYOUTS.items()},
    "without": Run(settings=TP2),
    "nothing": Run(settings=(*TP2, "train.ema=1e-9", SHORT)),
    "first": Run(settings=(*TP2, "train.ema=0.999999999", SHORT)),
    "resumed": Run(settings=(*TP2, KEPT), start="tp2", validates=False),
    "elsewhere": Run(settings=(*DP2, KEPT, "optimizer=muon"), start="tp2", validates=False),
    "dropped": Run(settings=TP2, start="tp2", validates=False),
    "begun": Run(settings=(*TP2, KEPT), start="without", validates=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for ranks in ("parallel.tp=2", "parallel.pp=2", "parallel.tp=1"):  # on two data-parallel ranks last
        left = {name: run for name, run in RUNS.items() if not (folder / name).exists()}
        train(folder, {name: run for name, run in left.items() if ranks in run.settings})
    return folder


def _units(folder: Path, name: str, step: int, field: str) -> dict[str, torch.Tensor]:
    path, model = checkpoint(folder / name, step), resolve(*RUNS[name].settings)[0].model
    manifest = read_manifest(path)
    with Reader(path, manifest, model) as reader:
        return {unit: reader.master(unit, field=field).clone() for unit in tensor_names(model)}


def _module(weights: dict[str, torch.Tensor]) -> torch.nn.ParameterList:
    return torch.nn.ParameterList([torch.nn.Parameter(weights[unit].double()) for unit in sorted(weights)])


def _averaged(masters: Iterator[dict[str, torch.Tensor]]) -> AveragedModel:
    """What torch keeps of these weights, in fp64."""
    model = _module(next(masters))
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    average.update_parameters(model)
    for weights in masters:
        average.update_parameters(_module(weights))
    return average


def _compare(folder: Path, name: str, steps: range) -> None:
    reference = _averaged(_units(folder, name, step, MASTER) for step in steps)
    average = _units(folder, name, steps[-1], AVERAGE)
    masters = _units(folder, name, steps[-1], MASTER)
    for unit, expected in zip(sorted(average), reference.module.parameters(), strict=True):
        # Each of the few steps rounds once, relative to weights of about this size.
        torch.testing.assert_close(average[unit].double(), expected.detach(), rtol=3e-7, atol=3e-8)
        if steps[-1] > steps[0] and masters[unit].dim() > 1:
            assert not torch.equal(average[unit], masters[unit]), unit


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_average_is_torchs_wherever_the_masters_lie(folder: Path, name: str) -> None:
    config, layout = resolve(*LAYOUTS[name])
    _compare(folder, name, range(1, config.train.steps + 1))
    manifest = read_manifest(checkpoint(folder / name, config.train.steps))
    stored = (tensor for key, tensor in manifest.tensors.items() if not key.startswith("random."))
    assert sum(tensor_bytes(tensor.dtype, tensor.shape) for tensor in stored) == checkpoint_bytes(config.setup)
    without = replace(config.setup, train=replace(config.train, ema=0.0))
    plan = planned(config, layout)
    parts = [memory_of(setup, layout, plan).total for setup in (config.setup, without)]
    assert parts[0] > parts[1]


def test_training_does_not_notice_the_average(folder: Path) -> None:
    without = _column(folder, "without", "loss")
    assert _column(folder, "tp2", "loss") == without
    for name in ("nothing", "first"):
        assert _column(folder, name, "loss") == without[:FEW]


def test_the_average_is_validated_beside_the_weights(folder: Path) -> None:
    """An average that forgets at once has the loss of the weights, to the last bit; one that never forgets, that of the
    weights after the first step."""
    losses = {name: lines(RunFiles(folder / name).validation) for name in ("without", "nothing", "first", "tp2")}
    plain = [line["loss"] for line in losses["without"]]
    for name, validations in losses.items():
        assert [line["loss"] for line in validations] == plain[: len(validations)], name
        assert validations[0]["sets"] == {}, "before the first step there is no average"
    averages = {name: [line["sets"].get(EMA) for line in found[1:]] for name, found in losses.items()}  # type: ignore[attr-defined]
    assert averages["nothing"] == plain[1 : 1 + FEW]
    assert averages["first"] == [plain[1]] * FEW
    for average, newest in zip(averages["tp2"][1:], plain[2:], strict=True):
        assert average != newest


def test_a_resumed_run_goes_on_with_the_average_in_any_layout(folder: Path) -> None:
    files = [read_manifest(checkpoint(folder / name, STEPS)).files for name in ("tp2", "resumed")]
    assert files[0] == files[1]
    before, after = (_units(folder, name, step, AVERAGE) for name, step in (("tp2", 3), ("elsewhere", 4)))
    masters = _units(folder, "elsewhere", 4, MASTER)
    for unit, average in before.items():
        expected = DECAY * average.double() + (1 - DECAY) * masters[unit].double()
        torch.testing.assert_close(after[unit].double(), expected, rtol=1e-6, atol=1e-7)


def test_an_average_can_be_dropped_and_begun_at_a_resumption(folder: Path) -> None:
    kept = read_manifest(checkpoint(folder / "dropped", 4)).tensors
    assert not any(key.partition("@")[0].endswith(f"/{AVERAGE}") for key in kept)
    assert _column(folder, "dropped", "loss") == _column(folder, "without", "loss")[3:4]
    _compare(folder, "begun", range(4, STEPS + 1))


def test_the_average_is_exported_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    path, model = checkpoint(folder / "tp2", STEPS), resolve(*TP2)[0].model
    with Reader(path, read_manifest(path), model) as reader:
        export_weights(
            *(reader, tmp_path / "out"), dtype="fp32", seq_length=64, extra_files=ExtraFiles(), field=AVERAGE
        )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    units = _units(folder, "tp2", STEPS, AVERAGE)
    assert all(torch.equal(exported[name], units[unit]) for unit, name in tensor_names(model).items())


@cache
def _lines(path: Path) -> list[dict[str, object]]:
    return lines(path)


def _column(folder: Path, name: str, key: str) -> list[object]:
    return [line[key] for line in _lines(RunFiles(folder / name).metrics)]
