"""Calibration on real ranks: everything is measured, as the engine issues it."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from canzona_cli.bench.calibrate import collectives, compute
from canzona_cli.bench.calibrate.calibrate import calibrate, prepare_run, write_profile
from canzona_cli.bench.calibrate.collectives import KINDS, ROW, Members, Team, group_sizes, measure_collectives
from canzona_cli.bench.calibrate.compute import shapes, update_samples, variants
from canzona_cli.bench.calibrate.profile import Effort, Measurement, Recorder
from canzona_cli.cli.views.calibrate import Progress
from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.machine import profile_mismatches
from canzona_cli.core.costs.update import algorithm_of, seconds
from canzona_cli.core.megatron import owner_bucket_group
from canzona_cli.core.optimizers import cpu_matmuls
from canzona_cli.core.setup import SoapConfig
from canzona_cli.records.files import RunFiles
from tests.cli.commands.support import importable
from tests.cuda_stand_in import DEVICE, cuda_stand_in
from tests.dist.calibrate_stand_in import MODULE
from tests.dist.ranks import run_ranks

HASTY = Effort(item_s=0.001, sizes=(8, 4096), large=None)
SMALL = (
    *("recipe=tiny", "model.num_layers=1", "model.hidden_size=64", "model.ffn_hidden_size=192"),
    *("train.seq_length=64", "train.micro_batch_size=1", "parallel.tp=1", "parallel.pp=1"),
)
CPU = torch.device("cpu")


def joined() -> int:
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


@pytest.mark.sweep  # a whole calibration
def test_a_calibrations_profile_predicts_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in importable().items():
        monkeypatch.setenv(name, value)
    config, layout = prepare_run(compose_run([*SMALL, "gpus=2"], training=False).config)
    found = calibrate(config, layout, Progress(Console(quiet=True)), name="here", effort=HASTY, worker=MODULE)
    assert (found.outcome.status, found.outcome.message) == ("done", "")
    assert found.profile.not_measured == found.record.skipped == ()
    measured = {(m.quantity, *m.key): m for m in found.record.measurements}
    assert len(measured) == len(found.record.measurements), "each number once"
    assert all(m.spread.median > 0 for m in measured.values())
    assert {key[1:] for key in measured if key[0] == "collectives"} == {
        (kind, 2, size) for kind in KINDS for size in HASTY.sizes
    }
    for variant in (variant for variant in variants(config) if variant.ours):
        for rows, cols in shapes(config):
            [row] = [row for row in found.profile.measured_updates if row[:3] == (variant.label, rows, cols)]
            assert seconds(algorithm_of(variant.config.setup), rows, cols, found.profile) == row[3]
    assert {row[0] for row in found.profile.measured_updates if row[0].startswith("megatron/")} == {
        "megatron/muon/standard/5"
    }
    assert found.profile.adamw_ns is not None
    assert found.profile.pass_factors[0] != 1.0
    assert found.profile.bf16_in_fp32 is cpu_matmuls.is_slow()
    assert found.profile.measured_on["workers"] == 2, "as many as the run has, however few the cores"
    write_profile(tmp_path / "here.yaml", found)
    again = compose_run(["recipe=tiny", f"cluster={tmp_path / 'here.yaml'}"])
    assert again.config.cluster == found.profile
    assert not profile_mismatches(found.profile)
    assert found.logs is None
    assert found.profile.checkpoint_gb_per_s is not None
    assert found.profile.measured_on["checkpoints_in"] == str(Path("runs").absolute())


def test_collectives_are_measured_in_every_group_and_members_agree() -> None:
    def ranks() -> list[Measurement]:
        rank = joined()
        members = [Members(Team(rank, size, CPU), size) for size in group_sizes(3)]
        kept: list[Measurement] = []
        recorder = Recorder(RunFiles(Path()), writes=False)
        recorder.add = kept.append  # type: ignore[method-assign,assignment]
        for group in members:
            if group.team.member:
                measure_collectives(group, HASTY, recorder)
        return kept

    first, second, third = run_ranks(3, ranks)
    strip = [(m.key, m.spread, m.repetitions) for m in first]
    assert strip == [(m.key, m.spread, m.repetitions) for m in second]
    assert strip[-len(third) :] == [(m.key, m.spread, m.repetitions) for m in third]
    kinds = {(m.key[0], m.key[1]) for m in first}
    assert kinds == {(kind, size) for kind in KINDS for size in (2, 3)} - {("send", 3)}
    assert all(m.busy > 0 for m in first), "gloo works on the processor"


@pytest.mark.sweep
def test_on_a_gpu_the_devices_clocks_time_buckets_as_the_engine_issues_them() -> None:
    """Uses a stand-in. A row of every kind lies between two events, after an all-reduce; nothing else is waited for."""

    def ranks() -> tuple[list[Measurement], list[str], list[str]]:
        rank = joined()
        kept: list[Measurement] = []
        recorder = Recorder(RunFiles(Path()), writes=False)
        recorder.add = kept.append  # type: ignore[method-assign,assignment]
        collectives._SYNCHRONISING_BYTES = owner_bucket_group._AHEAD_BYTES = 8
        with cuda_stand_in() as record:
            members = Members(Team(rank, 2, DEVICE), 2)
            measure_collectives(members, HASTY, recorder)
            issued = [operation.name for operation in record.operations if operation.stream.startswith("nccl")]
        return kept, issued, record.host_waits

    for kept, issued, waits in run_ranks(2, ranks):
        measured = {m.key: m for m in kept if m.quantity == "collectives"}
        assert set(measured) == {(kind, 2, size) for kind in KINDS for size in HASTY.sizes}
        assert all(m.busy == 0 for m in measured.values())
        samples = {kind: 2 * 2 + sum(m.repetitions for key, m in measured.items() if key[0] == kind) for kind in KINDS}
        # A bucket has a range for each of the two ranks.
        assert sum("reduce_" in name and "scatter" not in name and "all" not in name for name in issued) >= (
            2 * ROW * samples["reduce"]
        )
        # The host launches a row more slowly than this small all-reduce runs, so there are several before each.
        ahead = issued.count("c10d::allreduce_") + issued.count("all_reduce")
        assert ahead >= collectives._MAX_SYNCHRONISING * sum(samples.values()), sorted(set(issued))
        assert len(waits) >= sum(samples.values())
        assert all("event" in wait for wait in waits)
        [found] = [m for m in kept if m.quantity == "grouped_collectives"]
        assert found.spread.median in (0.0, 1.0)


def test_on_a_gpu_products_have_a_third_precision() -> None:
    """Uses a stand-in with small versions of a GPU's quantities; the host waits for the device only between samples."""

    def rank() -> tuple[list[Measurement], list[str], list[str]]:
        kept: list[Measurement] = []
        recorder = Recorder(RunFiles(Path()), writes=False)
        recorder.add = kept.append  # type: ignore[method-assign,assignment]
        on_gpu = compute.SIZES["cuda"]
        compute.SIZES["cuda"] = replace(on_gpu, matmuls=(8, 16), exact=8, symmetric=4, copied_bytes=1 << 10)
        with cuda_stand_in() as record:
            team = Team(joined(), 1, DEVICE)
            compute.measure_arithmetic(team, HASTY, recorder)
            compute.measure_memory(team, HASTY, recorder)
        return kept, record.host_waits, record.host_reads

    [(kept, waits, reads)] = run_ranks(1, rank)
    assert [(m.quantity, *m.key) for m in kept] == [
        ("matmul_tflops", 8),
        ("matmul_tflops", 16),
        *((f"{kind}_tflops",) for kind in ("fp32", "tf32", "qr", "eigh")),
        ("launch_us",),
        ("memory_gb_per_s",),
    ]
    assert all(m.spread.median > 0 for m in kept)
    assert waits
    assert all(wait.startswith("device") for wait in waits)
    assert {read.rpartition(" ")[2] for read in reads} == {"megatron/parallel.py:_gather"}, "what ranks tell each other"


def test_who_waits_leaves_its_core_to_the_others() -> None:
    def ranks() -> float:
        team = Team(joined(), 2, CPU)
        team.meet()
        begin = time.process_time()
        if team.rank == 0:
            time.sleep(1.0)
        team.meet()
        return time.process_time() - begin

    assert run_ranks(2, ranks)[1] < 0.2


def test_a_mean_over_a_period_weighs_refreshes_in() -> None:
    config = compose_run(["recipe=tiny"]).config

    def ranks() -> tuple[list[float], list[float]]:
        team = Team(joined(), 2, CPU)
        soap = next(variant for variant in variants(config) if variant.label == "soap/spread")
        found = []
        for period in (1, 1000):
            settings = SoapConfig(name="soap", lr=1e-3, precondition_frequency=period, stagger=False)
            variant = replace(soap, config=replace(config, optimizer=settings))
            found.append(update_samples(team, variant, 192, 256, 0.05))
        return found[0], found[1]

    always, seldom = run_ranks(2, ranks)[0]
    assert len(set(always)) == 1, "with a refresh at every step nothing but refreshes count"
    assert min(always) > sorted(seldom)[len(seldom) // 2], "two decompositions take longer than none"
