"""The screens of plans: bars and tables keep their widths and show what they claim."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.cli.views import layouts
from canzona_cli.cli.views.charts import legend_lines, stacked_bar
from canzona_cli.cli.views.header import describe_optimizer
from canzona_cli.cli.views.plan import PlanView
from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.core.phases import Ink
from canzona_cli.core.planner import make
from canzona_cli.core.planner.attempt import Attempt
from canzona_cli.core.setup import CustomConfig
from canzona_cli.core.simulate.compare import study_run
from canzona_cli.core.simulate.update_phase import UpdatePhase
from tests import sizes
from tests.cli.views.terminal import printed

INKS = {
    name: Ink(letter=name.upper(), style=style, colour="#000000", css=name, name=name)
    for name, style in (("a", "red"), ("b", "blue"), ("c", "green"))
}


@pytest.mark.parametrize("width", [1, 10, 77])
@pytest.mark.parametrize("colour", [True, False])
def test_a_whole_bar_fills_its_width(width: int, colour: bool) -> None:
    parts = [("a", 0.2), ("b", 0.5), ("c", 0.3)]
    assert len(stacked_bar(parts, 1.0, width, INKS, colour=colour).plain) == width


def test_parts_are_drawn_in_proportion_and_in_order() -> None:
    assert stacked_bar([("a", 1.0), ("b", 2.0), ("c", 0.001)], 4.0, 8, INKS, colour=False).plain == "AABBBB"


def test_a_legend_breaks_between_its_parts_only() -> None:
    lines = [
        line.plain for line in legend_lines([("a", "one two"), ("b", "three"), ("c", "four")], INKS, 22, colour=False)
    ]
    assert lines == ["  A one two  B three", "  C four"]


def test_the_report_of_a_study_fits_its_terminal() -> None:
    config = sizes.run("tiny", 8, strategy="canzona", tp=2)
    config, layout = resolve(replace(config, cluster=replace(config.cluster, gpus_per_node=4)))
    study = study_run(config.setup, layout)
    for verbose in (False, True):
        view = PlanView(config=config, study=study, verbose=verbose)
        for width in (80, 120):
            text = printed(view, width)
            assert all(len(line) <= width and line == line.rstrip() for line in text.splitlines())
            assert study.plan.name in text
            assert study.plan.name in printed(view, width, terminal=True)


@pytest.mark.parametrize(("size", "doubted"), [("tiny", True), ("0.6b", False)])
def test_times_on_a_cpu_that_nobody_measured_are_called_so(size: str, doubted: bool) -> None:
    config, layout = resolve(compose_run([f"recipe=qwen3-{size}", "gpus=2", "parallel.tp=2"]).config)
    study = study_run(config.setup, layout)
    assert ("on an uncalibrated CPU" in printed(PlanView(config=config, study=study))) == doubted


def test_strategies_that_do_not_fit_are_named_and_with_v_shown_as_if_they_did() -> None:
    """So are the paper's strategies, which nobody runs."""
    config, layout = resolve(compose_run(["recipe=qwen3-8b", "gpus=16"]).config)
    study = study_run(config.setup, layout)
    brief, verbose = (printed(PlanView(config=config, study=study, verbose=verbose)) for verbose in (False, True))
    rows = {"adamw ", "canzona ", "paper ", "asc ", "layerwise ", "sc "}
    shown = [{row for row in rows for line in text.splitlines() if line.startswith(row)} for text in (brief, verbose)]
    assert shown == [rows - {"paper ", "asc ", "sc "}, rows]
    assert "too large for 76.6 GiB: sc (see -v)" in " ".join(brief.split())
    assert [line for line in verbose.splitlines() if line.startswith("sc ") and "!" in line]
    assert "!: does not fit in 76.6 GiB, simulated as if it did" in " ".join(verbose.split())


def test_layerwise_with_an_optimizer_that_megatron_does_not_have_is_said() -> None:
    shown = []
    for optimizer in ("muon", "soap"):
        config, layout = resolve(compose_run(["recipe=tiny", "gpus=4", f"optimizer={optimizer}"]).config)
        shown.append(printed(PlanView(config=config, study=study_run(config.setup, layout))))
    assert ["Megatron has it only for muon; simulated with soap" in text for text in shown] == [False, True]


def test_a_users_own_optimizer_is_called_custom_with_whose_price_it_has() -> None:
    own = CustomConfig(name="custom", lr=1e-3, source="own.py:Own", cost_like="soap")
    config, layout = resolve(replace(sizes.run("tiny", 4, strategy="canzona", tp=2), optimizer=own))
    study = study_run(config.setup, layout)
    assert "custom (cost model of soap)" in printed(PlanView(config=config, study=study), 120).splitlines()[0]
    assert study.as_json()["optimizer"] == "custom"
    assert describe_optimizer(config).startswith("custom own.py:Own (canzona)")


def test_the_header_has_a_rate_of_adamw_that_is_not_that_of_matrices() -> None:
    config = compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr=0.001"]).config
    assert describe_optimizer(config) == "muon (canzona), lr 0.005, AdamW 0.001, cosine, bf16"
    same = compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr=0.005"]).config
    assert describe_optimizer(same) == "muon (canzona), lr 0.005 cosine, bf16"


def test_the_overview_plans_a_size_once_and_simulates_three_strategies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first command that users try. A layout that nearly ties may need a second plan."""
    monkeypatch.setenv("CANZONA_CACHE", str(tmp_path))
    for cached in (make._make_plan, make._unbounded):
        cached.cache_clear()
    monkeypatch.setattr(layouts, "SIZES", ("qwen3-8b", "qwen3-32b"))
    monkeypatch.setattr(layouts, "SIZES_WITH_EXPERTS", ())
    counts = Counter[str]()

    def counted(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: object, **named: object) -> object:
            counts[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(Attempt, "plan")
    counted(UpdatePhase, "run")
    overview = layouts.overview([], [])
    studied = [{name.partition("/")[0] for name in plan.study.strategies} for plan in overview.plans if plan.study]
    assert studied == [{"adamw", "layerwise", "canzona"}] * 2
    assert counts["plan"] <= 4
    # canzona, AdamW and the three modes of layerwise, besides the simulations of the search.
    assert counts["run"] <= counts["plan"] + 5 * 2
