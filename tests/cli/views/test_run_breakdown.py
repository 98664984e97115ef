"""The breakdown adds up, shows absent phases as absent, fits the terminal, and refuses what is not a breakdown."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canzona_cli.cli.views.run import BreakdownView
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.setup import Device
from canzona_cli.records.breakdown import Breakdown, load_breakdown
from tests.cli.views.terminal import printed
from tests.refusals import refused

DATA = Path(__file__).parent


def shown(breakdown: Breakdown, width: int = 80, device: Device | None = "cpu") -> list[str]:
    text = printed(BreakdownView(breakdown=replace(breakdown, device=device)), width)
    return [line.rstrip() for line in text.splitlines()]


def row(lines: list[str], label: str) -> str:
    found = [line for line in lines if line.strip().startswith(label)]
    assert found, f"no row {label!r}"
    return found[0]


def fixture() -> Any:
    return json.loads((DATA / "breakdown.json").read_text())


def written(tmp_path: Path, content: object) -> Path:
    (tmp_path / "breakdown.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_width_without_cutting_a_number(width: int) -> None:
    lines = shown(load_breakdown(DATA), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_in_step_shares_add_up_to_the_step_and_totals_are_set_apart() -> None:
    lines = shown(load_breakdown(DATA))
    plain = [float(share) for line in lines if (share := _share(line, r"(?<!\()\b(\d+\.\d)%(?!\))"))]
    assert sum(plain[:-1]) == pytest.approx(100, abs=0.6), "rounded to a tenth each"
    assert plain[-1] == 100.0, "the step itself"
    assert [_share(line, r"\((\d+\.\d)%\)") for line in lines if "incl. hidden" in line] == ["16.3", "7.7"]
    assert any("the phases add up to 100%" in line for line in lines)


def _share(line: str, pattern: str) -> str | None:
    found = re.search(pattern, line)
    return found[1] if found else None


def test_phases_come_in_the_order_of_the_step() -> None:
    lines = shown(load_breakdown(DATA))
    labels = ["data", "forward", "backward", "pipeline wait", "gradient reduction, exposed", "norm + clip", "exchange",
              "matrix update", "AdamW update", "parameter gathering, exposed", "other", "step"]  # fmt: skip
    places = [lines.index(row(lines, label)) for label in labels]
    assert places == sorted(places)


def test_a_phase_the_strategy_lacks_is_absent_not_zero(tmp_path: Path) -> None:
    assert row(shown(load_breakdown(DATA)), "exchange").split() == ["exchange,", "exposed", "-", "-", "-", "-"]
    content = fixture()
    content["phases"]["matrix_update"] = None
    lines = shown(load_breakdown(written(tmp_path, content)))
    assert row(lines, "matrix update").split() == ["matrix", "update", "-", "-", "-", "-"]


def test_the_foot_tells_what_was_measured() -> None:
    text = "\n".join(shown(load_breakdown(DATA), 120))
    for part in (
        "muon (layerwise), 4 CPU ranks: TP 2 × DP 2",
        "402 ms; 298 steps measured, excluding 2 for warm-up",
        "5,093 tokens/s per rank, 20,373 in total",
        "0.224 TFLOP/s per rank, MFU n/a on CPU",
        "matrix update 1.09",
        "812 MiB on the fullest rank",
        "micro-batch 4 × accumulation 4 × DP 2, recompute none",
    ):
        assert part in text


def test_mfu_is_per_cent_of_the_peak(tmp_path: Path) -> None:
    content = {**fixture(), "mfu": 0.4213}
    assert "MFU 42.1%" in "\n".join(shown(load_breakdown(written(tmp_path, content)), device="cuda"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"version": 99}, "another version of canzona"), ({"phases": {"forward": 7}}, "phases.forward: ")],
)
def test_a_breakdown_of_another_version_or_form_is_refused(
    tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    (problem,) = refused(load_breakdown, written(tmp_path, {**fixture(), **change}))
    assert (problem.key, problem.value) == ("RUN_DIR", tmp_path)
    assert reason in problem.reason
    assert problem.fix


def test_a_missing_breakdown_says_when_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="written when training ends"):
        load_breakdown(tmp_path)


def test_utilisation_names_the_peak_it_is_a_share_of(tmp_path: Path) -> None:
    content = fixture() | {"mfu": 0.048, "peak_tflops_per_gpu": 1.2}
    text = " ".join(" ".join(shown(load_breakdown(written(tmp_path, content)))).split())
    assert "MFU 4.8% of the cluster profile's 1.2 TFLOP/s (bf16)" in text


def planned_run(tmp_path: Path, **changes: object) -> Path:
    """The fixture's run with a prediction: twice as long as measured, but for its matrix update, which is as long."""
    content = fixture()
    phases = content["phases"]
    prediction = {
        "version": 1,
        "strategy": "layerwise",
        "profile": "cpu",
        "calibrated": True,
        "cores": 2,
        "iteration_s": 0.8042,
        "optimizer_s": 0.2,
        "phases": {name: (1 if name == "matrix_update" else 2) * phase["mean_s"] for name, phase in phases.items()},
        "load_balance": 1.25,
        "memory_bytes": 100 * 2**20,
        "events": [],
    }
    (tmp_path / "predicted.json").write_text(json.dumps(prediction | changes))
    return written(tmp_path, content)


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_fits_beside_what_was_measured(tmp_path: Path, width: int) -> None:
    lines = shown(load_breakdown(planned_run(tmp_path)), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert row(lines, "phase").split()[-3:] == ["planned", "error", "share"] or width >= 110
    assert "194 +100%" in " ".join(row(lines, "forward").split()), "2 x 96.8 ms"
    assert " 0% " in row(lines, "matrix update")
    assert "804 +100%" in " ".join(row(lines, "step").split())


def test_the_foot_compares_balance_and_memory_and_says_why(tmp_path: Path) -> None:
    text = " ".join(" ".join(shown(load_breakdown(planned_run(tmp_path)))).split())
    assert "matrix update 1.09 (planned 1.25)" in text
    assert "Python and torch included; planned 100 MiB without them" in text
    assert "why backward took 187 ms, planned 375 ms" in text
    assert "calibrate" not in text


def test_no_errors_are_told_of_another_machines_profile(tmp_path: Path) -> None:
    """A processor's own is another machine's until it is measured; a GPU's is of its kind."""
    nobodys = load_breakdown(planned_run(tmp_path, calibrated=False))
    lines = shown(nobodys)
    assert row(lines, "phase").split()[-2:] == ["max", "share"]
    text = " ".join(" ".join(lines).split())
    assert "planned run `canzona calibrate` on this machine" in text
    assert "why" not in text
    assert text.count("planned") == 1
    assert "error" in " ".join(shown(replace(nobodys, device="cuda"), device="cuda"))
    other = planned_run(
        tmp_path, mismatches=["cluster profile cpu was measured on another machine (cores: 64, here 2)"]
    )
    lines = shown(load_breakdown(other))
    assert row(lines, "phase").split()[-2:] == ["planned", "share"]
    text = " ".join(" ".join(lines).split())
    assert "no errors are shown: cluster profile cpu was measured on another machine (cores: 64, here 2)" in text


def test_json_has_the_plan_its_errors_and_why(tmp_path: Path) -> None:
    content = json.loads(json.dumps(load_breakdown(planned_run(tmp_path)).as_json()))
    planned, why = content["planned"], content["why"]
    assert planned["error"]["forward"] == pytest.approx(1)
    assert planned["error"]["matrix_update"] == pytest.approx(0)
    assert planned["error"]["step"] == pytest.approx(1, abs=1e-3)
    assert "events" not in planned
    assert why["phase"] == "backward"
    older = load_breakdown(DATA).as_json()
    assert (older["planned"], older["why"]) == (None, None)


def test_phases_without_a_plan_or_without_a_time_have_no_error(tmp_path: Path) -> None:
    lines = shown(load_breakdown(planned_run(tmp_path, phases={"forward": 0.0, "exchange": 0.002})), 80)
    assert row(lines, "forward").split() == ["forward", "93.9", "96.8", "99.7", "-", "-", "24.1%"]
    assert row(lines, "exchange").split() == ["exchange", "-", "-", "-", "2.00", "-", "-"]
    assert row(lines, "backward").split()[4:6] == ["-", "-"]
