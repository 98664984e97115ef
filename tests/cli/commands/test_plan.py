"""`canzona plan`: what it prints, what it writes, what it refuses; without torch, and the same every time."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands.support import canzona, canzona_process, imports_none_of

LARGE = ("plan", "recipe=qwen3-32b", "gpus=256")
SMALL = ("plan", "recipe=tiny", "gpus=8", "parallel.tp=2")
LITTLE_TO_SEARCH = ("train.micro_batch_size=1", "train.recompute=full")
EVERY_SIZE = ("gpus=8", "optimizer=soap", *LITTLE_TO_SEARCH)
"""The settings with which a plan is made for every size."""
ONE_LAYOUT = ("parallel.tp=2", "parallel.pp=16", "parallel.vpp=1", "parallel.cp=1", *LITTLE_TO_SEARCH)
SHAPES = """
name: my model
hidden_size: 512
embedding: 512000
layers: 4
matrices:
  - {name: qkv, rows: 768, cols: 512, shard: rows}
  - {name: proj, rows: 512, cols: 512, shard: cols}
  - {name: up, rows: 2048, cols: 512, shard: rows}
  - {name: down, rows: 512, cols: 2048, shard: cols}
"""


@pytest.fixture(scope="module")
def large() -> dict[str, object]:
    result = canzona(*LARGE, "--dry-run", "--json", code=0)
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    return content


def told(result: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_json_has_what_scripts_rely_on(large: dict[str, object]) -> None:
    def keys(*path: str) -> set[str]:
        found: object = large
        for name in path:
            assert isinstance(found, dict)
            found = found[name]
        assert isinstance(found, dict)
        return set(found)

    assert {"plan_hash", "planning_s", "assumptions"} <= keys()
    assert {"tp", "pp", "dp"} <= keys("layout")
    assert {"dp", "tp", "grid", "lower_bound"} <= keys("load_balance")
    assert {"total", "weights", "gradients", "masters"} <= keys("memory", "per_gpu_bytes")
    assert {"per_gpu_bytes", "worst_rank"} <= keys("memory")
    assert {"dp_reduce_bytes", "dp_gather_bytes", "tp_exchange_bytes", "padding_fraction"} <= keys("communication")
    modes = {f"{name}/{mode}" for name in ("layerwise", "sc") for mode in ("duplicated", "distributed")}
    modes.add("layerwise/layer_sharded")
    assert keys("strategies") == {"sc", "layerwise", "asc", "paper", "canzona", "adamw", *modes}
    for strategy in keys("strategies"):
        wanted = {"iteration_s", "optimizer_s", "phases"}
        assert wanted <= keys("strategies", strategy)
        assert {"forward", "backward", "matrix_update", "param_gather"} <= keys("strategies", strategy, "phases")
    wanted = {f"{what}_vs_{over}" for what in ("optimizer", "iteration") for over in ("sc", "layerwise")}
    assert wanted <= keys("speedup")


def test_json_adds_up(large: dict[str, dict[str, dict[str, float]]]) -> None:
    memory = dict(large["memory"]["per_gpu_bytes"])
    assert memory.pop("total") == sum(memory.values())
    assert large["load_balance"]["grid"] >= large["load_balance"]["lower_bound"]  # type: ignore[operator]
    for compared in large["strategies"].values():
        phases: dict[str, float] = compared["phases"]  # type: ignore[assignment]
        parts = math.fsum(seconds for name, seconds in phases.items() if not name.endswith("_total"))
        assert parts == pytest.approx(compared["iteration_s"])
    optimizer = {name: compared["optimizer_s"] for name, compared in large["strategies"].items()}
    assert large["speedup"]["optimizer_vs_asc"] == pytest.approx(optimizer["asc"] / optimizer["canzona"])


def test_json_compares_nothing_with_what_does_not_fit(large: dict[str, dict[str, dict[str, float | None]]]) -> None:
    misfits = {name.partition("/")[0] for name, compared in large["strategies"].items() if not compared["fits"]}
    assert misfits == {"sc", "layerwise"}
    for name in ("sc", "layerwise"):
        assert large["strategies"][name]["overhead_over_adamw"] is None
        assert large["speedup"][f"optimizer_vs_{name}"] is large["speedup"][f"iteration_vs_{name}"] is None


def test_canzona_is_the_fastest_way_to_update_matrices(large: dict[str, dict[str, dict[str, float]]]) -> None:
    """AdamW has less to update."""
    times = {name: compared["iteration_s"] for name, compared in large["strategies"].items()}
    assert times["canzona"] < times["asc"] < times["layerwise"] < times["sc"]
    steps = {name: compared["optimizer_s"] for name, compared in large["strategies"].items()}
    assert steps["adamw"] < steps["canzona"] < steps["asc"] < steps["layerwise"] < steps["sc"]


@pytest.mark.parametrize(
    "run",
    [
        ("recipe=tiny",),
        # Not in layouts of their own, nor with batches of their own, for which seconds are searched and simulated.
        *(
            pytest.param(run, marks=pytest.mark.sweep)
            for run in (
                ("recipe=qwen3-235b-a22b", *ONE_LAYOUT, "parallel.ep=8", "train.global_batch_size=128"),
                ("recipe=llama3-405b", "train.global_batch_size=128"),
            )
        ),
    ],
)
def test_a_plan_fits_a_terminal_of_25_lines(run: tuple[str, ...]) -> None:
    _one_screen("plan", *run)


def _one_screen(*plan: str) -> str:
    """Returns what a dry run prints, and asserts that it fits a terminal of 25 lines."""
    text = canzona(*plan, "--dry-run", environment={"COLUMNS": "80"}, code=0).stdout
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert all(words in text for words in ("load balance", "memory", "canzona", "layerwise", "-v adds"))
    return text


def test_everything_about_a_plan_fits_the_width_of_its_terminal(large: dict[str, list[str]]) -> None:
    """The plan alone fits 25 lines. It counts the assumptions, and lists them on request."""
    short = _one_screen(*LARGE)
    result = canzona(*LARGE, "--dry-run", "--assumptions", "-v", code=0)
    lines = result.stdout.splitlines()
    whole = [line for line in lines if re.search(r"\b[0-9a-f]{64}\b", line)]
    assert len(whole) == 1, "the hash is not cut, for it is to be copied"
    assert max(len(line) for line in lines if line not in whole) <= 80
    text = " ".join(result.stdout.split())
    for words in ("load balance", "lower bound", "padding", "layerwise", "Memory", "Phases", "Assumptions"):
        assert words in text
    assert "off until verified here: gram, graphs, fused, shared (see -v)" in short
    assert "once verified (gram, graphs, fused): " in text
    assert "once verified" not in short, "that takes another plan"
    assert f"under {len(large['assumptions'])} assumptions; --assumptions" in " ".join(short.split())
    assert not any(line[:60] in short for line in large["assumptions"])
    assert all(line in text for line in large["assumptions"])


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param((*EVERY_SIZE, "parallel.tp=2", "parallel.pp=1", "parallel.cp=1"), id="little to search"),
        pytest.param((), marks=pytest.mark.sweep, id="all to search"),
    ],
)
def test_a_dry_run_without_a_recipe_shows_every_size(tmp_path: Path, typed: tuple[str, ...]) -> None:
    result = canzona("plan", "--dry-run", *typed, environment={"COLUMNS": "80"}, cwd=tmp_path, code=0)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    sizes = [line.split()[0] for line in lines if re.match(r"\d", line)]
    assert sizes == ["0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b"]
    assert lines[-1].startswith("To see one in detail: canzona plan recipe=")
    assert list(tmp_path.iterdir()) == []


def test_several_values_are_a_table_with_the_figures_of_each_plan(tmp_path: Path) -> None:
    asked = ("plan", "recipe=tiny", "parallel.tp=2", "gpus=4,8", "engine.alpha=0.5,1")
    lines = canzona(*asked, environment={"COLUMNS": "80"}, cwd=tmp_path, code=0).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split()[:3] for line in lines if line.startswith("tiny ")]
    assert rows == [["tiny", f"alpha={alpha}", str(gpus)] for gpus in (4, 8) for alpha in (0.5, 1)]
    plans = json.loads(canzona(*asked, "--json", cwd=tmp_path).stdout)["plans"]
    assert [plan["values"] for plan in plans] == [{"gpus": row[2], "engine.alpha": row[1][6:]} for row in rows]
    one = json.loads(canzona(*SMALL, "engine.alpha=0.5", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert plans[2]["load_balance"] == one["load_balance"]["grid"]
    assert plans[2]["tokens_per_s"] == one["outlook"]["tokens_per_s"]
    assert list(tmp_path.iterdir()) == [], "a table writes no plan"


@pytest.mark.sweep  # ten plans; the test above has every size too
def test_settings_without_a_recipe_are_those_of_every_size() -> None:
    asked = (*EVERY_SIZE, "--dry-run", "--json")
    result = canzona("plan", *asked, code=0)
    plans = json.loads(result.stdout)["plans"]
    assert {(plan["gpus"], plan["optimizer"]) for plan in plans} == {(8, "soap")}
    assert [plan["recipe"] for plan in plans if not plan["fits"]] == ["qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"]
    one = json.loads(canzona("plan", "recipe=8b", *asked).stdout)
    [same] = [plan for plan in plans if plan["recipe"] == "qwen3-8b"]
    assert same["load_balance"] == one["load_balance"]["grid"] >= same["lower_bound"]
    assert same["memory_bytes"] == one["memory"]["per_gpu_bytes"]["total"]
    assert same["optimizer_s"] == one["strategies"]["canzona"]["optimizer_s"]
    assert same["optimizer_vs_layerwise"] == one["speedup"]["optimizer_vs_layerwise"] > 1
    assert same["overhead_over_adamw"] == one["speedup"]["overhead_over_adamw"]


def test_a_terminal_without_unicode_gets_other_characters_and_no_crash() -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    result = canzona_process(*SMALL, "--dry-run", environment=ascii_only)
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "load balance" in result.stdout


def test_the_plan_is_written_where_train_looks_and_reads_back(tmp_path: Path) -> None:
    first = canzona(*SMALL, "--json", cwd=tmp_path, code=0)
    said = json.loads(first.stdout)
    (path,) = (tmp_path / "plans").iterdir()
    assert said["plan_file"] == f"plans/{path.name}"
    assert path.name == f"qwen3-tiny-8gpus-{said['plan_hash'][:8]}.json"
    from canzona_cli.core.planner.plan_file import read_plan

    assert read_plan(path).hash == said["plan_hash"]
    before = path.read_bytes()
    assert canzona(*SMALL, cwd=tmp_path).returncode == 0
    assert path.read_bytes() == before
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_out_names_another_place(tmp_path: Path) -> None:
    result = canzona(*SMALL, "--out", "deep/er/my.json", cwd=tmp_path, code=0)
    assert "written to deep/er/my.json" in " ".join(result.stdout.split())
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.json")] == [Path("deep/er/my.json")]


def test_it_says_what_is_shared_and_what_that_takes() -> None:
    sharing = (*SMALL, "optimizer.form=gram", "engine.mode=shared", "--dry-run", "-v")
    said = json.loads(canzona(*sharing, "--json").stdout)
    shared = sum(kind["shared"] for kind in said["updates"])
    assert shared > 0
    assert all((kind["fragment_s"] > 0) == (kind["shared"] > 0) for kind in said["updates"])
    assert all(kind["fragment_s"] == 0 or kind["shared"] for kind in said["updates"])
    text = " ".join(canzona(*sharing).stdout.split())
    assert f"{shared} matrices shared by TP groups" in text
    assert "per rank" in text


def test_it_says_why_nothing_can_be_shared() -> None:
    done = canzona("plan", "recipe=qwen3-moe-tiny", "gpus=4", "parallel.tp=2", "parallel.ep=2", "engine.mode=shared",
                   "--dry-run", "--json")  # fmt: skip
    assert "warning: engine.mode=shared is ignored: parallel.ep is 2" in done.stderr
    assert sum(kind["shared"] for kind in json.loads(done.stdout)["updates"]) == 0


def test_megatrons_strategies_are_planned_as_canzona_with_a_word_about_it() -> None:
    result = canzona(*SMALL, "engine.strategy=sc", "--dry-run", "--json")
    assert json.loads(result.stdout)["settings"]["strategy"] == "canzona"
    assert "engine.strategy=sc has no plan" in told(result)


def test_a_plan_says_how_often_an_optimizer_refreshes_its_factors() -> None:
    result = canzona(*SMALL, "optimizer=shampoo", "--dry-run", code=0)
    assert "shampoo (refreshed every 10 steps)" in result.stdout


def test_more_ranks_than_matrices_are_planned_and_priced() -> None:
    result = canzona("plan", "recipe=tiny", "gpus=64", "cluster.gpus_per_node=64", "--dry-run", code=0)
    assert "fewer than ranks" in " ".join(result.stdout.split())


def test_own_shapes_are_planned(tmp_path: Path) -> None:
    (tmp_path / "shapes.yaml").write_text(SHAPES)
    result = canzona("plan", "recipe=tiny", "gpus=4", "--shapes", "shapes.yaml", "--json", cwd=tmp_path, code=0)
    said = json.loads(result.stdout)
    assert said["matrices"] == 16
    assert said["plan_file"].startswith("plans/my-model-4gpus-")


def test_shapes_need_no_recipe_and_have_layouts(tmp_path: Path) -> None:
    (tmp_path / "shapes.yaml").write_text(SHAPES)
    asked = ("plan", "gpus=8", "--shapes", "shapes.yaml", "--dry-run", "--json")
    plan = canzona(*asked, cwd=tmp_path)
    assert "all settings except the model come from recipe=qwen3-8b" in told(plan)
    layouts = json.loads(canzona(*asked, "--layouts", cwd=tmp_path).stdout)
    said = json.loads(plan.stdout)
    assert layouts["recipe"] == said["recipe"] == "my-model"
    assert {axis: layouts["layouts"][0]["layout"][axis] for axis in ("tp", "pp", "dp")} == {
        axis: said["layout"][axis] for axis in ("tp", "pp", "dp")
    }


def test_shapes_are_planned_in_place_of_a_model_with_experts(tmp_path: Path) -> None:
    """Their stand-in is dense: the memory is the same beside a dense recipe of the same batch."""
    (tmp_path / "shapes.yaml").write_text(SHAPES)
    asked = ("gpus=4", "parallel.tp=2", "--shapes", "shapes.yaml", "--dry-run", "--json")
    plans = [
        json.loads(canzona("plan", f"recipe={name}", *asked, cwd=tmp_path).stdout)
        for name in ("qwen3-tiny", "qwen3-moe-tiny")
    ]
    assert plans[0]["memory"] == plans[1]["memory"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((*SMALL, "--dry-run", "optimizer=adamw"), 2, ("no matrices to plan",)),
        ((*SMALL, "--dry-run", "engine.alpha=2", "engine.c_max_mib=0"), 2, ("engine.alpha", "engine.c_max_mib")),
        ((*SMALL, "--dry-run", "--shapes", "nowhere.yaml"), 2, ("nowhere.yaml",)),
        ((*SMALL, "--dry-run", "--out", "x.json"), 2, ("a dry run writes no plan",)),
        ((*SMALL, "--html", "plan.pdf"), 2, ("--html plan.html",)),
        (("plan", "recipe=tiny", "gpus=4,8", "--out", "x.json"), 2, ("a table of plans", "leave out --out")),
        (("plan", "recipe=tiny", "gpus=interval(1,8)"), 2, ("is not a fixed list of values",)),
        ((*SMALL, "--layouts", "--html", "plan.html", "--out", "plan.json"), 2, ("--html", "--out")),
        ((*SMALL, "--out", "file/plan.json"), 3, ("file/plan.json",)),
        (("plan", "recipe=qwen3-32b", "gpus=4", "--dry-run"), 4, ("gpus=",)),
        (("plan",), 2, ("no recipe is given", "a plan of every size: canzona plan --dry-run")),
        (("plan", "--dry-run", "--html", "plan.html"), 2, ("no recipe is given",)),
    ],
)
def test_bad_input_is_refused_with_a_way_out(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = canzona(*arguments, cwd=tmp_path, code=code)
    assert all(each in told(result) for each in words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_least_capacity_that_is_named_works() -> None:
    refused = told(canzona(*SMALL, "engine.c_max_mib=0.1", "--dry-run"))
    least = refused.split("use engine.c_max_mib=")[1].split()[0]
    assert canzona(*SMALL, f"engine.c_max_mib={least}", "--dry-run").returncode == 0
    assert canzona(*SMALL, f"engine.c_max_mib={float(least) - 0.02}", "--dry-run").returncode == 2


def test_planning_imports_nothing_large_that_it_does_not_need() -> None:
    large = ("torch", "megatron", "numpy", "jinja2", "psutil", "packaging.requirements", "hydra", "omegaconf")
    unneeded = (
        *large,
        "canzona_cli.records.records",
        "canzona_cli.launch",
        "canzona_cli.bench",
        "canzona_cli.core.costs.machine",
        "canzona_cli.config.megatron_arguments",
    )
    imports_none_of(unneeded, *SMALL, "--dry-run")
    imports_none_of(
        (*unneeded, "rich", "canzona_cli.cli.views.plan", "canzona_cli.records.corpus"), *SMALL, "--dry-run", "--json"
    )


def test_layouts_are_shown_with_what_limits_them_and_why_the_first_won() -> None:
    asked = ("plan", "recipe=8b", "gpus=16")
    result = canzona(*asked, "--layouts", "--json", code=0)
    content = json.loads(result.stdout)
    layouts = content["layouts"]
    assert len(layouts) == 8 <= content["simulated"] < content["legal"]
    for one in layouts:
        layout = one["layout"]
        assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 16
        assert one["memory_bytes"] <= content["capacity_bytes"]
        assert sum(one["spent"].values()) == pytest.approx(one["iteration_s"])
        tokens = layout["global_batch_size"] * 4096
        assert one["tokens_per_s_per_gpu"] == pytest.approx(tokens / one["iteration_s"] / 16)
    slower = [one["slower"] for one in layouts]
    assert slower == sorted(slower)
    assert slower[0] == 0 < slower[1]
    # The layout a run gets, and the plan's own simulation of it.
    plan = json.loads(canzona(*asked, "--dry-run", "--json").stdout)
    assert [plan["layout"][axis] for axis in ("tp", "pp", "dp")] == [
        layouts[0]["layout"][axis] for axis in ("tp", "pp", "dp")
    ]
    assert plan["strategies"]["canzona"]["iteration_s"] == pytest.approx(layouts[0]["iteration_s"])
    assert plan["outlook"]["mfu"] == pytest.approx(layouts[0]["mfu"])
    screen, everything = (canzona(*asked, "--layouts", *more).stdout for more in ((), ("--verbose",)))
    assert content["why"] in " ".join(screen.split())
    assert len(screen.splitlines()) <= 25
    assert screen.count("───\n") == 1, "one table, of the columns that fit"
    assert everything.count("───\n") == 2
    assert {"limited by", "tokens/s/GPU"} <= {head.strip() for head in everything.splitlines()[12].split("  ")}
