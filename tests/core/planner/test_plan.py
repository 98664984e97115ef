"""A plan goes through JSON unchanged, its hash is of its content alone, and only the run it was made for may use it."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from canzona_cli.config.resolve import fill, resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.sharing import SharedCost
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.planner import make as planner
from canzona_cli.core.planner.make import attempt, make_plan, plannable, subject
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.planner.plan_file import default_path, differences, find_plan, load_plan, read_plan
from canzona_cli.core.setup import Layout, MuonConfig, Strategy
from canzona_cli.core.simulate.compare import study_run
from tests import sizes
from tests.cli.commands.support import ran
from tests.refusals import refused

Planned = tuple[RunConfig, Layout, Plan]


def resolved(size: sizes.Size = "tiny", gpus: int = 8, **settings: object) -> tuple[RunConfig, Layout]:
    tp = 2 if size == "tiny" else None
    config = sizes.run(size, gpus, strategy="canzona", tp=tp)
    return resolve(replace(config, engine=replace(config.engine, **settings)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def planned() -> Planned:
    config, layout = resolved()
    return config, layout, make_plan(config.setup, layout)


@pytest.fixture
def written(planned: Planned, tmp_path: Path) -> Path:
    config, _, plan = planned
    path = tmp_path / default_path(config.setup, plan).name
    path.write_text(plan.to_json(about={"recipe": config.name}), encoding="utf-8")
    return path


def refusal(path: Path, config: RunConfig, layout: Layout) -> str:
    (problem,) = refused(load_plan, path, config.setup, layout)
    assert str(problem.value) == str(path)
    assert "canzona plan" in problem.fix
    return problem.reason


@pytest.mark.parametrize("strategy", ["canzona", "paper"])
@pytest.mark.parametrize("splitting", ["split", "fused", "qkv", "per_head"])
def test_json_round_trip(strategy: str, splitting: str) -> None:
    config, layout = resolved(strategy=strategy, splitting=splitting)
    plan = make_plan(config.setup, layout)
    again = Plan.from_content(json.loads(plan.to_json()))
    assert again == plan
    assert again.hash == plan.hash
    assert again.to_json() == plan.to_json()


def test_shared_matrices_are_read_as_they_were_planned_and_only_those_that_can_be(tmp_path: Path) -> None:
    config, layout = resolved(mode="shared")
    assert isinstance(config.optimizer, MuonConfig)
    config = replace(config, optimizer=replace(config.optimizer, form="gram"))
    plan = make_plan(config.setup, layout)
    assert {m.kind for m, mode in zip(plan.matrices, plan.modes, strict=True) if mode == "shared"} == {
        "q", "proj", "gate", "up", "down",
    }  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert load_plan(path, config.setup, layout).assignment == plan.assignment

    for index, cost in (
        (next(m.index for m in plan.matrices if m.kind == "k"), plan.assignment.shared_costs[0]),
        (0, SharedCost(fragment=(1.0,))),
    ):
        forged = replace(
            plan, assignment=replace(plan.assignment, shared_costs={**plan.assignment.shared_costs, index: cost})
        )
        path.write_text(forged.to_json(), encoding="utf-8")
        assert "cannot be shared as the plan says" in refusal(path, config, layout)
    other = {0: SharedCost(fragment=(1.0,) * len(plan.assignment.shared_costs[0].fragment))}
    forged = replace(plan, assignment=replace(plan.assignment, shared_costs=other))
    path.write_text(forged.to_json(), encoding="utf-8")
    assert "or costs" in refusal(path, config, layout)


def test_a_file_has_a_line_for_every_matrix_so_that_diff_can_compare_plans(planned: Planned) -> None:
    _, _, plan = planned
    assert sum('"parameter": ' in line for line in plan.to_json().splitlines()) == len(plan.matrices)


def test_what_is_written_beside_the_content_does_not_change_the_hash(written: Path) -> None:
    plan = read_plan(written)
    assert json.loads(written.read_text())["hash"] == plan.hash
    content = json.loads(written.read_text())
    content["about"] = {"recipe": "another"}
    written.write_text(json.dumps(content))
    assert read_plan(written).hash == plan.hash


def test_every_process_computes_the_same_hash(planned: Planned) -> None:
    script = (
        "from tests.core.planner.test_plan import resolved\n"
        "from canzona_cli.core.planner.make import make_plan\n"
        "config, layout = resolved()\n"
        "print(make_plan(config.setup, layout).hash)"
    )
    result = ran(sys.executable, "-c", script, environment={"PYTHONHASHSEED": "4711"})
    assert result.stdout.strip() == planned[2].hash


def test_layouts_of_one_mesh_share_candidates_and_get_the_plans_that_they_would_get_alone() -> None:
    """Whatever batch, recomputation and slices; and memory changes nothing unless a rank lacks some."""
    config, layout = resolved()
    larger = replace(layout, micro_batch_size=2, num_microbatches=2, global_batch_size=4 * layout.dp, recompute="full")
    sliced = replace(layout, cp=2, dp=layout.dp // 2, num_microbatches=2 * layout.num_microbatches)
    for one in (layout, larger, sliced):
        run = fill(config, one)
        shared = planner.plan_unbounded(run.setup, one)
        most = planner._most_held(shared)
        assert attempt(run.setup, one, None, None) == shared
        assert attempt(run.setup, one, None, most) == shared
        assert attempt(run.setup, one, None, most - 1) != shared


def test_the_file_of_this_very_run_is_read(planned: Planned, written: Path) -> None:
    config, layout, plan = planned
    assert load_plan(written, config.setup, layout) == plan
    found = find_plan(config.setup, layout, written.parent)
    assert found is not None
    assert found.path == written


CHANGES: dict[str, Callable[[RunConfig], RunConfig]] = {
    "model.hidden_size": lambda c: replace(c, model=replace(c.model, hidden_size=512)),
    "layout.dp": lambda c: replace(c, gpus=4),
    "optimizer.ns_steps": lambda c: replace(c, optimizer=replace(c.optimizer, ns_steps=6)),  # type: ignore[call-arg]
    "settings.mode": lambda c: replace(c, engine=replace(c.engine, mode="hosted")),
    "buffers.bucket_elements": lambda c: replace(c, parallel=replace(c.parallel, bucket_elements=1 << 20)),
    "profile.memory_gb_per_s": lambda c: replace(c, cluster=replace(c.cluster, memory_gb_per_s=99.0)),
}


@pytest.mark.parametrize("key", CHANGES)
def test_another_run_is_refused_by_name_of_the_difference(planned: Planned, written: Path, key: str) -> None:
    config, _, plan = planned
    free = replace(config, train=replace(config.train, micro_batch_size=None, global_batch_size=None))
    other, layout = resolve(CHANGES[key](free))
    reason = refusal(written, other, layout)
    had, want = plan.subject.flat()[key], subject(other.setup, layout).flat()[key]
    assert f"{key} is {had} in the plan, {want} in this run" in reason
    assert plan.name in reason
    assert find_plan(other.setup, layout, written.parent) is None


def test_many_differences_are_summed_up(planned: Planned, written: Path) -> None:
    config, layout = resolved("8b", 64)
    reason = refusal(written, config, layout)
    found = len(differences(planned[2].subject, subject(config.setup, layout)))
    assert found > 6
    assert f"; and {found - 6} more" in reason
    assert "for a different model, layout" in reason


def test_another_version_is_refused(planned: Planned, written: Path) -> None:
    content = json.loads(written.read_text())
    content["version"] = 99
    written.write_text(json.dumps(content))
    assert "another version of canzona: it has format 99, this" in refusal(written, *planned[:2])


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "is not a plan"), ('{"version": 1}', "is not a plan"), (None, "cannot be read")],
)
def test_what_is_no_plan_is_refused(planned: Planned, tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert words in refusal(path, *planned[:2])


def without(part: str) -> Callable[[Any], object]:
    return lambda content: content.pop(part)


DAMAGES: list[tuple[Callable[[Any], object], str]] = [
    *((without(part), f"{part}: field required") for part in ("subject", "matrices", "buckets", "micro_groups")),
    (without("lower_bounds"), "lower_bounds: field required"),
    (lambda content: content["subject"]["layout"].pop("ep"), "exactly those of a plan"),  # it has a default
    (lambda content: content["subject"]["optimizer"].pop("stack"), "exactly those of a plan"),  # it has a default
    (lambda content: content["matrices"][0].update(owner="nobody"), r"matrices\.0\.owner: input should be a valid int"),
    (lambda content: content["matrices"][0].update(owner=4), "outside the grid"),
    (lambda content: content["micro_groups"][0]["matrices"].append(content["micro_groups"][1]["matrices"][0]), "once"),
    (lambda content: content["buckets"][0]["ranges"][0].__setitem__(2, 3), "to another owner"),
    (lambda content: content["buckets"][0]["ranges"][1].__setitem__(0, 0), "overlap"),
    (lambda content: content["buckets"][0]["ranges"].pop(), "buckets do not contain every matrix"),
    (
        lambda content: content["buckets"][0].update(reduction="magic"),
        r"buckets\.0\.reduction: input should be 'reduce'",
    ),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_plan_is_refused_whatever_its_hash(
    planned: Planned, damage: Callable[[Any], object], words: str
) -> None:
    content = json.loads(planned[2].to_json())
    assert content["buckets"][0]["ranges"][0][2] != 3
    damage(content)
    with pytest.raises(ValueError, match=words):
        Plan.from_content(content)


@pytest.mark.parametrize("strategy", ["canzona", "paper"])
@pytest.mark.parametrize(("tp", "dp"), [(4, 8), (1, 32)])
def test_fewer_matrices_than_ranks(tp: int, dp: int, strategy: Strategy) -> None:
    """Some cells update nothing, some owners have no micro-group, and buckets lack owners."""
    config = sizes.run("tiny", tp * dp, strategy=strategy, tp=tp)
    config = replace(
        config,
        model=replace(config.model, num_layers=1),
        engine=replace(config.engine, mode="hosted"),
        parallel=replace(config.parallel, bucket_elements=200_000),
    )
    config, layout = resolve(config)
    plan = make_plan(config.setup, layout)
    assert Plan.from_content(json.loads(plan.to_json())) == plan
    assert len(plan.matrices) == 7 < tp * dp == layout.world_size
    assert sum(load > 0 for load in plan.loads(0)) <= 7
    assert {group.owner for group in plan.groups} == {cell.owner for cell in plan.assignment.cells} < set(range(dp))
    assert sorted(index for group in plan.groups for index in group.matrices) == list(range(7))
    ranged = {part.owner for bucket in plan.buckets for part in bucket.ranges}
    assert ranged == {cell.owner for cell in plan.assignment.cells}
    assert {bucket.reduction for bucket in plan.buckets} == {"reduce"}
    study = study_run(config.setup, layout)
    assert study.balance.gap <= 1
    assert study.memory.total > 0


def test_adamw_has_nothing_to_plan() -> None:
    with pytest.raises(ConfigError, match="no matrices to plan"):
        plannable(sizes.run("tiny", 4, strategy="adamw").setup)


def test_megatrons_strategies_are_planned_as_canzona_and_asc_as_itself() -> None:
    for strategy in ("sc", "layerwise"):
        config, notes = plannable(sizes.run("tiny", 4, strategy=strategy).setup)
        assert (config.engine.strategy, notes) == ("canzona", ())
        _, notes = plannable(sizes.run("tiny", 4, strategy=strategy).setup, frozenset({"engine.strategy"}))
        assert strategy in notes[0]
    assert plannable(sizes.run("tiny", 4, strategy="asc").setup)[0].engine.strategy == "asc"


def test_a_mode_of_megatrons_muon_changes_no_plan() -> None:
    """The table has all modes anyway."""
    strategies: tuple[Strategy, ...] = ("canzona", "layerwise")
    for strategy in strategies:
        _, notes = plannable(sizes.run("tiny", 4, strategy=strategy).setup, frozenset({"engine.muon_tp_mode"}))
        assert [note.partition(":")[0] for note in notes] == ["engine.muon_tp_mode is ignored"]
