"""A fast path that nobody has run on a GPU is off there until that GPU has shown it, or it is asked for by name."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
import torch

from canzona_cli.bench.calibrate.compute import Group, Variant
from canzona_cli.config.compose import compose_run
from canzona_cli.config.profiles import list_profiles
from canzona_cli.config.resolve import resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.update import algorithm_of, form_of, seconds
from canzona_cli.core.optimizers import muon
from canzona_cli.core.optimizers.gram_form import gram_dtype
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.measures import kinds
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import ClusterConfig, FastPath, Layout, Setup
from canzona_cli.core.simulate import fit
from canzona_cli.core.simulate.fast_paths import fast_paths
from canzona_cli.core.simulate.predict import simulate_plan
from tests.cuda_stand_in import DEVICE, cuda_stand_in

PATHS: tuple[FastPath, ...] = get_args(FastPath)
RUN = (
    *("recipe=qwen3-32b", "model.num_layers=4", "gpus=64", "parallel.tp=8", "parallel.pp=2"),
    "train.batch_tokens=262144",
)
"""Few matrices for many ranks: all fast paths are priced faster."""
LONG = (25600, 5120)
SUBSETS = [subset for size in range(len(PATHS) + 1) for subset in combinations(PATHS, size)]


def resolved(*overrides: str, verified: tuple[FastPath, ...] = ()) -> tuple[Setup, Layout]:
    """Returns a run whose profile says what is verified, as if it was written there."""
    config = compose_run([*RUN, *overrides]).config
    return fit.resolve(replace(config.setup, cluster=replace(config.cluster, verified=verified)))


def used(setup: Setup, plan: Plan) -> Iterator[FastPath]:
    """Yields the fast paths of a plan, by its forms, its prices and its modes."""
    algorithm = plan.subject.optimizer
    if any(kind.form == "gram" for kind in kinds(setup, plan)):
        yield "gram"
        if seconds(algorithm, *LONG, setup.cluster) < seconds(replace(algorithm, fused=False), *LONG, setup.cluster):
            yield "fused"
    if algorithm.graph:
        yield "graphs"
    if "shared" in plan.modes:
        yield "shared"


@pytest.mark.parametrize("verified", SUBSETS)
def test_a_plan_chooses_what_is_verified_and_nothing_else(verified: tuple[FastPath, ...]) -> None:
    config, layout = resolved(verified=verified)
    plan = make_plan(config, layout)
    # Only the Gram form has an update that the fused kernel can apply.
    possible = set(verified) - ({"fused"} if "gram" not in verified else set())
    assert set(used(config, plan)) == possible
    paths = fast_paths(config, layout, simulated=False)
    assert set(paths.off) == set(PATHS) - set(verified)
    assert paths.once_verified is None


def test_built_in_profiles_have_verified_nothing() -> None:
    profiles = [profile.cluster for profile in list_profiles() if profile.builtin]
    assert {profile.device for profile in profiles if profile is not None} == {"cpu", "cuda"}
    for profile in profiles:
        assert profile is not None
        assert profile.verified == ()
        assert all(profile.may_choose(path) == (profile.device == "cpu") for path in PATHS)


def test_what_they_would_gain_is_the_difference_between_the_plans() -> None:
    config, layout = resolved()
    found = fast_paths(config, layout, simulated=True).once_verified
    assert found is not None
    assert found.paths == PATHS
    everything, _ = resolved(verified=PATHS)
    expected = simulate_plan(everything, layout, make_plan(everything, layout))
    shipped = simulate_plan(config, layout, make_plan(config, layout))
    assert (found.iteration_s, found.optimizer_s) == (expected.iteration_s, expected.optimizer_s)
    assert found.optimizer_s < shipped.optimizer_s
    assert fast_paths(everything, layout, simulated=True) == replace(fast_paths(everything, layout, simulated=False))
    assert fast_paths(everything, layout, simulated=True).off == ()


@pytest.mark.parametrize(
    ("overrides", "off"),
    [
        (("optimizer.form=standard",), {"graphs"}),
        (("optimizer.form=gram",), {"graphs", "fused", "shared"}),
        (("optimizer.graph=false", "engine.mode=hosted"), {"gram", "fused"}),
        (("optimizer=soap",), set()),
        (("engine.strategy=sc",), set()),
        (("engine.strategy=asc",), {"gram", "graphs", "fused"}),
    ],
)
def test_only_what_a_run_could_use_is_said_to_be_off(overrides: tuple[str, ...], off: set[FastPath]) -> None:
    config, layout = resolved(*overrides)
    assert set(fast_paths(config, layout, simulated=False).off) == off


NAMED: dict[FastPath, str] = {
    "gram": "optimizer.form=gram",
    "graphs": "optimizer.graph=true",
    "shared": "engine.mode=shared",
    "fused": "cluster.verified=[gram,fused]",
}


@pytest.mark.parametrize("path", PATHS)
def test_what_is_asked_for_by_name_is_used_with_one_warning(path: FastPath) -> None:
    composed = compose_run([*RUN, NAMED[path]])
    config, layout = resolve(composed.config)
    assert path in set(used(config.setup, make_plan(config.setup, layout)))
    said = [warning for warning in composed.warnings if "by name" in warning]
    assert len(said) == 1
    assert said[0].startswith(NAMED[path])
    assert "anybody has run it on these GPUs" in said[0]
    assert "canzona doctor --gpu-check" in said[0]


def test_several_names_are_one_warning_and_nothing_is_said_of_defaults_or_cpus() -> None:
    named = [override for path, override in NAMED.items() if path != "fused"]
    [warning] = [text for text in compose_run([*RUN, *named]).warnings if "by name" in text]
    assert all(override in warning for override in named)
    for overrides in (list(RUN), ["recipe=tiny", *named], [*RUN, "optimizer.form=standard", "optimizer.graph=false"]):
        assert not [text for text in compose_run(overrides).warnings if "by name" in text]
    assert [text for text in compose_run(["recipe=tiny", "cluster.verified=[gram]"]).warnings if "verified" in text]


def test_on_cpus_plans_have_the_fast_paths_unverified() -> None:
    """CPU ranks need nothing verified: their plans have the fast paths, and say so."""
    config, layout = resolve(compose_run(["recipe=tiny", "gpus=4", "parallel.tp=2", "train.precision=fp32"]).config)
    plan = make_plan(config.setup, layout)
    algorithm = algorithm_of(config.setup)
    assert algorithm.fused
    assert form_of(algorithm, 768, 256, config.cluster) == "gram"
    content = plan.subject.content()
    assert content["optimizer"]["fused"] is True
    assert Plan.from_content(plan.content()) == plan
    on_gpus = make_plan(*resolved())
    assert on_gpus.subject.content()["optimizer"]["fused"] is False
    assert Plan.from_content(on_gpus.content()) == on_gpus


class Called(Exception):
    """A fast path was taken."""


@pytest.mark.parametrize("path", [None, "gram", "graphs", "fused"])
def test_the_engine_takes_no_path_that_is_not_verified(path: FastPath | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is the one that the engine makes for a run on GPUs, on a stand-in for one."""

    def called(*_: object, **__: object) -> None:
        raise Called

    verified: tuple[FastPath, ...] = () if path is None else ("gram", path) if path == "fused" else (path,)
    config = _small(resolved(verified=verified)[0].cluster)
    monkeypatch.setattr(muon, "runs_in_blocks", lambda matrix: False)
    monkeypatch.setattr(muon, "gram_dtype", lambda dtype, _: gram_dtype(dtype, torch.device("cuda")))
    for of_path, name in (
        ("gram", "canzona_cli.core.optimizers.muon.gram_newton_schulz"),
        ("graphs", "canzona_cli.core.optimizers.graphs.Replayed.run"),
        ("fused", "canzona_cli.core.optimizers.muon_cuda._descend"),
    ):
        if of_path == path or of_path not in verified:
            monkeypatch.setattr(name, called)
    with cuda_stand_in():
        group = Group(Variant(config=config, label="muon"), 512, 4096, DEVICE)
        if path is None:
            group.update()
        else:
            with pytest.raises(Called):
                group.update()


def _small(cluster: ClusterConfig) -> RunConfig:
    """A run on these GPUs with a single small layer, whose matrices the Gram form updates faster by far."""
    config = compose_run(["recipe=qwen3-0.6b", "cluster=h100-80g", "gpus=1", "model.num_layers=1"]).config
    rates = replace(cluster, matmul_tflops=((128, 0.01),), launch_us=0.0)
    return replace(config, cluster=rates)
