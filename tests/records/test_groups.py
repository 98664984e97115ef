"""Groups of runs: what makes one, its best learning rates, and which group is called better."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from canzona_cli.config.resolve import fill
from canzona_cli.config.schema import RunConfig
from canzona_cli.records.compare import load_runs
from canzona_cli.records.files import RunFiles
from canzona_cli.records.groups import ADAMW_LR, LR, SMOOTHED_STEPS, losses_of, rank
from tests.records.sweeps import TOKENS, add_run, add_sweep, configured, ending_at, ranked
from tests.sizes import layout

SWEEP = {
    ("muon", 0.01): {1: 2.5, 2: 2.6, 3: 2.55},
    ("muon", 0.02): {1: 2.0, 2: 2.2, 3: 2.1},
    ("muon", 0.05): {1: 2.4, 2: 2.3, 3: 2.5},
    ("adamw", 0.001): {1: 3.0, 2: 3.1, 3: 3.2},
    ("adamw", 0.003): {1: 3.3, 2: 3.4, 3: 3.5},
}


def on_gpus(config: RunConfig, gpus: int) -> RunConfig:
    """Returns a run with the layout that another number of ranks was given."""
    return fill(replace(config, gpus=gpus), layout(tp=1, dp=gpus, micro=4, count=16 // gpus))


VARIED: dict[str, tuple[tuple[RunConfig, ...], int, set[str]]] = {
    "optimizers, and all that follows from them": (
        (configured("muon"), configured("soap"), configured("adamw", lr=2e-3, seed=2)), 3, {"optimizer.name"}
    ),
    "a setting of one optimizer": (
        (configured("muon", momentum=0.9), configured("muon", momentum=0.95), configured("adamw")),
        3,
        {"optimizer.name", "optimizer.momentum"},
    ),
    "rates and seeds": ((configured(lr=1e-3), configured(lr=2e-3, seed=2), configured(adamw_lr=1e-4)), 1, set()),
    "a minimum that was typed": (
        (configured(min_lr_ratio=0.0), configured(), configured(seed=2)), 2, {"optimizer.min_lr_ratio"}
    ),
    "ranks, and the layout that follows from them": (
        (on_gpus(configured(), 2), on_gpus(configured(), 4), on_gpus(configured(seed=2), 4)), 2, {"gpus"}
    ),
    "steps, and the schedule that follows from them": (
        tuple(
            on_gpus(replace(run, train=replace(run.train, steps=steps)), 2)
            for run, steps in ((configured(), 100), (configured(), 200), (configured(seed=2), 200))
        ),
        2,
        {"train.steps"},
    ),
    "a batch that was typed": (
        tuple(
            replace(run, train=replace(run.train, global_batch_size=batch))
            for run, batch in ((configured(), 16), (configured(), 32), (configured(seed=2), 32))
        ),
        2,
        {"train.global_batch_size"},
    ),
    "places, checkpoints and measurements of the machine": (
        (
            configured(),
            replace(configured(seed=2), checkpoint=replace(configured().checkpoint, keep=9), name="other"),
            replace(configured(seed=3), cluster=replace(configured().cluster, memory_gb_per_s=123.0)),
        ),
        1,
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIED)
def test_groups_are_made_by_what_was_varied_by_hand(tmp_path: Path, case: str) -> None:
    configs, groups, keys = VARIED[case]
    for index, config in enumerate(configs):
        add_run(tmp_path / str(index), config, ending_at(3.0))
    ranking = ranked(tmp_path)
    assert len(ranking.groups) == groups
    assert {key for group in ranking.groups for key in group.settings} == keys


def test_each_group_has_its_best_rate_and_its_loss_over_seeds(tmp_path: Path) -> None:
    ranking = ranked(add_sweep(tmp_path, SWEEP))
    muon, adamw = ranking.lines
    assert muon.settings == {"optimizer.name": "muon"}
    assert muon.best is not None
    assert (muon.best.rates, muon.tried(LR), muon.edges) == ({LR: 0.02}, [0.01, 0.02, 0.05], {})
    assert muon.best.loss.mean == pytest.approx(numpy.mean([2.0, 2.2, 2.1]))
    assert muon.best.loss.spread == pytest.approx(numpy.std([2.0, 2.2, 2.1], ddof=1))
    assert adamw.edges == {LR: "lowest"}
    assert (ranking.by, ranking.step, ranking.left_out) == ("validation", 120, [])


def test_rates_are_compared_on_the_seeds_that_all_of_them_have(tmp_path: Path) -> None:
    """Seed 2 is harder, and only one rate was tried with it: by its mean, that rate would look worse."""
    ranking = ranked(
        add_sweep(tmp_path, {("muon", 0.01): {1: 2.0, 2: 9.0}, ("muon", 0.02): {1: 2.1}, ("soap", 0.01): {1: 3.0}})
    )
    muon = ranking.lines[-1]
    assert muon.best is not None
    assert (muon.best.rates, muon.common_seeds, muon.unequal_seeds) == ({LR: 0.01}, {1}, True)
    assert muon.best.loss.mean == 5.5, "the loss that is shown is that of all its seeds"
    assert not ranking.lines[0].unequal_seeds


def test_a_rate_whose_runs_are_behind_does_not_make_the_best_one_safe(tmp_path: Path) -> None:
    add_sweep(tmp_path, {("muon", 0.01): {1: 2.0}, ("muon", 0.02): {1: 2.1}, ("soap", 0.01): {1: 3.0}})
    add_run(tmp_path / "behind", configured(lr=0.005), {0: 6.0, 40: 3.0}, status="preempted")
    muon = ranked(tmp_path).lines[0]
    assert (muon.tried(LR), muon.edges) == ([0.005, 0.01, 0.02], {LR: "lowest"})


def test_rates_without_a_common_seed_are_compared_by_their_means(tmp_path: Path) -> None:
    ranking = ranked(
        add_sweep(tmp_path, {("muon", 0.01): {1: 2.0}, ("muon", 0.02): {2: 1.9}, ("soap", 0.01): {1: 3.0}})
    )
    muon = ranking.lines[0]
    assert muon.best is not None
    assert (muon.best.rates, muon.common_seeds) == ({LR: 0.02}, set())


def test_the_target_is_reached_where_the_mean_curve_has_it(tmp_path: Path) -> None:
    """Compared with the interpolation of numpy, on the inverse of the falling curve."""
    ranking = ranked(add_sweep(tmp_path, SWEEP))
    muon, adamw = ranking.lines
    assert ranking.target == pytest.approx(3.1)
    curve = {step: loss + 0.1 for step, loss in ending_at(2.0).items()}
    expected = numpy.interp(3.1, [*curve.values()][::-1], [*curve][::-1])
    assert 0 < expected < 40
    assert ranking.reached(muon) == pytest.approx(expected)
    assert muon.tokens_at(120) == 120 * TOKENS
    assert ranking.reached(adamw) == pytest.approx(120), "the worst group reaches its own loss at the common step"


def test_the_tokens_to_the_target_are_those_of_a_ramp_up(tmp_path: Path) -> None:
    """Compared with numpy's interpolation of the tokens that the steps of a small and then a large batch have read."""
    tokens = {step: TOKENS * (step if step <= 40 else 40 + 4 * (step - 40)) for step in range(1, 121)}
    for name, loss in (("muon", 2.0), ("adamw", 2.4)):
        training = dict.fromkeys(tokens, loss)
        add_run(tmp_path / name, configured(name), ending_at(loss), training=training, tokens=tokens.__getitem__)
    muon = ranked(tmp_path).lines[0]
    reached = ranked(tmp_path).reached(muon)
    assert reached is not None
    assert 40 < reached < 80
    assert muon.tokens_at(reached) == pytest.approx(numpy.interp(reached, [*tokens], [*tokens.values()]))
    assert [muon.tokens_at(step) for step in (0, 40, 120, 121)] == [0, 40 * TOKENS, 360 * TOKENS, None]


def test_runs_that_failed_were_tried_but_are_in_no_mean(tmp_path: Path) -> None:
    """The lowest loss is that of a run that diverged; its rate is an edge that was tried."""
    add_sweep(tmp_path, {("muon", 0.01): {1: 2.5}, ("muon", 0.02): {1: 2.4}, ("adamw", 0.001): {1: 3.0}})
    failed = add_run(tmp_path / "diverged", configured(lr=0.05), ending_at(1.0), status="diverged")
    behind = add_run(tmp_path / "behind", configured(lr=0.01, seed=2), {0: 6.0, 40: 1.0}, status=None)
    ranking = ranked(tmp_path)
    assert {run.run_dir for run in ranking.left_out} == {failed, behind}
    muon = ranking.lines[0]
    assert muon.best is not None
    assert (muon.best.rates[LR], muon.best.loss.mean, muon.edges) == (0.02, 2.4, {})
    assert muon.tried(LR) == [0.01, 0.02, 0.05]
    assert ranking.step == 120, "a run that is behind does not hold its group back"


def test_losses_are_compared_at_the_last_step_that_all_groups_reached(tmp_path: Path) -> None:
    add_run(tmp_path / "a", configured("muon"), ending_at(2.0))
    add_run(tmp_path / "b", configured("adamw"), {0: 7.0, 40: 2.5, 80: 2.1}, status=None)
    add_run(tmp_path / "c", configured("soap"), {0: 7.0}, status=None, training={1: 7.0})
    ranking = ranked(tmp_path)
    assert ranking.step == 80, "a group without any validation has no say"
    assert [line.settings["optimizer.name"] for line in ranking.lines] == ["adamw", "muon", "soap"]
    assert ranking.lines[-1].best is None


def test_the_others_have_to_reach_the_loss_of_adamw_if_it_is_one_of_them(tmp_path: Path) -> None:
    losses = {("muon", 0.01): {1: 2.0}, ("adamw", 0.01): {1: 2.5}, ("soap", 0.01): {1: 3.0}}
    ranking = ranked(add_sweep(tmp_path / "with", losses))
    assert ranking.target == 2.5
    assert [ranking.reached(line) is None for line in ranking.lines] == [False, False, True]
    del losses["adamw", 0.01]
    assert ranked(add_sweep(tmp_path / "without", losses)).target == 3.0


def test_the_time_of_a_step_is_the_mean_over_runs_that_did_not_fail(tmp_path: Path) -> None:
    for seed, step_s in enumerate((1.0, 2.0)):
        add_run(tmp_path / str(seed), configured(seed=seed), ending_at(2.0), step_s=step_s)
    add_run(tmp_path / "failed", configured(seed=2), ending_at(2.0), status="failed", step_s=9.0)
    (line,) = ranked(tmp_path).lines
    assert line.step_s is not None
    assert line.step_s.mean == 1.5
    assert line.step_s.spread == pytest.approx(numpy.std([1, 2], ddof=1))


def test_the_time_to_the_target_is_that_of_its_steps(tmp_path: Path) -> None:
    """Compared with numpy's interpolation of the summed seconds of the steps of a small and then a large batch."""
    for seed, faster in ((1, 1), (2, 3)):
        seconds = {step: (1.0 if step <= 60 else 4.0) / faster for step in range(1, 121)}
        for name, loss in (("muon", 2.0), ("adamw", 2.4)):
            training = dict.fromkeys(seconds, loss)
            config = configured(name, seed=seed)
            add_run(
                tmp_path / f"{name}-{seed}", config, ending_at(loss), training=training, seconds=seconds.__getitem__
            )
    muon = ranked(tmp_path).lines[0]
    reached = ranked(tmp_path).reached(muon)
    assert reached is not None
    assert 60 < reached < 80
    ends = numpy.cumsum([1.0] * 60 + [4.0] * 60) * (1 + 1 / 3) / 2
    assert muon.seconds_at(reached) == pytest.approx(numpy.interp(reached, range(1, 121), ends))
    assert [muon.seconds_at(step) for step in (0, 121)] == [0, None]


@pytest.mark.parametrize(("t", "higher"), [(4.303 * 1.001, True), (4.303 * 0.999, False), (-9.0, False)])
def test_higher_needs_a_paired_difference_above_the_published_quantile(tmp_path: Path, t: float, higher: bool) -> None:
    """4.303 is Student's two-sided 5% quantile for two degrees of freedom. Seeds differ by far more than the groups:
    only their pairs can tell. With a negative t, the second group is better on the seeds that both have."""
    seeds = {1: 2.0, 2: 3.0, 3: 4.0}
    gaps = [t / 3**0.5 * 0.01 + each for each in (-0.01, 0.0, 0.01)]
    muon = seeds if t > 0 else seeds | {4: 0.5}
    adamw = {seed: loss + gap for (seed, loss), gap in zip(seeds.items(), gaps, strict=True)}
    (verdict,) = ranked(add_sweep(tmp_path, {("muon", 0.01): muon, ("adamw", 0.01): adamw})).verdict
    assert (verdict.seeds, verdict.higher) == (3, higher)
    assert verdict.gap == pytest.approx(statistics.fmean(gaps))


def test_more_groups_need_larger_differences(tmp_path: Path) -> None:
    """The difference of the case above that was just significant is not, beside two others: the smallest probability
    counts threefold, as in Holm's paper."""
    seeds = {1: 2.0, 2: 3.0, 3: 4.0}
    losses = {("muon", 0.01): seeds}
    for place, (name, t) in enumerate((("adamw", 4.4), ("soap", 20.0), ("shampoo", 1.0)), 1):
        gaps = [place + (each / t) * 3**0.5 * place for each in (-1, 0, 1)]
        losses[name, 0.01] = {seed: loss + gap for (seed, loss), gap in zip(seeds.items(), gaps, strict=True)}
    ranking = ranked(add_sweep(tmp_path, losses))
    assert [line.settings["optimizer.name"] for line in ranking.lines] == ["muon", "adamw", "soap", "shampoo"]
    adamw, soap, shampoo = ranking.verdict
    assert adamw.p == pytest.approx(2 * 0.0480, abs=2e-4), "Student's two-sided p of 4.4 with two degrees, twice"
    assert soap.p == pytest.approx(3 * 0.00249, abs=2e-5)
    assert shampoo.p == pytest.approx(0.4226, abs=1e-4)
    assert [each.higher for each in ranking.verdict] == [False, True, False]


def test_two_shared_seeds_make_no_verdict(tmp_path: Path) -> None:
    losses = {("muon", 0.01): {1: 1.0, 2: 1.0, 3: 1.0}, ("adamw", 0.01): {2: 3.0, 3: 3.0, 4: 3.0}}
    (verdict,) = ranked(add_sweep(tmp_path, losses)).verdict
    assert (verdict.seeds, verdict.higher, verdict.gap) == (2, None, 2.0)


def test_if_only_rates_were_varied_they_are_ranked(tmp_path: Path) -> None:
    ranking = ranked(add_sweep(tmp_path, {key: losses for key, losses in SWEEP.items() if key[0] == "muon"}))
    assert [line.settings for line in ranking.lines] == [{LR: 0.02}, {LR: 0.05}, {LR: 0.01}]
    assert [each.seeds for each in ranking.verdict] == [3, 3]


def test_rates_alone_are_compared_at_the_last_step_that_all_of_them_reached(tmp_path: Path) -> None:
    add_run(tmp_path / "a", configured(lr=0.01), ending_at(2.0))
    add_run(tmp_path / "b", configured(lr=0.02), {0: 7.0, 40: 2.5, 80: 2.1}, status=None)
    ranking = ranked(tmp_path)
    assert (ranking.step, ranking.left_out) == (80, [])
    assert [line.settings for line in ranking.lines] == [{LR: 0.02}, {LR: 0.01}]


def test_both_rates_are_one_choice(tmp_path: Path) -> None:
    """The best pair is not made of the two rates that are best on average."""
    losses = {(0.01, 0.001): 3.0, (0.01, 0.003): 2.0, (0.02, 0.001): 2.1, (0.02, 0.003): 4.0}
    for (lr, adamw_lr), loss in losses.items():
        add_run(tmp_path / f"{lr}-{adamw_lr}", configured(lr=lr, adamw_lr=adamw_lr), ending_at(loss))
    add_run(tmp_path / "adamw", configured("adamw", lr=0.002), ending_at(3.5))
    ranking = ranked(tmp_path)
    assert ranking.rates == (LR, ADAMW_LR)
    assert ranking.lines[0].best is not None
    assert ranking.lines[0].best.rates == {LR: 0.01, ADAMW_LR: 0.003}
    assert ranking.lines[0].edges == {LR: "lowest", ADAMW_LR: "highest"}


def _multiple(lr: float) -> float:
    return lr / 5


@pytest.mark.parametrize("adamw_lr", [lambda lr: 0.001, _multiple, lambda lr: None])
def test_a_rate_that_follows_from_the_other_or_never_changes_is_not_shown(
    tmp_path: Path, adamw_lr: Callable[[float], float | None]
) -> None:
    for lr in (0.01, 0.02, 0.05):
        add_run(tmp_path / str(lr), configured(lr=lr, adamw_lr=adamw_lr(lr)), ending_at(3.0 + lr))
    assert ranked(tmp_path).rates == (LR,)


def test_a_rate_that_differs_between_groups_alone_is_shown(tmp_path: Path) -> None:
    for optimizer, adamw_lr in (("muon", 0.001), ("soap", 0.002), ("adamw", None)):
        add_run(tmp_path / optimizer, configured(optimizer, lr=0.01, adamw_lr=adamw_lr), ending_at(3.0))
    ranking = ranked(tmp_path)
    assert ranking.rates == (ADAMW_LR,)
    assert {line.tried(ADAMW_LR)[0] for line in ranking.lines} == {0.001, 0.002, 0.01}


def test_without_validations_training_losses_are_averaged_over_their_last_steps(tmp_path: Path) -> None:
    losses = {step: 6 - 0.2 * step + (-1) ** step for step in range(1, 26)}
    for name, more in (("muon", 0.0), ("adamw", 0.5)):
        training = {step: loss + more for step, loss in losses.items()}
        add_run(tmp_path / name, configured(name), {}, training=training)
    ranking = ranked(tmp_path)
    assert (ranking.by, ranking.step) == ("training", 25)
    curve = losses_of(ranking.lines[0].runs[0], "training")
    for step in (1, 5, SMOOTHED_STEPS, 25):
        assert curve[step] == pytest.approx(numpy.mean([*losses.values()][max(0, step - SMOOTHED_STEPS) : step]))


def test_runs_whose_settings_cannot_be_read_are_groups_of_their_own(tmp_path: Path) -> None:
    root = add_sweep(tmp_path / "sweep", {("muon", 0.01): {1: 2.0, 2: 2.1}, ("adamw", 0.01): {1: 3.0}})
    RunFiles(next(root.iterdir())).config.write_text("unknown: 1\n")
    assert len(ranked(root).lines) == 3


def test_runs_of_another_version_are_compared_with_the_settings_that_it_had(tmp_path: Path) -> None:
    """Runs that differ in such a setting are not taken for two seeds of one group."""
    root = add_sweep(tmp_path / "sweep", {("muon", 0.01): {1: 2.0, 2: 2.1, 3: 2.2}, ("adamw", 0.01): {1: 3.0}})
    for run in root.iterdir():
        config = RunFiles(run).config
        config.write_text(config.read_text().replace("  min_lr_ratio: 0.1\n", "  min_lr: 0.001\n"))
    ranking = ranked(root)
    assert [line.settings for line in ranking.lines] == [{"optimizer.name": "muon"}, {"optimizer.name": "adamw"}]
    assert "this version has no setting optimizer.min_lr; settings that it lacks" in ranking.comparison.runs[0].notes[0]
    config.write_text(config.read_text().replace("min_lr: 0.001", "min_lr: 0.003"))
    assert len(ranked(root).groups) == 3


def test_what_is_no_run_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    root = add_sweep(tmp_path / "sweep", {("muon", 0.01): {1: 2.0, 2: 2.1}})
    (root / "losses.html").touch()
    (root / "notes").mkdir()
    alone = add_run(tmp_path / "alone", configured("adamw"), ending_at(3.0))
    loaded = load_runs([root, alone])
    assert [run.run_dir for run in loaded.runs] == [*sorted(root.glob("optimizer*")), alone]
    assert loaded.skipped == ()


def test_the_json_has_the_groups_and_every_run(tmp_path: Path) -> None:
    ranking = ranked(add_sweep(tmp_path, SWEEP))
    content = json.loads(json.dumps(ranking.as_json()))
    assert (content["by"], content["step"], content["reference"]) == ("validation", 120, {"optimizer.name": "adamw"})
    muon, adamw = content["groups"]
    assert (muon["above_best"], adamw["above_best"]["higher"]) == (None, True)
    assert (muon["best_rates"], muon["rates_tried"]) == ({LR: 0.02}, {LR: [0.01, 0.02, 0.05]})
    assert muon["loss"]["by_seed"] == {"1": 2.0, "2": 2.2, "3": 2.1}
    assert muon["reached"]["tokens"] == pytest.approx(muon["reached"]["step"] * TOKENS)
    assert len(content["runs"]) == 15
    assert sum(len(group["runs"]) for group in content["groups"]) == 15
    assert content["runs"][0]["settings"].keys() >= {LR, "optimizer.name", "train.seed"}
    assert rank(ranking.comparison).as_json() == ranking.as_json()
