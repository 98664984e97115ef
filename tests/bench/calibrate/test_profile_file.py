"""A calibrated profile as a file: it composes to the very profile, and says how far its numbers can be trusted."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench.calibrate.calibrate import check_writable, default_path, profile_text, write_profile
from canzona_cli.config.compose import compose_run
from canzona_cli.core.errors import CanzonaError, ConfigError, EnvironmentProblem
from canzona_cli.core.setup import ClusterConfig
from tests.bench.calibrate.calibrations import RECORD, calibration, cut_off, written


def composed(path: Path) -> ClusterConfig:
    return compose_run(["recipe=tiny", f"cluster={path}"]).config.cluster


def test_the_file_composes_to_the_profile(tmp_path: Path) -> None:
    found = calibration()
    write_profile(tmp_path / "here.yaml", found)
    assert composed(tmp_path / "here.yaml") == found.profile
    assert composed(tmp_path / "here.yaml").measured_on == found.profile.measured_on


def test_numbers_that_yaml_would_read_as_text_stay_numbers(tmp_path: Path) -> None:
    tiny = replace(calibration().profile, launch_us=1e-7, measured_updates=(("soap", 1, 1, 1e-9),))
    found = replace(calibration(), profile=tiny)
    assert composed(written(tmp_path / "here.yaml", profile_text(found))) == tiny


def test_a_row_of_a_table_is_a_line() -> None:
    lines = profile_text(calibration()).splitlines()
    assert "- [512, 0.9]" in lines
    assert "- [muon/standard/5, 256, 768, 0.0025]" in lines
    assert "adamw_ns: 3.5" in lines


def test_the_top_says_when_where_and_what_to_beware_of() -> None:
    top = "\n".join(line for line in profile_text(cut_off()).splitlines() if line.startswith("#"))
    for said in (
        "`canzona calibrate`",
        "61 s",
        "profile cpu",
        "INCOMPLETE",
        "not measured: collectives, model, updates",
    ):
        assert said in top
    skipped = replace(calibration(), record=replace(RECORD, skipped=("soap of 9 x 9: 99 s",)))
    assert "# Left to the cost model: soap of 9 x 9: 99 s" in profile_text(skipped).splitlines()


def test_what_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    there = written(tmp_path / "there.yaml", "name: mine\n")
    (tmp_path / "folder.yaml").mkdir()
    refused: list[tuple[Path, bool, type[CanzonaError], str]] = [
        (there, False, ConfigError, "--force"),
        (tmp_path / "folder.yaml", True, ConfigError, "give the path of a file in it"),
        (tmp_path / "profile.json", False, ConfigError, "profile.yaml"),
        (there / "below.yaml", False, EnvironmentProblem, "--out FILE.yaml"),
    ]
    for path, force, kind, fix in refused:
        with pytest.raises(kind) as caught:
            check_writable(path, force=force)
        assert fix in caught.value.problems[0].fix, path
    assert there.read_text() == "name: mine\n"
    check_writable(there, force=True)
    check_writable(tmp_path / "new" / "profile.yaml", force=False)
    assert sorted(os.listdir(tmp_path / "new")) == []


def test_the_default_name_is_the_bases() -> None:
    assert default_path("cpu") == default_path("cpu-calibrated") == Path("cpu-calibrated.yaml")
