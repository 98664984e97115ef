"""A sweep is every combination of its values, the same ones each time, each with a name that can be a directory's."""

import itertools
import re

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from canzona_cli.config.compose import compose_run
from canzona_cli.config.sweep import MOST_RUNS, combinations
from canzona_cli.core.errors import ConfigError


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipe=qwen3-tiny", "optimizer.lr=1e-3,3e-3"),
        ("recipe=qwen3-tiny", "optimizer=muon,soap", "gpus=2", "train.seed=range(1,4)"),
        ("recipe=qwen3-tiny,qwen3-mini", "optimizer.lr=choice(0.001,0.01)", "train.steps=5,10"),
    ],
)
def test_the_runs_are_those_of_hydras_own_sweeper_in_its_order(arguments: tuple[str, ...]) -> None:
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides([*arguments]), None)
    assert [list(run.overrides) for run in combinations(arguments)] == batch


@pytest.mark.parametrize(
    "values", ["a,b", "64,256", "-1,0", "08,9", "qwen3-0.6b,8b", "1e-3,2e-3", "0.10,1", "True,a", "null,1", "NaN,inf,x"]
)
def test_plain_values_are_listed_as_by_hydra(values: str) -> None:
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides([f"recipe={values}"]), None)
    assert [list(run.overrides) for run in combinations([f"recipe={values}"])] == batch


def test_each_run_composes_to_its_values_and_is_called_after_them() -> None:
    runs = combinations(["recipe=qwen3-tiny", "optimizer.lr=1e-3,3e-3", "train.seed=1,2"])
    assert [run.name for run in runs] == ["lr=0.001_seed=1", "lr=0.001_seed=2", "lr=0.003_seed=1", "lr=0.003_seed=2"]
    configs = [compose_run(run.overrides).config for run in runs]
    assert [(c.optimizer.lr, c.train.seed) for c in configs] == [*itertools.product((1e-3, 3e-3), (1, 2))]
    assert runs[1].words == "optimizer.lr=0.001 train.seed=2"


RATES = ("optimizer=muon,soap,adamw", "optimizer.lr=1e-3,2e-3,muon:5e-3,1e-2,2e-2", "train.seed=1,2")


@pytest.mark.parametrize("arguments", [*itertools.permutations(RATES)])
def test_each_optimizer_has_its_own_rates(arguments: tuple[str, ...]) -> None:
    """In whatever order they are typed; rates in front of the first name are those of the optimizers not named."""
    runs = combinations(["recipe=qwen3-tiny", *arguments])
    optimizers = [compose_run(run.overrides).config.optimizer for run in runs]
    rates = {"muon": (5e-3, 1e-2, 2e-2), "soap": (1e-3, 2e-3), "adamw": (1e-3, 2e-3)}
    wanted = [(name, lr) for name, listed in rates.items() for lr in listed for _ in (1, 2)]
    assert sorted((optimizer.name, optimizer.lr) for optimizer in optimizers) == sorted(wanted)
    assert len({run.name for run in runs}) == len(runs)


def test_an_optimizer_without_values_keeps_the_recipes() -> None:
    runs = combinations(["recipe=qwen3-tiny", "optimizer=muon,adamw", "optimizer.lr=muon:0.01"])
    assert [run.name for run in runs] == ["optimizer=muon_lr=0.01", "optimizer=adamw"]
    alone = compose_run(["recipe=qwen3-tiny", "optimizer=adamw"]).config
    assert compose_run(runs[1].overrides).config == alone


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("optimizer=muon,adamw", "optimizer.lr=soap:0.1,0.2"), "values for soap, which is not swept"),
        (("optimizer.lr=muon:0.1,0.2",), "values for muon, which is not swept"),
        (("optimizer=muon,adamw", "optimizer.lr=muon:0.1,adamw:0.1,muon:0.2"), "names muon twice"),
        (("optimizer=muon,adamw", "optimizer.lr=muon:0.1,0.1"), "the same value several times: 0.1"),
    ],
)
def test_a_rate_for_an_optimizer_that_is_not_swept_is_one_line(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        combinations(["recipe=qwen3-tiny", *arguments])
    assert len(error.value.problems) == 1


def test_names_are_safe_short_and_never_shared() -> None:
    runs = combinations(["data.path='a/b','a-b',../../x", "run.root='" + "y" * 300 + "','" + "y" * 299 + "'"])
    names = [run.name for run in runs]
    assert len(set(names)) == 6
    assert all(re.fullmatch(r"[\w.+=-]{1,150}", name) and "/" not in name for name in names)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("train.seed=1", "no setting has several values"),
        ("train.seed=1,2,1", "the same value several times: 1"),
        ("optimizer.lr=interval(0,1)", "not a fixed list of values"),
        ("train.seed=shuffle(range(1,9))", "not a fixed list of values"),
        ("run.dir=a,b", "subdirectories of one directory"),
        (f"train.seed=range(0,{MOST_RUNS + 1})", "more than 1,000 runs"),
    ],
)
def test_what_is_no_sweep_is_refused(argument: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        combinations(["recipe=qwen3-tiny", argument])


def test_without_sweep_several_values_are_refused_with_the_option_that_takes_them() -> None:
    with pytest.raises(ConfigError, match="--sweep"):
        compose_run(["recipe=qwen3-tiny", "optimizer.lr=1e-3,3e-3"])
