"""Files that are no files, or hold what no program writes, are told in words or passed over, wherever one is read."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run, load_resolved
from canzona_cli.config.resolve import resolve
from canzona_cli.config.tree import list_recipes
from canzona_cli.core.errors import CanzonaError, ConfigError
from canzona_cli.core.model.shapes import load_shapes
from canzona_cli.core.planner.plan import Plan, content_hash
from canzona_cli.core.planner.plan_file import obtain_plan, read_plan
from canzona_cli.core.reading import MOST_VALUES
from canzona_cli.core.simulate import fit
from canzona_cli.records.codec import load_if_valid, read_lines
from canzona_cli.records.records import RunResult, StepMetrics, read_layout
from tests.attacks.cases import mostly
from tests.refusals import refused

RUN = compose_run(["recipe=tiny", "gpus=4", "parallel.tp=2"]).config
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11)
)
"""531 bytes that stand for a hundred thousand million values."""


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def holding(text: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a link to nothing": nowhere,
    "a link to itself": to_itself,
    "a folder": folder,
    "a pipe": os.mkfifo,
}
NO_JSON = {
    "half of it": holding('{"version": 3, "mat'),
    "a number that is none": holding('{"version": 3, "matrices": [], "hash": NaN}'),
    "infinity in digits": holding('{"version": 3, "matrices": [], "hash": 1e999}'),
    "10,000 digits": holding('{"version": 3, "matrices": [], "hash": 1' + "0" * 10_000 + "}"),
    "a million levels": holding('{"version": 3, "matrices": ' + "[" * 1_000_000),
    "half a character": holding('{"version": 3, "matrices": "\\ud800"}'),
    "bytes": holding(bytes(range(256)) * 8),
    "a list": holding("[1, 2]"),
}
NO_YAML = {
    "a billion laughs": (holding(LAUGHS), f"expands to more than {MOST_VALUES:,} values"),
    "laughs in merges": (
        holding(
            "a0: &a0 {k: 1}\n"
            + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 8)}]}}\n" for n in range(1, 12))
        ),
        f"expands to more than {MOST_VALUES:,} values",
    ),
    "itself": (holding("name: &a [x, *a]\n"), "refers to itself"),
    "1,500 brackets": (holding("name: " + "[" * 1500 + "]" * 1500), "levels deep"),
    "400 digits": (holding("name: 1" + "0" * 400), "has an integer of 401 digits"),
    "10,000 digits": (holding("name: 1" + "0" * 10_000), "is not valid YAML"),
    "a set": (holding("name: !!set {a, b}"), "neither text nor a number: set"),
    "a key of bytes": (holding("name: {!!binary R0lG: 1}"), "neither text nor a number: bytes"),
    "bytes": (holding(bytes(range(256)) * 8), "is not UTF-8 text"),
}


@pytest.mark.parametrize("kind", mostly(pytest.mark.sweep, [*NO_FILES, *NO_JSON], "a pipe", "a million levels"))
def test_what_lies_in_plans_stops_no_run(kind: str, tmp_path: Path) -> None:
    config, layout = resolve(RUN)
    name = f"{config.name}-{config.gpus}gpus"
    ({**NO_FILES, **NO_JSON}[kind])(tmp_path / f"{name}-odd.json")
    found = obtain_plan(config.setup, layout, tmp_path)
    assert found is not None
    assert found.path is None
    good = tmp_path / f"{name}-good.json"
    good.write_text(found.plan.to_json())
    os.utime(good, (1, 1))
    again = obtain_plan(config.setup, layout, tmp_path)
    assert again is not None
    assert again.path == good, "the odd one is newer, and passed over"
    problems = refused(read_plan, tmp_path / f"{name}-odd.json")
    assert [problem.key for problem in problems] == ["plan"]


@pytest.mark.parametrize("kind", mostly(pytest.mark.sweep, [*NO_FILES, *NO_JSON], "a pipe", "a million levels"))
def test_an_odd_record_is_damaged_or_as_if_it_were_not_there(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    ({**NO_FILES, **NO_JSON}[kind])(path)
    assert load_if_valid(path, RunResult) is None
    with pytest.raises((ConfigError, FileNotFoundError)):
        read_layout(path)
    assert read_lines(path, StepMetrics)[0] == []


@pytest.mark.parametrize(
    "kind", mostly(pytest.mark.sweep, [*NO_FILES, *NO_YAML], "a pipe", "a billion laughs", "itself")
)
def test_an_odd_yaml_file_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    write, said = (NO_FILES[kind], "") if kind in NO_FILES else NO_YAML[kind]
    write(path)
    (tmp_path / "recipe").mkdir()
    write(tmp_path / "recipe" / "mine.yaml")
    readers: dict[str, Callable[[], object]] = {
        "recipe": lambda: compose_run([f"recipe={path}"]),
        "cluster": lambda: compose_run(["recipe=tiny", f"cluster={path}"]),
        "a run's own": lambda: load_resolved(path),
        "shapes": lambda: load_shapes(path),
    }
    if kind not in NO_FILES:
        readers["recipe of a name"] = lambda: compose_run(["recipe=mine"], recipes_dirs=[tmp_path])
    for reader, read in readers.items():
        with pytest.raises(CanzonaError) as refused:
            read()
        assert said in str(refused.value), reader


def test_odd_recipes_are_listed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for number, (write, _) in enumerate(NO_YAML.values()):
        write(tmp_path / "recipe" / f"odd-{number}.yaml")
    listed = {info.name: info.error for info in list_recipes([tmp_path])}
    for number, (_, reason) in enumerate(NO_YAML.values()):
        assert reason in listed[f"odd-{number}"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    mostly(
        pytest.mark.sweep,
        [
            ("model.num_layers=10000000", "model.num_layers"),
            ("model.num_layers=1" + "0" * 5000, "model.num_layers"),
            ("gpus=1" + "0" * 30, "gpus"),
            ("optimizer.lr=1" + "0" * 400, "optimizer.lr"),
            ("optimizer.options=" + "[" * 1500 + "]" * 1500, "optimizer.options"),
            ("checkpoint.every_minutes=-5", "checkpoint.every_minutes"),
            ("cluster.memory_gb_per_s=1e-300", "cluster.memory_gb_per_s"),
            ("cluster.step_factors={exchange:nan}", "cluster.step_factors.exchange"),
            ("description=${description}", "description"),
            ("description=${data.path} data.path=${description}", "description"),
            (
                "name=aaaaaaaaaa description="
                + "${name}" * 20
                + " run.root="
                + "${description}" * 20
                + " run.dir="
                + "${run.root}" * 20,
                "run.dir",
            ),
        ],
        ("model.num_layers=10000000", "model.num_layers"),
        ("description=${description}", "description"),
    ),
    ids=lambda text: text[:40],
)
def test_values_that_no_run_has_are_refused_at_once(overrides: str, key: str) -> None:
    problems = refused(lambda: resolve(compose_run(["recipe=tiny", *overrides.split()]).config))
    assert key in {problem.key for problem in problems}


@pytest.mark.parametrize("larger_s", [0.01, 1e-12])
def test_a_profile_whose_messages_take_no_longer_for_being_longer_is_planned_with(larger_s: float) -> None:
    table = f"[[all_to_all,2,1024,0.01,0],[all_to_all,2,1000000000,{larger_s},0]]"
    run = compose_run(["recipe=tiny", "gpus=4", "parallel.tp=2", f"cluster.collectives={table}"]).config
    assert obtain_plan(*fit.resolve(run.setup), Path("none")) is not None


def _sealed(content: dict[str, object]) -> str:
    return json.dumps({**content, "hash": content_hash(content)})


def test_a_forged_plan_with_the_right_hash_is_told_from_the_runs_own(tmp_path: Path) -> None:
    config, layout = resolve(RUN)
    found = obtain_plan(config.setup, layout, tmp_path)
    assert found is not None
    path = tmp_path / "forged.json"

    def refusal(change: Callable[[list[dict[str, object]]], None]) -> str:
        content = json.loads(found.plan.to_json())
        change(content["matrices"])
        path.write_text(_sealed({key: value for key, value in content.items() if key != "hash"}))
        return refused(
            obtain_plan,
            *fit.resolve(compose_run(["recipe=tiny", "gpus=4", "parallel.tp=2", f"engine.plan={path}"]).config.setup),
        )[0].reason

    assert "two matrices called layers.0.proj" in refusal(lambda m: m[1].update(name=m[0]["name"]))
    assert "different matrices" in refusal(lambda m: m[1].update(name="layers.0.x"))
    assert "or costs" in refusal(lambda m: m[1].update(seconds=1e-6))
    assert "seconds" in refusal(lambda m: m[1].update(seconds=0))
    assert "rows" in refusal(lambda m: m[1].update(rows=-1))
    assert Plan.from_content(found.plan.content()) == found.plan
