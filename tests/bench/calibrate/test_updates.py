"""Calibration measures the updates that plans look up and that Megatron runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from canzona_cli.bench.calibrate.collectives import LEAST_SAMPLES, MOST_SAMPLES, repeat
from canzona_cli.bench.calibrate.compute import Group, expected_seconds, shapes, variants
from canzona_cli.bench.calibrate.profile import FULL, QUICK, Orders
from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.update import algorithm_of, label
from canzona_cli.core.megatron.optimizer import megatron_adam, megatron_muon
from canzona_cli.core.model.matrices import layer_shapes
from canzona_cli.core.optimizers.muon import Muon
from canzona_cli.core.setup import MuonConfig
from canzona_cli.records.files import RunFiles
from tests.cuda_stand_in import DEVICE, cuda_stand_in

CPU = torch.device("cpu")


@pytest.mark.parametrize("optimizer", ["muon", "soap", "shampoo", "adamw"])
def test_every_way_has_the_label_that_plans_look_up(optimizer: str) -> None:
    config = compose_run(["recipe=tiny", f"optimizer={optimizer}"]).config
    found = {variant.label: variant for variant in variants(config)}
    assert set(found) == {
        *("muon/standard/5", "muon/standard/5/stacked", "megatron/muon/standard/5"),
        *("muon/gram/5", "muon/gram/5/stacked"),
        *("soap/spread", "shampoo/spread"),
    }
    for name, variant in found.items():
        assert name.removeprefix("megatron/") == label(algorithm_of(variant.config.setup))


def test_a_recipes_own_settings_are_measured() -> None:
    config = compose_run(["recipe=tiny", "optimizer.ns_steps=7"]).config
    assert {variant.label for variant in variants(config)} >= {
        "muon/standard/7",
        "megatron/muon/standard/7",
    }


def test_shapes_are_those_of_both_splittings() -> None:
    config = compose_run(["recipe=tiny"]).config
    found = shapes(config)
    assert set(found) == {*layer_shapes(config.model, "qkv"), *layer_shapes(config.model, "split")}
    assert len(found) == len(set(found))
    soap = next(variant for variant in variants(config) if variant.label == "soap/spread")
    assert expected_seconds(soap, 1536, 256) > expected_seconds(soap, 256, 256), (
        "decompositions grow with the longer side"
    )


def test_megatrons_muon_by_itself_makes_the_update_that_ours_makes() -> None:
    settings = MuonConfig(name="muon", lr=0.02)
    generator = torch.Generator().manual_seed(1)
    start, grad = (torch.randn(48, 64, generator=generator) for _ in range(2))
    theirs, ours = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    theirs.grad, ours.grad = grad.clone(), grad.clone()
    megatron_muon([theirs], settings, "fp32").step()
    Muon([ours], settings.lr, weight_decay=settings.weight_decay, scale_factor=0.2, precision="fp32").step()
    torch.testing.assert_close(theirs.detach(), ours.detach(), rtol=1e-4, atol=1e-6)


def test_megatrons_adam_decays_weights_apart() -> None:
    settings = replace(MuonConfig(name="muon", lr=0.1), weight_decay=0.5)
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.zeros(4)
    megatron_adam([weight], settings).step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.95))


def test_a_number_is_repeated_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 0.01

    clocks = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now)
    monkeypatch.setattr("canzona_cli.bench.calibrate.collectives.time", clocks)
    assert len(repeat(work, CPU, 0.002)) == 1, "a call that is four times its budget is not repeated"
    assert len(repeat(work, CPU, 0.015)) == LEAST_SAMPLES
    assert len(repeat(work, CPU, 0.055)) == 6
    assert len(repeat(work, CPU, 100.0)) == MOST_SAMPLES


@pytest.mark.parametrize(("threads", "of"), [(1, "processor"), (4, "wall clock")])
def test_where_ranks_share_a_core_its_own_time_counts(monkeypatch: pytest.MonkeyPatch, threads: int, of: str) -> None:
    """Calls of 2 ms between which the rank sometimes sleeps for 30 while another one runs."""
    wall = worked = 0.0

    def work() -> None:
        nonlocal wall, worked
        worked += 0.002
        wall += 0.032 if round(worked / 0.002) % 4 == 0 else 0.002

    clocks = SimpleNamespace(perf_counter=lambda: wall, process_time=lambda: worked)
    monkeypatch.setattr("canzona_cli.bench.calibrate.collectives.time", clocks)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    found = repeat(work, CPU, 1.0)
    assert sum(found) / len(found) == pytest.approx(0.002 if of == "processor" else 0.0095, rel=0.05)


def test_orders_reach_the_ranks(tmp_path: Path) -> None:
    for effort in (FULL, QUICK):
        Orders(effort=effort, workers=2).write(RunFiles(tmp_path))
        assert Orders.read(RunFiles(tmp_path)) == Orders(effort=effort, workers=2)


@pytest.mark.parametrize("name", ["muon/standard/5", "megatron/muon/standard/5"])
def test_on_a_gpu_an_update_is_measured_as_the_engine_runs_it(name: str) -> None:
    """The weight is written where the update was finite, rounded in memory of its own, and the host does not look."""
    config = compose_run(["recipe=tiny", "model.num_layers=2"]).config
    [variant] = [variant for variant in variants(config) if variant.label == name]
    with pytest.MonkeyPatch.context() as patched, cuda_stand_in() as record:
        patched.setattr("canzona_cli.core.optimizers.muon.runs_in_blocks", lambda matrix: False)
        group = Group(variant, 8, 12, DEVICE)
        group.update()
        record.forget()
        samples = repeat(group.update, DEVICE, 0.0)
        named = {operation.name for operation in record.operations}
    assert samples
    assert ("aten::where" in named) == variant.ours
    assert record.host_reads == []
    assert {wait.split(" at ")[0] for wait in record.host_waits} == {"device"}, "between samples"
    for master, weight in zip(group._masters, group._weights, strict=True):
        assert torch.equal(weight, master.detach().bfloat16())
