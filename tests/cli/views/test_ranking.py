"""What a sweep ends in: the best optimizer, its rate and what is not known, on one screen and one page."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.cli.views.ranking import RankingView, comparison_page
from canzona_cli.records.files import RunFiles
from tests.cli.views.html_page import Page, read_page
from tests.cli.views.terminal import printed
from tests.records.sweeps import add_run, add_sweep, configured, ending_at, ranked

OPTIMIZERS = {"muon": 2.0, "normuon": 2.1, "soap": 2.3, "shampoo": 2.5, "adamw": 3.0}
SWEEP = {
    (optimizer, lr): {seed: loss + 10 * abs(lr - 0.003) + 0.001 * seed for seed in (1, 2, 3)}
    for optimizer, loss in OPTIMIZERS.items()
    for lr in (0.001, 0.003, 0.01)
}


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 runs, of which one diverged and one is not done."""
    root = add_sweep(tmp_path_factory.mktemp("sweep"), SWEEP)
    add_run(root / "too-high", configured("adamw", lr=0.1), ending_at(9.0), status="diverged")
    add_run(root / "not-done", configured("soap", lr=0.003, seed=4), {0: 7.0, 40: 3.0}, status=None)
    return root


@pytest.mark.parametrize("width", [80, 120])
def test_a_sweep_of_five_optimizers_is_read_off_one_screen(sweep: Path, width: int) -> None:
    text = printed(RankingView(ranking=ranked(sweep)), width)
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if line.split() and line.split()[0] in OPTIMIZERS and ".." in line]
    assert [row[0] for row in rows] == [*OPTIMIZERS]
    assert rows[0][:5] == ["muon", "2.0020", "0.0010", "0.003", "0.001..0.01"]
    assert rows[1][3:5] == ["0.1000", "0"], "above the best, with its p"
    assert "spread: standard deviation over 3 seeds" in words(text)
    assert "0.001..0.1" in rows[4], "the rate that diverged was tried"
    assert "muon is better than normuon (by 0.1000, p = 0), soap (by 0.3000, p = 0), shampoo (by" in words(text)
    assert "p: paired t-test over 3 shared seeds with muon, adjusted for 4 comparisons (Holm)" in words(text)
    assert "until 3.0020: when the mean curve reaches the loss of adamw" in words(text)
    assert "2 runs in no mean: not-done (running or stopped, step 40), too-high (diverged, step 120)" in words(text)
    assert "null" not in text
    assert "None" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_long_times_and_two_rates_leave_a_line_to_each_of_five_optimizers(tmp_path: Path, width: int) -> None:
    """Nothing of it is lost at 80 columns: the rates that were tried are then below the table."""
    for place, optimizer in enumerate(OPTIMIZERS):
        for lr in (0.0005, 0.002):
            for seed in (1, 2):
                config = configured(optimizer, lr=lr, adamw_lr=0.00025 * (seed + place), seed=seed)
                config = replace(config, train=replace(config.train, seed=1))
                add_run(tmp_path / f"{optimizer}-{lr}-{seed}", config, ending_at(2 + place + lr), step_s=123.4)
    lines = printed(RankingView(ranking=ranked(tmp_path)), width).splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if line.split()[:1] and line.split()[0] in OPTIMIZERS and "123.40" in line]
    assert [row[0] for row in rows] == [*OPTIMIZERS]
    for row in rows:
        assert {"0.0005!", "123.40"} <= {*row}
        assert row[-1] in ("k", "0"), "the tokens to the target are the last"
    text = words("\n".join(lines))
    assert ("adamw_lr tried: 0.00025..0.0005 by muon; 0.0005..0.00075 by normuon;" in text) is (width == 80)
    assert text.count("0.0005..0.002") == (1 if width == 80 else 5)


def test_every_run_has_a_line_if_asked(sweep: Path) -> None:
    text = printed(RankingView(ranking=ranked(sweep), verbose=True), 120)
    for name in ("optimizer=muon_lr=0.003_seed=1", "too-high", "not-done"):
        (line,) = (line.split() for line in text.splitlines() if line.startswith(f"{name} "))
        assert line[1] in OPTIMIZERS


def test_at_80_columns_the_runs_are_one_table(tmp_path: Path) -> None:
    ranking = ranked(add_sweep(tmp_path, {key: losses for key, losses in SWEEP.items() if key[0] == "normuon"}))
    for width, shown in ((80, False), (120, True)):
        text = printed(RankingView(ranking=ranking, verbose=True), width)
        assert text.count("\noptimizer=normuon_lr=0.003_seed=1 ") == 1
        assert ("memory" in text) == shown


def test_no_group_is_called_better_whose_best_rate_is_at_the_edge(tmp_path: Path) -> None:
    losses = {
        (name, lr): {seed: loss - lr + 0.001 * seed for seed in (1, 2, 3)}
        for name, loss in (("muon", 2.0), ("soap", 3.0))
        for lr in (0.01, 0.02)
    }
    text = words(printed(RankingView(ranking=ranked(add_sweep(tmp_path, losses))), 120))
    assert "muon is lower than soap (by 1.0000, p = 0), but only at the rates tried" in text
    assert "better" not in text


def test_a_rate_at_the_edge_and_a_missing_verdict_are_said(tmp_path: Path) -> None:
    losses = {(name, lr): {1: loss - lr} for name, loss in (("muon", 2.0), ("soap", 3.0)) for lr in (0.01, 0.02)}
    losses |= {("adamw", 0.001): {1: 4.0}}
    text = words(printed(RankingView(ranking=ranked(add_sweep(tmp_path, losses))), 120))
    assert "0.02! 0.01..0.02" in text
    assert "muon, soap: the best lr is the highest tried; the optimum may be above it" in text
    said = "muon is lower than soap (by 1.0000, 1 shared seed) and adamw (by 2.0200, 1 shared seed), without a verdict"
    assert f"{said}, which needs 3 shared seeds" in text


def test_groups_with_other_seeds_are_compared_on_those_that_both_have(tmp_path: Path) -> None:
    """As in a sweep that still runs: on seed 1 muon is the better one, whatever the means of what is there say."""
    losses = {("muon", 0.01): {1: 2.0, 2: 2.6}, ("normuon", 0.01): {1: 2.1}, ("soap", 0.01): {3: 3.0}}
    text = words(printed(RankingView(ranking=ranked(add_sweep(tmp_path, losses))), 120))
    assert "normuon is higher than muon (by 0.1000, 1 shared seed) on the seeds that both have" in text
    assert "normuon cannot be compared with soap, for want of a shared seed" in text


def test_the_leading_groups_are_told_from_the_rest(tmp_path: Path) -> None:
    """Not the first from the second: that question has no answer here, and the one about the rest has."""
    losses = {("muon", 0.01): {1: 2.0, 2: 2.6, 3: 2.2}, ("normuon", 0.01): {1: 2.05, 2: 2.55, 3: 2.23}}
    losses |= {
        (name, 0.01): {seed: loss + 0.5 + more for seed, loss in losses["muon", 0.01].items()}
        for name, more in (("soap", 0.0), ("adamw", 0.2))
    }
    text = words(printed(RankingView(ranking=ranked(add_sweep(tmp_path, losses))), 120))
    assert "muon is not told apart from normuon (by 0.0100, p = 0.77); muon is better than soap (by 0.5000" in text


def test_unequal_seeds_of_the_rates_are_said(tmp_path: Path) -> None:
    losses = {("muon", 0.01): {1: 2.0}, ("muon", 0.02): {1: 2.1}, ("soap", 0.01): {1: 3.0}}
    text = "best: by the seeds that all rates of a group have"
    assert text not in words(printed(RankingView(ranking=ranked(add_sweep(tmp_path / "equal", losses))), 120))
    losses["muon", 0.01][2] = 2.0
    assert text in words(printed(RankingView(ranking=ranked(add_sweep(tmp_path / "unequal", losses))), 120))


@pytest.mark.parametrize("width", [80, 120])
def test_the_time_of_a_step_has_its_spread(tmp_path: Path, width: int) -> None:
    for seed, step_s in ((1, 1.9), (2, 2.1)):
        for optimizer in OPTIMIZERS:
            for lr in (0.001, 0.002):
                config = configured(optimizer, lr=lr, seed=seed)
                add_run(tmp_path / f"{optimizer}-{lr}-{seed}", config, ending_at(2.0), step_s=step_s)
    text = printed(RankingView(ranking=ranked(tmp_path)), width)
    assert text.count("2.00 s ±6%") == len(OPTIMIZERS)
    assert "±: standard deviation over runs" in words(text)
    assert max(map(len, text.splitlines())) <= width


def test_seeds_that_differ_as_much_as_groups_make_no_verdict(tmp_path: Path) -> None:
    losses = {("muon", 0.01): {1: 2.0, 2: 2.6, 3: 2.2}, ("adamw", 0.01): {1: 2.5, 2: 2.1, 3: 2.7}}
    text = words(printed(RankingView(ranking=ranked(add_sweep(tmp_path, losses))), 120))
    assert "muon is not told apart from adamw (by 0.1667, p = 0.67)" in text


def test_rates_alone_and_seeds_alone_are_named(tmp_path: Path) -> None:
    rates = add_sweep(tmp_path / "rates", {("muon", lr): {1: 2.0 + lr} for lr in (0.01, 0.02, 0.05)})
    text = printed(RankingView(ranking=ranked(rates)), 80)
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["lr", "─────", "0.01", "0.02", "0.05"]
    assert "lr 0.01 is lower than lr 0.02 (by 0.0100, 1 shared seed) and lr 0.05 (by" in words(text)
    seeds = add_sweep(tmp_path / "seeds", {("muon", 0.01): {1: 2.0, 2: 2.1, 3: 2.2}})
    assert "all runs" in printed(RankingView(ranking=ranked(seeds)), 80)


def test_notes_that_runs_share_are_one_line(tmp_path: Path) -> None:
    root = add_sweep(tmp_path, {("muon", lr): {1: 2.0} for lr in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06)})
    for run in root.iterdir():
        RunFiles(run).config.write_text("unknown: 1\n")
    text = words(printed(RankingView(ranking=ranked(root)), 120))
    assert text.count("config.yaml cannot be read") == 1
    assert "and 2 more: config.yaml" in text


def test_a_sweep_whose_runs_all_failed_names_them(tmp_path: Path) -> None:
    for lr in (0.1, 0.2, 0.3):
        add_run(tmp_path / f"lr={lr}", configured(lr=lr), ending_at(9.0), status="diverged")
    ranking = ranked(tmp_path)
    text = words(printed(RankingView(ranking=ranking), 80))
    assert "3 runs in no mean: lr=0.1 (diverged, step 120), lr=0.2" in text
    assert "verdict" not in text
    assert read_page(comparison_page(ranking).text()).curves("validation loss").keys() == {"0.1", "0.2", "0.3"}


def test_groups_of_many_settings_are_named_after_their_runs(tmp_path: Path) -> None:
    for name, momentum in (("one", 0.9), ("two", 0.95), ("three", 0.99)):
        config = configured(momentum=momentum, ns_steps=int(10 * momentum), clip_grad=momentum, weight_decay=momentum)
        add_run(tmp_path / name, config, ending_at(2.0 + momentum))
    rows = printed(RankingView(ranking=ranked(tmp_path)), 80).splitlines()
    assert [row.split()[0] for row in rows[3:6]] == ["one", "two", "three"]


@pytest.fixture(scope="module")
def page(sweep: Path) -> Page:
    return read_page(comparison_page(ranked(sweep)).text())


def test_a_page_begins_with_the_conclusion_and_the_curves(page: Page) -> None:
    assert [head.text for head in page.all("h2")] == ["Loss", "Groups", "Loss by learning rate", "Runs"]
    assert page.one("h1").text == "47 runs: muon has the lowest validation loss, 2.0020"
    said = ("muon has the lowest", "muon is better", "Loss by learning rate", "validation loss, from", "tried")
    places = [page.words.index(text) for text in said]
    assert places == sorted(places), "the verdict is above the links to the sections"


def test_the_labels_of_an_axis_have_no_needless_digits(page: Page) -> None:
    labels = [tick.text for tick in page.all("text", class_="value")]
    assert "2.5" in labels
    assert [label for label in labels if "." in label and label.endswith("0")] == []


def test_curves_have_the_colours_of_their_groups_and_show_their_ends(page: Page) -> None:
    """Three runs for each optimizer, those at its best rate; the fall from the first losses is not drawn."""
    validation = page.curves("validation loss")
    assert len(validation) == 15
    assert all("lr=0.003" in name for name in validation)
    assert {step for points in validation.values() for step, _ in points} == {80, 120}
    figure = next(figure for figure in page.all("figure") if figure.text.startswith("validation loss"))
    paths = page.all("path", class_="curve")[:15]
    assert [path.attributes["class"] for path in paths] == [f"curve c{group}" for group in range(5) for _ in range(3)]
    assert [name for name in OPTIMIZERS if name in figure.text.replace("normuon", "")] != []
    keys = [span.attributes["class"] for span in page.all("span", class_="key")[:5]]
    assert keys == [f"key c{group}" for group in range(5)], "one entry of the legend for each group"


def test_curves_begin_together_where_all_have_fallen_to_the_highest_loss_of_the_second_half(page: Page) -> None:
    """Otherwise the fall before would take the height of the chart, and the ends would lie on one another. AdamW falls
    to that loss last, at step 80."""
    begins = {points[0][0] for points in page.curves("validation loss").values()}
    assert begins == {80}
    assert "validation loss, from step 80" in page.words


def test_losses_by_rate_have_a_line_for_each_group(page: Page) -> None:
    by_rate = page.curves("loss by optimizer.lr")
    assert [*by_rate] == [*OPTIMIZERS]
    assert by_rate["muon"] == [(0.001, "2.0220"), (0.003, "2.0020"), (0.01, "2.0720")]
