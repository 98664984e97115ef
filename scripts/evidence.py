#!/usr/bin/env python3
"""Trains a small recipe with each optimizer at its best learning rates, and writes the raw results and their tables.

    python scripts/evidence.py RUNS [--recipe qwen3-tiny] [KEY=VALUE ...]      # about 35 runs
    python scripts/evidence.py [--check]              # only the tables, from the raw results

The runs are three sweeps by `canzona train --sweep`, in folders of RUNS; finished runs are not repeated, so the same
command goes on after an interruption, which writes the results of the runs that have finished:

- `adamw_lr`: the rate of everything that is not a matrix, with some optimizers at the recipe's rates of matrices, from
  the recipe's rate and its neighbours in `ADAMW_LRS` until the best has a worse one on both sides. The best is the rate
  with the lowest mean over the optimizers; all other runs use it.
- `lr`: for each optimizer, the rates of matrices by factors of 2 from the recipe's down, extended until the best has
  a worse one on both sides.
- `seeds`: each optimizer's best rate with more seeds.

The raw results are `recipes/evidence/RECIPE.json`, the tables are between the markers of `recipes/EVIDENCE.md`.
`--check` exits 1 if the tables and the raw results do not agree.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from figures import Table, replace_table

from canzona_cli.config.compose import compose_run
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import ExitCode
from canzona_cli.records.codec import load
from canzona_cli.records.corpus import PreparedCorpus
from canzona_cli.records.files import RunFiles
from canzona_cli.records.groups import Difference, differences, first_step_at
from canzona_cli.records.statistics import MeanSpread
from canzona_cli.records.summary import load_summary
from canzona_cli.records.words import MISSING, number

PAGE = Path(__file__).parents[1] / "recipes" / "EVIDENCE.md"
RAW = PAGE.with_name("evidence")
OPTIMIZERS = ("adamw", "muon", "normuon", "soap", "shampoo")
KINDS = ("muon", "soap", "adamw")
"""An optimizer that orthogonalises, one that whitens, and AdamW: the best AdamW rate has to be good for all three."""
ADAMW_LRS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
MORE_SEEDS = (2, 3)
"""The seeds in addition to the recipe's."""
SHARED = ("gpus=1", "train.eval_interval=20", "checkpoint.at_end=false")
PERIOD = 10
"""The number of steps whose mean is a step's time: SOAP and Shampoo refresh each matrix once in so many steps."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The settings of a finished run that differ between the runs, and its results."""

    optimizer: str
    lr: float
    adamw_lr: float
    seed: int
    ranks: int
    validation: tuple[tuple[int, float], ...]
    """The (step, loss) of every validation, in nats per token."""
    loss: float
    """The last training loss."""
    step_s: float
    """The shortest mean time of `PERIOD` consecutive steps in seconds. It says nothing if other programs ran
    beside the run, so no table has it."""

    @property
    def steps(self) -> int:
        return self.validation[-1][0]

    @property
    def final(self) -> float:
        return self.validation[-1][1]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The raw results of a recipe."""

    recipe: str
    overrides: tuple[str, ...]
    """The overrides of every run, in addition to the recipe."""
    corpus: str
    tokens_per_step: int
    adamw_lr: tuple[Trained, ...]
    lr: tuple[Trained, ...]
    seeds: tuple[Trained, ...]

    def save(self) -> None:
        """Writes the raw results, with a line for each run."""
        RAW.mkdir(exist_ok=True)
        text = json.dumps(asdict(self)).replace("{", "\n{")
        (RAW / f"{self.recipe}.json").write_text(f"{text.lstrip()}\n", encoding="utf-8")


def sweep(folder: Path, recipe: str, *overrides: str) -> tuple[Trained, ...]:
    """Trains the runs of a sweep that `folder` lacks; returns the finished ones. A run that diverges is left out.

    Raises:
        SystemExit: the sweep was refused or stopped.
    """
    train = (sys.executable, "-m", "canzona_cli", "train", "--sweep", f"recipe={recipe}", *overrides)
    code = subprocess.run([*train, f"run.dir={folder}"], check=False).returncode
    if code not in (ExitCode.OK, ExitCode.CRASH):
        raise SystemExit(code)
    return finished(folder)


def finished(folder: Path) -> tuple[Trained, ...]:
    """Reads the finished runs of a sweep; there are none if it has not begun."""
    return tuple(run for path in sorted(folder.glob("*/")) if (run := read(path)) is not None)


def read(run_dir: Path) -> Trained | None:
    """Reads a run's results; returns None if the run has not finished all its steps."""
    run = load_summary(run_dir)
    if run.config is None or run.status != "done":
        return None
    optimizer = run.config.optimizer
    times = [line.step_s or 0.0 for line in run.metrics]
    return Trained(
        optimizer=optimizer.name,
        lr=optimizer.lr,
        adamw_lr=optimizer.adamw_rates.lr,
        seed=run.config.train.seed,
        ranks=run.config.gpus,
        validation=tuple((step, round(loss, 5)) for step, loss in run.validations if loss is not None),
        loss=round(run.losses[-1][1], 5),
        step_s=round(min(fmean(times[i : i + PERIOD]) for i in range(len(times) - PERIOD + 1)), 4),
    )


def lowest(runs: Sequence[Trained]) -> Trained:
    return min(runs, key=lambda run: run.final)


def mean_curve(runs: Sequence[Trained]) -> list[tuple[int, float]]:
    """Returns the (step, loss) pairs of runs with the same validations: the mean of their losses."""
    return [
        (pairs[0][0], fmean(loss for _, loss in pairs)) for pairs in zip(*(run.validation for run in runs), strict=True)
    ]


def of(optimizer: str, runs: Sequence[Trained]) -> list[Trained]:
    return sorted((run for run in runs if run.optimizer == optimizer), key=lambda run: (run.lr, run.adamw_lr, run.seed))


def best_adamw_lr(runs: Sequence[Trained]) -> float:
    """Returns the AdamW rate with the lowest mean of the optimizers' final losses."""
    return min(adamw_lr_means(runs).items(), key=lambda pair: pair[1])[0]


def adamw_lr_means(runs: Sequence[Trained]) -> dict[float, float]:
    """Returns the mean of the optimizers' final losses at each AdamW rate."""
    rates = sorted({run.adamw_lr for run in runs})
    return {rate: fmean(run.final for run in runs if run.adamw_lr == rate) for rate in rates}


def neighbours(rate: float) -> set[float]:
    """Returns an AdamW rate of `ADAMW_LRS` with the next lower and the next higher one."""
    index = ADAMW_LRS.index(rate)
    return {*ADAMW_LRS[max(0, index - 1) : index + 2]}


def train(root: Path, recipe: str, overrides: tuple[str, ...], kinds: Sequence[str], extensions: int) -> None:
    """Trains everything that `root` lacks.

    Args:
        kinds: the optimizers by which the AdamW rate is chosen.
        extensions: the most times that the ladders of rates of matrices are extended.
    """
    config = composed(recipe, *overrides)
    tried, wider = set[float](), neighbours(config.optimizer.adamw_rates.lr)
    while not wider <= tried:
        tried |= wider
        rates = f"optimizer.adamw_lr={','.join(f'{rate:g}' for rate in sorted(tried))}"
        adamw_lr = best_adamw_lr(sweep(root / "adamw_lr", recipe, *overrides, f"optimizer={','.join(kinds)}", rates))
        wider = neighbours(adamw_lr)
    shared = (*overrides, f"optimizer.adamw_lr={adamw_lr:g}", f"optimizer={','.join(OPTIMIZERS)}")
    center = {name: composed(recipe, *overrides, f"optimizer={name}").optimizer.lr for name in OPTIMIZERS}
    ladders: dict[str, set[float]] = {}
    wider_ladders = {name: {lr / 2, lr} for name, lr in center.items()}
    for _ in range(1 + extensions):
        if wider_ladders == ladders:
            break
        ladders = wider_ladders
        runs = sweep(root / "lr", recipe, *shared, rates_of(ladders), f"train.seed={config.train.seed}")
        center = {name: lowest(of(name, runs)).lr for name in OPTIMIZERS}
        wider_ladders = {name: ladders[name] | {lr / 2, lr, lr * 2} for name, lr in center.items()}
    best = rates_of({name: {lr} for name, lr in center.items()})
    sweep(root / "seeds", recipe, *shared, best, f"train.seed={','.join(map(str, MORE_SEEDS))}")


def results(root: Path, recipe: str, overrides: tuple[str, ...]) -> Evidence:
    """Reads the results of all finished runs."""
    run_dir = next((root / "lr").iterdir())
    tokens = load_summary(run_dir).metrics[0].tokens or 0
    corpus = load(RunFiles(run_dir).corpus, PreparedCorpus, key="RUNS", fix="train again").prefix.name
    parts = {name: finished(root / name) for name in ("adamw_lr", "lr", "seeds")}
    return Evidence(recipe=recipe, overrides=overrides, corpus=corpus, tokens_per_step=tokens, **parts)


def composed(recipe: str, *overrides: str) -> RunConfig:
    return resolve(compose_run([f"recipe={recipe}", *overrides]).config)[0]


def rates_of(ladders: Mapping[str, set[float]]) -> str:
    """Returns the override with each optimizer's rates."""
    listed = (f"{name}:{','.join(f'{rate:g}' for rate in sorted(rates))}" for name, rates in ladders.items())
    return f"optimizer.lr={','.join(listed)}"


def adamw_lr_table(found: Evidence) -> Table:
    """Makes the table of the first sweep: the final loss of each optimizer at each AdamW rate."""
    rows = []
    for name in (name for name in dict.fromkeys((*KINDS, *OPTIMIZERS)) if of(name, found.adamw_lr)):
        runs = of(name, found.adamw_lr)
        rows.append([f"`{name}`", f"{runs[0].lr:g}", *_losses({run.adamw_lr: run.final for run in runs}).values()])
    means = adamw_lr_means(found.adamw_lr)
    rows.append(["mean", "", *_losses(means).values()])
    caption = f"The validation loss after {runs[0].steps} steps, by `optimizer.adamw_lr`."
    return Table(caption=caption, columns=("optimizer", "`lr`", *(f"{rate:g}" for rate in means)), rows=rows)


def lr_table(found: Evidence) -> Table:
    """Makes the table of the second sweep: the final loss of each optimizer at each rate of its ladder."""
    rows = []
    for name in (name for name in OPTIMIZERS if of(name, found.lr)):
        losses = _losses({run.lr: run.final for run in of(name, found.lr)})
        rows.append([f"`{name}`", ", ".join(f"{rate:g}: {loss}" for rate, loss in losses.items())])
    first = found.lr[0]
    caption = (
        f"The validation loss after {first.steps} steps by `optimizer.lr`, at `optimizer.adamw_lr={first.adamw_lr:g}`."
    )
    return Table(caption=caption, columns=("optimizer", "`lr`: loss"), rows=rows)


def _losses(by_rate: Mapping[float, float]) -> dict[float, str]:
    """Formats losses, with the lowest in bold."""
    best = min(by_rate.values())
    return {rate: f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for rate, loss in by_rate.items()}


def seeds_table(found: Evidence) -> Table:
    """Makes the table of the results: each optimizer at its best rate, over seeds, the lowest loss first."""
    best: dict[str, dict[int, Trained]] = {}
    for name in (name for name in OPTIMIZERS if of(name, found.lr)):
        first = lowest(of(name, found.lr))
        best[name] = {run.seed: run for run in (first, *of(name, found.seeds)) if run.lr == first.lr}
    losses = {name: {seed: run.final for seed, run in runs.items()} for name, runs in best.items()}
    ranked = sorted(best, key=lambda name: fmean(losses[name].values()))
    reference = "adamw" if "adamw" in best else ranked[-1]
    above = [None, *differences(losses[ranked[0]], [losses[name] for name in ranked[1:]])]
    rows, at_edge = [], False
    for name, difference in zip(ranked, above, strict=True):
        runs, loss = best[name].values(), MeanSpread.of(losses[name].values())
        rate, tried = lowest([*runs]).lr, [run.lr for run in of(name, found.lr)]
        edge = "!" * (rate in (min(tried), max(tried)))
        at_edge |= bool(edge)
        spread = "" if loss.spread is None else f" ± {loss.spread:.3f}"
        steps = first_step_at(mean_curve([*runs]), fmean(losses[reference].values()))
        tokens = None if steps is None else steps * found.tokens_per_step
        cells = (
            f"{len(runs)}",
            f"{loss.mean:.3f}{spread}",
            _above(difference),
            number(steps, ".0f"),
            number(tokens, ",.0f"),
        )
        rows.append([f"`{name}`", f"{rate:g}{edge}", *cells])
    caption = (
        f"Each optimizer at its best rates: the mean validation loss after {found.lr[0].steps} steps ± its standard "
        "deviation over seeds; how much higher that is than the first row's with the same seeds (p by paired t-tests, "
        "adjusted by Holm's method); and steps and tokens until the mean validation loss falls to that of "
        f"`{reference}` at the end."
    )
    if at_edge:
        caption += " `!`: the lowest or highest rate tried."
    columns = ("optimizer", "`lr`", "seeds", "loss", "above the first", "steps", "tokens")
    return Table(caption=caption, columns=columns, rows=rows)


def _above(difference: Difference | None) -> str:
    if difference is None:
        return MISSING
    return f"{difference.gap:.3f}" + ("" if difference.p is None else f" (p = {difference.p:.2g})")


TABLES = {"adamw_lr": adamw_lr_table, "lr": lr_table, "seeds": seeds_table}


def with_tables(page: str) -> str:
    """Returns the page with every table made anew from the raw results."""
    for path in sorted(RAW.glob("*.json")):
        found = load(path, Evidence, key=path.name, fix="make it again with scripts/evidence.py")
        for name, make in TABLES.items():
            page = replace_table(page, f"{found.recipe} {name}", make(found).markdown())
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, help="the folder of the runs; without it, only tables are made")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of all runs")
    parser.add_argument("--recipe", default="qwen3-tiny", help="the recipe to train")
    parser.add_argument("--kinds", default=",".join(KINDS), help="the optimizers that choose the AdamW rate")
    parser.add_argument("--extensions", type=int, default=20, help="how often ladders are extended at most")
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is out of date")
    given = parser.parse_intermixed_args()
    if given.runs is not None:
        root, overrides = given.runs.absolute(), (*SHARED, *given.overrides)
        try:
            train(root, given.recipe, overrides, given.kinds.split(","), given.extensions)
        finally:
            results(root, given.recipe, overrides).save()
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(before)
    if not given.check:
        PAGE.write_text(after, encoding="utf-8")
    return int(given.check and before != after)


if __name__ == "__main__":
    sys.exit(main())
