"""The parts of a bench before anything starts: one layout for all strategies, and all mistakes at once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.bench import lineup
from canzona_cli.bench.lineup import Entrant, LineUp
from canzona_cli.bench.session import Session, prepare
from canzona_cli.core.costs.memory import GIB
from canzona_cli.core.errors import DoesNotFit
from canzona_cli.core.setup.execution import AnyStrategy, tp_mode_of
from tests.refusals import refused

TINY = ("recipe=tiny", "gpus=4", "parallel.tp=2")


def prepared(*overrides: str, strategies: tuple[AnyStrategy, ...] = ()) -> Session:
    return prepare([*TINY, *overrides], strategies=strategies, rounds=2, steps_per_turn=3)


def names(line_up: LineUp) -> list[str]:
    return [strategy.name for strategy in line_up.strategies]


def problems(*overrides: str, strategies: tuple[str, ...] = (), rounds: int = 2, steps: int = 2) -> str:
    """`key=value: reason` of each problem, by lines."""
    return "\n".join(
        f"{problem.key}={problem.value}: {problem.reason}"
        for problem in refused(
            prepare,
            overrides,
            strategies=strategies,
            rounds=rounds,
            steps_per_turn=steps,
        )
    )


def test_all_strategies_have_one_layout_batch_schedule_and_splitting() -> None:
    line_up = prepared().line_up
    assert names(line_up) == ["canzona", "paper", "asc", "layerwise", "sc", "adamw"]
    configs = [strategy.config for strategy in line_up.strategies]
    first = configs[0]
    for config in configs:
        assert (config.parallel, config.train, config.schedule, config.data) == (
            first.parallel,
            first.train,
            first.schedule,
            first.data,
        )
        assert config.engine.splitting == "qkv"
        assert config.optimizer.lr == first.optimizer.lr
    assert [config.optimizer.name for config in configs] == ["muon"] * 5 + ["adamw"]
    assert first.train.steps == 9  # a round to warm up and two measured, three steps each
    assert first.train.global_batch_size == line_up.layout.dp == 2
    assert first.schedule.decay_steps == 120  # the recipe's own rates
    assert [strategy.plan is not None for strategy in line_up.strategies] == [True, True, True, False, False, False]
    assert {strategy.arithmetic for strategy in line_up.strategies[:5]} == {line_up.reference.arithmetic}
    assert any("engine.splitting=qkv" in note for note in line_up.notes)


def test_what_the_user_sets_stays() -> None:
    session = prepared(
        "engine.splitting=fused", "train.global_batch_size=8", "train.micro_batch_size=2", strategies=("canzona", "sc")
    )
    line_up = session.line_up
    assert {strategy.config.engine.splitting for strategy in line_up.strategies} == {"fused"}
    assert (line_up.layout.global_batch_size, line_up.layout.micro_batch_size) == (8, 2)
    assert not any("splitting" in note or "batch" in note for note in line_up.notes)


def test_arithmetic_is_the_same_where_megatrons_own_takes_part_or_else_it_is_said() -> None:
    cases: list[tuple[str, tuple[AnyStrategy, ...], str]] = [
        ("auto", ("canzona", "sc"), "optimizer.form=auto in canzona's strategies, standard in Megatron's (sc)"),
        ("gram", ("canzona", "asc"), ""),
        ("standard", ("canzona", "layerwise"), ""),
    ]
    unasked = prepared(strategies=("canzona", "sc")).line_up
    assert {getattr(strategy.config.optimizer, "form", None) for strategy in unasked.strategies} == {"standard"}
    assert unasked.arithmetic.startswith(
        "the standard form in all strategies, because Megatron's code (sc) has no other"
    )
    for form, strategies, said in cases:
        line_up = prepared(f"optimizer.form={form}", strategies=strategies).line_up
        forms = {getattr(strategy.config.optimizer, "form", None) for strategy in line_up.strategies}
        assert forms == {form}
        assert line_up.arithmetic == said


def test_strategies_that_only_split_further_keep_their_splitting() -> None:
    assert prepared(strategies=("canzona", "asc")).config.engine.splitting == "split"


def test_explicitly_different_matrices_are_not_the_same_arithmetic() -> None:
    line_up = prepared("engine.splitting=split", strategies=("canzona", "sc")).line_up
    ours, theirs = line_up.strategies
    assert ours.arithmetic != theirs.arithmetic


def test_a_strategy_the_run_cannot_have_is_left_out_unless_it_was_named() -> None:
    line_up = prepared("optimizer=soap").line_up
    assert "layerwise" not in names(line_up)
    assert any(note.startswith("without layerwise: ") for note in line_up.notes)
    told = problems(*TINY, "optimizer=soap", strategies=("canzona", "layerwise"))
    assert told.startswith("--strategies=layerwise: ")


def test_mistakes_of_options_run_and_data_are_told_together(tmp_path: Path) -> None:
    told = problems("recipe=tiny", "gpus=3", "parallel.tp=2", strategies=("canzna", "sc"), rounds=0, steps=1)
    for expected in (
        "--strategies=canzna",
        "--rounds=0",
        "--steps-per-turn=1",
        "gpus=3",
    ):
        assert expected in told
    told = problems(*TINY, "data=prepared", f"data.path={tmp_path}/none", "optimizer=soap", strategies=("layerwise",))
    assert f"data.path={tmp_path}/none.bin: no such file" in told
    assert "--strategies=layerwise" in told


def test_a_mode_of_megatrons_muon_is_ignored_only_if_no_strategy_has_it() -> None:
    mode = "engine.muon_tp_mode=distributed"
    used, ignored = prepared(mode, strategies=("layerwise", "sc")), prepared(mode, strategies=("canzona", "asc"))
    assert [tp_mode_of(entrant.config.setup, 2) for entrant in used.line_up.strategies] == ["distributed"] * 2
    assert [[text for text in one.warnings if "muon_tp_mode" in text] != [] for one in (used, ignored)] == [False, True]


def test_adamw_alone_has_nothing_to_compare_and_a_bench_is_of_one_machine() -> None:
    assert "optimizer=adamw" in problems(*TINY, "optimizer=adamw")
    assert "need 2 machines" in problems("recipe=tiny", "gpus=16")


def fitting(
    entrants: Sequence[Entrant], available: int | None, notes: list[str], *, named: bool = False
) -> tuple[Entrant, ...]:
    return lineup._fitting_together(entrants, available, notes, named=named)


def sized(line_up: LineUp, place: int, state_gib: float, transient_gib: float = 0.25) -> Entrant:
    found = line_up.strategies[place]
    return replace(found, state_bytes=int(state_gib * GIB), transient_bytes=int(transient_gib * GIB))


def test_strategies_take_part_as_far_as_they_fit_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    line_up = prepared().line_up  # 3.25 GiB for each rank
    sizes = (1.0, 1.0, 1.5, 1.5, 1.0, 2.5)
    entrants = [sized(line_up, place, size) for place, size in enumerate(sizes)]
    notes: list[str] = []
    # 3 GiB that stay, and once what a step needs
    assert [member.name for member in fitting(entrants, None, notes)] == ["canzona", "paper", "sc"]
    assert notes[0] == (
        "without asc: does not fit in memory beside canzona, paper; for a bench of fewer: --strategies canzona,asc"
    )
    assert [note.partition(":")[0] for note in notes] == ["without asc", "without layerwise", "without adamw"]
    with pytest.raises(DoesNotFit, match="does not fit in memory beside canzona"):
        fitting([entrants[0], entrants[5]], None, [], named=True)
    monkeypatch.setattr(lineup, "_available_bytes", lambda _: 3 * GIB)
    assert names(prepared().line_up) == ["canzona"], "Python and torch alone are 0.75 GiB on each of the four ranks"
    with pytest.raises(DoesNotFit):
        prepared(strategies=("canzona", "sc"))
    assert [member.name for member in fitting(entrants[:2], 64 * GIB, [])] == ["canzona", "paper"]
