"""The profile that follows from measurements: each number in its place, the rest the base profile's."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.calibrate.calibrate import prepare_run
from canzona_cli.bench.calibrate.profile import FULL, Record, Recorder, parts, profile_of, read_record, shorten
from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.links import Group, Links
from canzona_cli.core.costs.machine import processor_name, torch_version
from canzona_cli.core.costs.model import stage_time
from canzona_cli.core.costs.update import memory_rate
from canzona_cli.core.host import cores
from canzona_cli.records.files import RunFiles
from tests.bench.calibrate.calibrations import ALL, MEASUREMENTS, RECORD, calibration, cut_off, number, profile, run
from tests.refusals import refused


def test_measured_numbers_stand_in_place_of_the_base_profiles() -> None:
    base = run()[0].cluster
    found = profile()
    assert found.matmul_tflops == ((64, 0.03), (512, 0.9), (2048, 0.8))
    assert found.bf16_tflops == 0.9, "no datasheet tells a processor's peak: the fastest product"
    assert (found.fp32_tflops, found.qr_tflops, found.eigh_tflops) == (0.2, 0.04, 0.1)
    assert found.launch_us == 0.9123, "four significant digits"
    assert found.adamw_ns == 3.5
    assert (found.bf16_in_fp32, base.bf16_in_fp32) == (True, False)
    assert memory_rate(found) == pytest.approx(0.9 * 17e9)
    assert found.measured_updates == (
        ("megatron/muon/standard/5", 256, 768, 3.5e-3),
        ("muon/standard/5", 256, 768, 2.5e-3),
    )
    assert ("all_reduce", 2, 8.0, 2e-5, 1.25) in found.collectives
    assert (found.name, found.cores, found.not_measured) == ("here", cores(), ())
    assert found.measured_on == {
        "processor": "A",
        "cores": 2,
        "base": "cpu",
        "torch": "2.10.0",
        "backend": "gloo",
        "threads": 1,
        "workers": 2,
    }
    assert (found.memory_gib, found.inter_node_gb_per_s) == (base.memory_gib, base.inter_node_gb_per_s)


def test_latency_and_bandwidth_say_of_two_ranks_what_was_measured() -> None:
    links = Links(cluster=replace(profile(), collectives=()))
    pair = Group(size=2, per_machine=2)
    for size, seconds in ((8, 1e-4), (8 << 20, 5.1e-3)):
        assert links.all_to_all([size, size], [size, size], pair).seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("together", [True, False])
def test_whether_collectives_are_grouped_is_as_the_largest_group_found_it(together: bool) -> None:
    assert profile().grouped_collectives == run()[0].cluster.grouped_collectives
    found = [number("grouped_collectives", float(value)) for value in (not together, together)]
    assert profile(replace(RECORD, measurements=tuple(found))).grouped_collectives is together


def test_factors_make_the_model_say_what_was_measured() -> None:
    config, layout = run()
    found = profile()
    for size, forward_s, backward_s in ((1, 0.03, 0.08), (8, 0.2, 0.5)):
        own = replace(layout, micro_batch_size=size, global_batch_size=size * layout.dp)
        predicted = stage_time(replace(shorten(config), cluster=found), own, 0)
        assert predicted.forward_s - predicted.pass_s == pytest.approx(forward_s, rel=1e-3)
        assert predicted.backward_s - predicted.pass_s == pytest.approx(backward_s, rel=1e-3)
    assert found.module_us[0] > 0


def test_where_a_small_micro_batch_took_no_less_nothing_is_said_of_starting() -> None:
    noise = {"forward": (0.01, 0.2), "backward": (0.3, 0.2)}
    measurements = tuple(
        number(direction, seconds, size)  # type: ignore[arg-type]
        for direction, both in noise.items()
        for size, seconds in zip((1, 8), both, strict=True)
    )
    found = profile(replace(RECORD, measurements=measurements))
    assert found.module_us == (0.0, 0.0)


def test_a_calibration_that_was_cut_off_keeps_what_it_has_and_names_the_rest() -> None:
    found, base = cut_off(), run()[0].cluster
    assert found.profile.not_measured == ("collectives", "model", "updates")
    assert found.profile.fp32_tflops == 0.2
    assert found.profile.collectives, "half a part is kept"
    assert (found.profile.pass_factors, found.profile.measured_updates) == (base.pass_factors, ())
    assert any("not measured: collectives, model, updates" in warning for warning in found.warnings)


def test_nothing_measured_is_the_base_profile() -> None:
    base = run()[0].cluster
    found = profile(replace(RECORD, measurements=(), done=(), facts=None))
    assert found == replace(
        base,
        name="here",
        measured_on={"processor": "A", "cores": 2, "base": "cpu", "not_measured": " ".join(ALL)},
        cores=cores(),
        nodes=None,
    )


def test_rows_of_the_base_stay_if_it_was_measured_here() -> None:
    config, layout = run()
    here: dict[str, str | int | float] = {
        "processor": processor_name(),
        "cores": cores(),
        "torch": torch_version(),
    }
    row = ("soap", 64, 64, 1e-3)
    theirs = {**here, "processor": "another"}
    for measured_on, kept in ((here, True), (theirs, False), (dict[str, str | int | float](), False)):
        base = replace(config.cluster, measured_updates=(row,), measured_on=measured_on)
        found = profile_of(replace(config, cluster=base), layout, RECORD, name="new", facts={})
        assert (row in found.measured_updates) == kept, measured_on
        assert len(found.measured_updates) == 2 + kept


def test_spread_and_load_are_warned_of() -> None:
    quiet = replace(calibration(), load=0.0)
    assert quiet.warnings == ("spread above 20%: adamw_ns 50%",)
    assert "other programs are running" in replace(quiet, load=cores() + 1.0).warnings[0]


def test_ranks_write_lines_that_the_launcher_reads(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    pen, silent = Recorder(files, writes=True), Recorder(files, writes=False)
    silent.add(number("launch_us", 7.0))
    assert RECORD.facts is not None
    pen.report(replace(RECORD, measurements=(), done=()))
    for measurement in MEASUREMENTS:
        pen.add(measurement)
    for part in ALL:
        pen.report(Record(done=(part,)))
    pen.report(Record(skipped=("soap of 9 x 9: too long",)))
    with (tmp_path / "measured.jsonl").open("a") as file:
        file.write('{"measurements": [{"quantity": "launch')  # the rank was killed here
    assert read_record(files) == replace(RECORD, skipped=("soap of 9 x 9: too long",))


def test_one_rank_has_no_collectives() -> None:
    assert tuple(parts(2)) == ALL
    assert tuple(parts(1)) == tuple(part for part in ALL if part != "collectives")


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["recipe=tiny", "gpus=1"], "gpus=4"),
        (["recipe=tiny", "gpus=9"], "gpus=8"),
        (["recipe=32b", "gpus=64"], "gpus=8"),
    ],
)
def test_too_few_and_too_many_ranks_are_refused(overrides: list[str], fix: str) -> None:
    [problem] = refused(lambda: prepare_run(compose_run(overrides, training=False).config))
    assert problem.key == "gpus"
    assert fix in problem.fix


def test_a_gpus_peak_is_its_datasheets_and_its_messages_are_large() -> None:
    base = compose_run(["recipe=tiny", "cluster=h100-80g"]).config.cluster
    found = profile(RECORD, "cluster=h100-80g")
    assert (found.bf16_tflops, found.cores) == (base.bf16_tflops, base.cores)
    assert found.matmul_tflops == profile().matmul_tflops != base.matmul_tflops
    assert profile().bf16_tflops == 0.9, "a processor's is the best that was measured"
    assert FULL.for_device("cpu") == FULL
    assert max(FULL.for_device("cuda").sizes) == 1 << 30


def test_one_gpu_is_enough() -> None:
    config, layout = prepare_run(compose_run(["recipe=8b", "gpus=1"], training=False).config)
    assert (layout.world_size, config.parallel.tp) == (1, 1)
