"""Composition: what a recipe and overrides come to, and that nothing wrong with them goes unsaid or hides the rest."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from canzona_cli.config.compose import compose_run, dump_resolved, load_resolved
from canzona_cli.config.recipes import RECIPES_DIR_VARIABLE, REMOVED_OPTIMIZERS, builtin_recipes_dir, group_options
from canzona_cli.config.tree import list_recipes
from canzona_cli.core.errors import ConfigError, Problem
from canzona_cli.core.setup import AdamWConfig, CustomConfig, KroneckerConfig, MuonConfig
from tests.refusals import refused

BUILTIN = [*group_options("recipe", [builtin_recipes_dir()])]


def problems(*overrides: str, recipes_dirs: tuple[Path, ...] = ()) -> dict[str, Problem]:
    problems = refused(compose_run, overrides, recipes_dirs=recipes_dirs)
    found = {problem.key: problem for problem in problems}
    assert len(found) == len(problems), "a key is reported once"
    return found


def mine(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def recipe(folder: Path, name: str, text: str) -> Path:
    path = folder / "recipe" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_recipe_composes_without_a_warning(name: str) -> None:
    composed = compose_run([f"recipe={name}"])
    assert composed.config.name == name
    assert composed.config.description
    assert composed.warnings == ()
    assert composed.recipe_file == builtin_recipes_dir() / "recipe" / f"{name}.yaml"


KINDS = ("qwen3-tiny", "qwen3-moe-tiny", "qwen3-8b", "llama3-8b")
"""Recipes with and without experts and GPUs, and of each family."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else [pytest.mark.sweep]) for name in BUILTIN]
)
def test_a_resolved_configuration_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = compose_run([f"recipe={name}", "gpus=4", "run.dir=a b/ü", "optimizer.eps=1e-12"]).config
    path = tmp_path / "config.yaml"
    path.write_text(dump_resolved(config), encoding="utf-8")
    assert load_resolved(path) == config
    assert compose_run([f"recipe={path}"]).config == config


def test_explicit_holds_what_the_command_line_sets() -> None:
    composed = compose_run(["recipe=tiny", "gpus=4", "optimizer=adamw", "train.steps=7"])
    assert composed.explicit == {"recipe", "gpus", "optimizer", "train.steps"}
    assert isinstance(composed.config.optimizer, AdamWConfig)
    assert (composed.config.gpus, composed.config.train.steps) == (4, 7)


def test_a_value_may_refer_to_another_setting() -> None:
    assert compose_run(["recipe=tiny", "train.steps=40", "train.eval_interval=${train.steps}"]).config.train == replace(
        compose_run(["recipe=tiny"]).config.train, steps=40, eval_interval=40
    )


def test_a_text_setting_takes_what_was_typed() -> None:
    for text in ("0042", "true", "a(b)=c", "/data/x y", "null-ish"):
        assert compose_run(["recipe=tiny", f"run.dir={text}"]).config.run.dir == text


def test_null_hands_a_setting_back_to_the_fit() -> None:
    assert compose_run(["recipe=tiny", "parallel.tp=2", "parallel.tp=null"]).config.parallel.tp is None


class TestEverythingAtOnce:
    def test_grammar_types_keys_options_and_parallelism_together(self) -> None:
        found = problems(
            "recipe=qwen3-tinny",
            "gpus=0",
            "optimizer.lrr=1",
            "train.steps=1e3",
            "parallel.tp=3",
            "optimizer=muonn",
            "train.precision=bf61",
            "train.seq_length=(2",
            "+train.extra=1",
            "train.seed=1,2",
            "optimizer.momentum=1.5",
        )
        assert found["recipe"].fix.startswith("did you mean qwen3-tiny?")
        assert "optimizer.lr?" in found["optimizer.lrr"].fix
        assert found["train.steps"].fix == "write train.steps=1000"
        assert found["train.steps"].value == "1e3"
        assert "1, 2, 4" in found["parallel.tp"].fix
        assert found["optimizer"].fix.startswith("did you mean muon?")
        assert found["train.precision"].fix.startswith("did you mean bf16?")
        assert {"gpus", "train.seq_length", "+train.extra", "train.seed", "optimizer.momentum"} < found.keys()
        assert len(found) == 11

    def test_in_the_order_they_were_typed(self) -> None:
        keys = ["train.stepz", "gpus", "parallel.tp", "train.seed"]
        typed = ["recipe=tiny", "train.stepz=1", "gpus=x", "parallel.tp=3", "train.seed=-1"]
        assert list(problems(*typed)) == keys

    def test_without_a_recipe_each_override_is_still_checked(self) -> None:
        found = problems("gpus=many", "train.stepz=3", "optimizer.ns_steps=x")
        assert found.keys() == {"recipe", "gpus", "train.stepz", "optimizer.ns_steps"}
        assert "qwen3-tiny" in found["recipe"].fix

    def test_a_recipe_name_like_no_other_is_not_guessed(self) -> None:
        assert problems("recipe=zzz", "parallel.tp=3", "gpus=x").keys() == {"recipe", "gpus"}


class TestHints:
    @pytest.mark.parametrize(
        ("typed", "meant"),
        [
            ("tp", "parallel.tp"),
            ("train.lr", "optimizer.lr"),
            ("parallel.tensor", None),
            ("optimiser", "optimizer"),
            ("train.seq-length", "train.seq_length"),
            ("engine.stategy", "engine.strategy"),
            ("model.layers", "model.num_layers"),
        ],
    )
    def test_an_unknown_key_names_the_one_that_was_meant(self, typed: str, meant: str | None) -> None:
        fix = problems("recipe=tiny", f"{typed}=1")[typed].fix
        assert f"did you mean {meant}?" in fix if meant else fix

    @pytest.mark.parametrize("bad", ["+foo=1", "++gpus=2", "~train.steps", "~gpus=1", "foo=1"])
    def test_no_hint_says_to_add_a_key(self, bad: str) -> None:
        found = problems("recipe=tiny", bad)
        assert all("+" not in problem.fix and "append" not in problem.fix.lower() for problem in found.values())

    def test_a_bare_recipe_name_is_understood(self) -> None:
        assert problems("qwen3-mini")["qwen3-mini"].fix == "write recipe=qwen3-mini"

    def test_a_bare_run_directory_is_answered_with_both_things_it_can_mean(self, tmp_path: Path) -> None:
        run = tmp_path / "my run"
        run.mkdir()
        (run / "config.yaml").touch()
        (problem,) = problems(str(run)).values()
        assert problem.fix == (
            f"write recipe='{run}/config.yaml' for another run with its settings, "
            f"or canzona resume '{run}' to continue it"
        )

    @pytest.mark.parametrize("name", REMOVED_OPTIMIZERS)
    def test_a_removed_optimizer_says_what_to_use(self, name: str, tmp_path: Path) -> None:
        path = mine(tmp_path, f"defaults: [qwen3-tiny]\noptimizer: {{name: {name}, lr: 0.1}}\n")
        given = {"optimizer": ("recipe=tiny", f"optimizer={name}"), "optimizer.name": (f"recipe={path}",)}
        for key, overrides in given.items():
            problem = problems(*overrides)[key]
            assert (problem.reason, problem.fix) == ("no longer exists", REMOVED_OPTIMIZERS[name])

    def test_a_setting_of_another_optimizer_names_its_owner(self) -> None:
        problem = problems("recipe=tiny", "optimizer=adamw", "optimizer.ns_steps=3")["optimizer.ns_steps"]
        assert "belongs to muon" in problem.reason

    def test_a_section_is_not_a_setting(self) -> None:
        assert "section" in problems("recipe=tiny", "train=5")["train"].reason

    def test_a_folder_of_a_run_points_to_its_configuration(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("gpus: 1\n")
        assert f"recipe={tmp_path}/config.yaml" in problems(f"recipe={tmp_path}")["recipe"].fix


class TestOptionsOfAnOwnOptimizer:
    OWN = ("recipe=tiny", "optimizer=custom", "optimizer.source=torch.optim:SGD", "optimizer.allow=[torch]")

    def options(self, *overrides: str) -> dict[str, object]:
        optimizer = compose_run([*self.OWN, *overrides]).config.optimizer
        assert isinstance(optimizer, CustomConfig)
        return dict(optimizer.options)

    def test_all_at_once_one_at_a_time_and_both(self) -> None:
        assert self.options() == {}
        assert self.options("optimizer.options={momentum:0.9,nesterov:true}") == {"momentum": 0.9, "nesterov": True}
        assert self.options("optimizer.options.momentum=0.9") == {"momentum": 0.9}
        both = self.options("optimizer.options={momentum:0.9,dampening:0.1}", "optimizer.options.momentum=0.5")
        assert both == {"momentum": 0.5, "dampening": 0.1}

    def test_values_keep_their_types(self) -> None:
        typed = {"a": "3", "b": "3.0", "c": "true", "d": "word", "e": "[0.9,0.95]", "f": "1e-8"}
        found = self.options(*(f"optimizer.options.{name}={text}" for name, text in typed.items()))
        assert found == {"a": 3, "b": 3.0, "c": True, "d": "word", "e": (0.9, 0.95), "f": 1e-8}
        assert [type(value) for value in found.values()] == [int, float, bool, str, tuple, float]

    def test_they_survive_being_written_and_read(self, tmp_path: Path) -> None:
        config = compose_run([*self.OWN, "optimizer.options={betas:[0.9,0.95],amsgrad:true}"]).config
        path = tmp_path / "config.yaml"
        path.write_text(dump_resolved(config), encoding="utf-8")
        assert load_resolved(path) == config
        with pytest.raises(ConfigError, match="only runs if the command line names it"):
            compose_run([f"recipe={path}"])
        again = compose_run([f"recipe={path}", "optimizer.source=torch.optim:SGD"])
        assert again.config.optimizer == config.optimizer

    @pytest.mark.parametrize(
        ("override", "key", "reason"),
        [
            ("optimizer.options=3", "optimizer.options", "is a whole number, not a mapping of names to values"),
            ("optimizer.options=[momentum]", "optimizer.options", "is a list, not a mapping of names to values"),
            ("optimizer.options={momentum:{a:1}}", "optimizer.options.momentum", "is not a number, text, true"),
            ("optimizer.options={betas:[[1]]}", "optimizer.options.betas", "is not a number, text, true"),
            ("optimizer.options.momentum=null", "optimizer.options.momentum", "is not a number, text, true"),
            ("optimizer.options.a.b=1", "optimizer.options.a.b", "is not a valid Python argument name"),
            ("optimizer.options.0=1", "optimizer.options.0", "is not a valid Python argument name"),
            ("optimizer.optoins.momentum=1", "optimizer.optoins.momentum", "no such setting"),
        ],
    )
    def test_a_wrong_option_is_told_with_an_example_and_hides_nothing(
        self, override: str, key: str, reason: str
    ) -> None:
        found = problems(*self.OWN, override, "optimizer.lr=-1")
        assert found.keys() == {key, "optimizer.lr"}
        assert found[key].reason.startswith(reason) or reason in found[key].reason
        assert "(in" not in found[key].reason, "it was typed"
        assert found[key].fix


class TestNothingIsRunOrLeaked:
    def test_target_in_an_override(self) -> None:
        assert "code" in problems("recipe=tiny", "train._target_.x=os.system")["train._target_.x"].reason

    @pytest.mark.parametrize("value", ["${oc.env:HOME}", "${oc.env:X,${gpus}}", "a-${ oc.env : HOME }", "${now:%Y}"])
    def test_a_resolver_in_an_override(self, value: str) -> None:
        assert "secrets" in problems("recipe=tiny", f"run.root={value}")["run.root"].reason

    @pytest.mark.parametrize("value", ["${oc.${description}:PLANTED}", "${${description}:PLANTED}", "${oc.env:PLANTED"])
    def test_a_resolver_whose_name_is_put_together(self, value: str, tmp_path: Path) -> None:
        path = mine(tmp_path, f"defaults: [qwen3-tiny]\ndescription: env\nrun: {{root: '{value}'}}\n")
        assert problems(f"recipe={path}").keys() & {"run.root", str(path)}

    def test_a_resolver_in_a_defaults_list_shows_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PLANTED", "hunter2")
        recipe(
            tmp_path, "mine", "# @package _global_\ndefaults: [qwen3-tiny, {override /model: '${oc.env:PLANTED}'}]\n"
        )
        (problem,) = problems("recipe=mine", recipes_dirs=(tmp_path,)).values()
        assert "hunter2" not in str(problem)

    def test_python_objects_in_yaml(self, tmp_path: Path) -> None:
        path, made = tmp_path / "mine.yaml", tmp_path / "made"
        for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir"):
            path.write_text(f"defaults: [qwen3-tiny]\nrun: {{root: {tag} ['{made}']}}\n")
            (problem,) = problems(f"recipe={path}").values()
            assert "YAML" in problem.reason
        assert not made.exists()

    def test_code_is_run_for_the_command_line_alone(self, tmp_path: Path) -> None:
        own = {"source": "torch.optim:SGD", "allow": ["torch"]}
        path = mine(
            tmp_path, yaml.safe_dump({"defaults": ["qwen3-tiny", {"override /optimizer": "custom"}], "optimizer": own})
        )
        problem = problems(f"recipe={path}")["optimizer.source"]
        assert "only runs if the command line names it" in problem.reason
        assert compose_run([f"recipe={path}", "optimizer.allow=[torch]"]).config.optimizer.name == "custom"
        assert compose_run([f"recipe={path}"], training=False).config.optimizer.name == "custom", "plans load none"

    @pytest.mark.parametrize(
        "name",
        [
            *("..", "a/b", "-x", "a\x1bb", "x" * 101),
            *(pytest.param(name, marks=pytest.mark.sweep) for name in ("../../x", "/etc/x", "a\nb", " ", "ä")),
        ],
    )
    def test_a_name_that_is_no_name_of_a_folder(self, name: str, tmp_path: Path) -> None:
        path = mine(tmp_path, yaml.safe_dump({"defaults": ["qwen3-tiny"], "name": name}))
        assert "name" in problems(f"recipe={path}")

    @pytest.mark.parametrize(("key", "value"), [("root", "../x"), ("dir", "a/../../x"), ("dir", "..")])
    def test_a_recipe_that_leads_out_of_its_folder(self, key: str, value: str, tmp_path: Path) -> None:
        path = mine(tmp_path, yaml.safe_dump({"defaults": ["qwen3-tiny"], "run": {key: value}}))
        assert "points outside" in problems(f"recipe={path}")[f"run.{key}"].reason
        typed = compose_run([f"recipe={path}", f"run.{key}={value}"]).config.run
        assert getattr(typed, key) == value, "whoever types it means it"

    @pytest.mark.parametrize(
        ("key", "char"),
        [("run.dir", "\n"), ("run.root", "\x1b"), ("data.path", "\u202e"), ("engine.plan", "\u2028"),
         ("checkpoint.resume", "\0")],
    )  # fmt: skip
    def test_a_character_that_hides_something(self, key: str, char: str, tmp_path: Path) -> None:
        section, _, name = key.partition(".")
        source = {"source": "prepared"} if section == "data" else {}
        path = mine(tmp_path, yaml.safe_dump({"defaults": ["qwen3-tiny"], section: {**source, name: f"a{char}b"}}))
        assert "unprintable" in problems(f"recipe={path}")[key].reason

    @pytest.mark.parametrize(
        "override",
        [
            "run.dir=a/-x",
            *("cluster.rdzv_endpoint=--x:1", "cluster.rdzv_endpoint=me:pw@host:1"),
        ],
    )
    def test_what_torchrun_would_take_for_something_else(self, override: str) -> None:
        assert override.partition("=")[0] in problems("recipe=tiny", override)

    def test_both_in_a_recipe_file_at_any_depth(self, tmp_path: Path) -> None:
        text = "defaults: [qwen3-tiny]\ntrain: {steps: {_target_: os.system}}\nrun: {root: '${oc.env:HOME}'}\n"
        path = mine(tmp_path, text)
        assert problems(f"recipe={path}").keys() == {"train.steps._target_", "run.root"}

    def test_both_in_a_users_group_file(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "mine.yaml").write_text("source: stdlib\ntokenizer: {_target_: os.system}\n")
        found = problems("recipe=tiny", "data=mine", recipes_dirs=(tmp_path,))
        assert found.keys() == {"data.tokenizer._target_"}

    def test_a_reference_to_nothing(self) -> None:
        assert "optimizer.lx" in problems("recipe=tiny", "optimizer.eps=${optimizer.lx}")["optimizer.eps"].reason

    def test_a_reference_in_a_circle(self) -> None:
        found = problems("recipe=tiny", "train.steps=${train.seed}", "train.seed=${train.steps}")
        assert "train.steps" in found


class TestOwnRecipes:
    def test_a_file_builds_on_a_built_in_recipe(self, tmp_path: Path) -> None:
        path = mine(tmp_path, "defaults:\n  - qwen3-8b\n  - override /cluster: h200\ntrain:\n  steps: 7\n")
        before = sorted(tmp_path.rglob("*"))
        composed = compose_run([f"recipe={path}"])
        assert composed.config.name == "mine"
        assert composed.config.model.name == "qwen3-8b"
        assert composed.config.cluster.name == "h200"
        assert composed.config.train.steps == 7
        assert composed.recipe_file == path
        assert path in composed.files
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written beside the user's file"

    def test_a_file_named_like_a_built_in_may_build_on_it_and_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "qwen3-tiny.yaml"
        path.write_text("defaults: [qwen3-tiny]\ngpus: 8\n")
        composed = compose_run([f"recipe={path}"])
        assert composed.config.gpus == 8
        assert composed.warnings == (f"recipe qwen3-tiny from {path} shadows the built-in",)

    def test_a_whole_section_gives_way_to_the_command_lines_group(self, tmp_path: Path) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(dump_resolved(compose_run(["recipe=tiny", "optimizer.ns_steps=9"]).config))
        kept = compose_run([f"recipe={path}"]).config.optimizer
        assert isinstance(kept, MuonConfig)
        assert kept.ns_steps == 9
        assert isinstance(compose_run([f"recipe={path}", "optimizer=adamw"]).config.optimizer, AdamWConfig)

    def test_a_part_of_a_section_adjusts_it_even_with_another_name(self, tmp_path: Path) -> None:
        path = recipe(tmp_path, "small", "defaults: [qwen3-tiny]\nmodel: {name: small, num_layers: 2}\n")
        base = compose_run(["recipe=tiny"]).config.model
        for chosen in ("small", path):
            config = compose_run([f"recipe={chosen}"], recipes_dirs=(tmp_path,)).config
            assert config.model == replace(base, name="small", num_layers=2)

    def test_a_chosen_file_has_the_package_of_its_header(self, tmp_path: Path) -> None:
        (tmp_path / "optimizer").mkdir()
        text = "# @package _global_\noptimizer: {name: soap, lr: 0.02}\ntrain: {seed: 5}\n"
        (tmp_path / "optimizer" / "ours.yaml").write_text(text)
        config = compose_run(["recipe=0.6b", "optimizer=ours"], recipes_dirs=(tmp_path,)).config
        assert (config.optimizer.name, config.train.seed) == ("soap", 5)

    def test_a_folder_comes_first_and_shadowing_is_a_warning(self, tmp_path: Path) -> None:
        path = recipe(tmp_path, "qwen3-tiny", "# @package _global_\ndefaults:\n  - qwen3-mini\nname: mine\n")
        composed = compose_run(["recipe=tiny"], recipes_dirs=(tmp_path,))
        assert composed.config.name == "mine"
        assert composed.recipe_file == path
        assert composed.warnings == (f"recipe qwen3-tiny from {path} shadows the built-in",)

    def test_a_folder_may_hold_any_group(self, tmp_path: Path) -> None:
        (tmp_path / "cluster").mkdir()
        text = (builtin_recipes_dir() / "cluster" / "cpu.yaml").read_text().replace("name: cpu", "name: desk")
        (tmp_path / "cluster" / "desk.yaml").write_text(text)
        assert compose_run(["recipe=tiny", "cluster=desk"], recipes_dirs=(tmp_path,)).config.cluster.name == "desk"

    def test_the_environment_names_folders_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recipe(tmp_path, "ours", "# @package _global_\ndefaults:\n  - qwen3-tiny\nname: ours\n")
        monkeypatch.setenv(RECIPES_DIR_VARIABLE, str(tmp_path))
        assert compose_run(["recipe=ours"]).config.name == "ours"

    @pytest.mark.parametrize("odd", ["it's, a [folder]", "naïve=1", "a:b $HOME"])
    def test_folders_and_files_may_have_odd_names(self, tmp_path: Path, odd: str) -> None:
        folder = tmp_path / odd
        recipe(folder, "ours", "# @package _global_\ndefaults:\n  - qwen3-tiny\nname: ours\n")
        (folder / "file.yaml").write_text("defaults: [qwen3-tiny]\n")
        assert compose_run(["recipe=ours"], recipes_dirs=(folder,)).config.name == "ours"
        assert compose_run([f"recipe={folder}/file.yaml"]).config.name == "file"

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("train:\n  steps: [1\n", "is not valid YAML: line 3, column 1: "),
            ("- a\n- b\n", "contains no settings"),
            ("", "contains no settings"),
            ("defaults: [qwen3-9b]\n", "builds on recipe qwen3-9b in its `defaults:`, but there is no"),
            ("# @package _global_\ndefaults:\n  - recipe/qwen3-tiny\nname: mine\n", "recipe/qwen3-tiny"),
            (
                "defaults: [qwen3-tiny]\ngpus: 1\ngpus: 2\n",
                "is not valid YAML: line 3, column 1: found duplicate key gpus",
            ),
        ],
    )
    def test_a_broken_file_says_what_is_broken(self, tmp_path: Path, text: str, reason: str) -> None:
        path = mine(tmp_path, text)
        (problem,) = problems(f"recipe={path}").values()
        assert reason in problem.reason
        assert "mine.yaml" in problem.key
        assert "canzona-" not in problem.reason, "our temporary folder is nobody's business"

    def test_a_file_that_chooses_no_groups_says_which(self, tmp_path: Path) -> None:
        path = mine(tmp_path, "gpus: 2\n")
        (problem,) = problems(f"recipe={path}").values()
        assert problem.reason == "has no value for model, train, cluster"
        assert "`defaults: [qwen3-tiny]`" in problem.fix
        path.write_text("train: {steps: 10, stesp: 3}\n")
        found = problems(f"recipe={path}")
        assert found.pop("train.stesp").value == 3
        assert [problem.reason[:30] for problem in found.values()] == ["has no value for gpus, model, "]

    def test_a_mistake_in_a_file_names_the_file(self, tmp_path: Path) -> None:
        path = mine(tmp_path, "defaults: [qwen3-tiny]\ntrain: {steps: many, stepz: 1}\n")
        found = problems(f"recipe={path}")
        assert "mine.yaml" in found["train.steps"].reason
        assert "mine.yaml" in found["train.stepz"].reason

    @pytest.mark.parametrize("name", ["[muon]", "{muon: 1}", "5"])
    def test_a_name_of_an_optimizer_that_is_not_text_is_refused(self, tmp_path: Path, name: str) -> None:
        text = f"optimizer: {{name: {name}, lr: 0.1}}\n"
        path = mine(tmp_path, f"defaults: [qwen3-tiny]\n{text}")
        (tmp_path / "config.yaml").write_text(text)
        for refusals in (problems(f"recipe={path}").values(), refused(load_resolved, tmp_path / "config.yaml")):
            assert "is not one of its choices" in {each.reason for each in refusals if each.key == "optimizer.name"}

    def test_a_missing_file_and_folder(self, tmp_path: Path) -> None:
        assert "no such file" in problems(f"recipe={tmp_path}/no.yaml")["recipe"].reason
        assert "no such folder" in problems("recipe=tiny", recipes_dirs=(tmp_path / "no",))["--recipes-dir"].reason


def test_load_resolved_tells_all_problems(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = dump_resolved(compose_run(["recipe=tiny"]).config)
    path.write_text(text.replace("gpus: 2", "gpus: two").replace("seed: 1234", "seed: 1.5"))
    problems = refused(load_resolved, path)
    assert {problem.key for problem in problems} == {"gpus", "train.seed"}


def test_a_default_that_no_file_mentions_can_be_referred_to() -> None:
    composed = compose_run(["recipe=tiny", "train.steps=${train.seed}", "run.dir=${run.root}/x"])
    assert composed.config.train.steps == composed.config.train.seed
    assert composed.config.run.dir == "runs/x"


def test_a_setting_given_twice_says_which_value_is_left_out() -> None:
    composed = compose_run(["recipe=tiny", "gpus=2", "train.steps=9", "train.steps=9", "gpus=4"])
    assert composed.config.gpus == 4
    assert composed.warnings == ("gpus=2 is ignored: gpus=4 comes after it",)


def test_a_recipe_that_builds_on_itself_is_refused_and_by_its_path_it_builds_on_the_built_in(tmp_path: Path) -> None:
    text = "# @package _global_\ndefaults: [qwen3-tiny]\ntrain: {steps: 7}\n"
    path = recipe(tmp_path, "qwen3-tiny", text)
    (problem,) = problems("recipe=qwen3-tiny", recipes_dirs=(tmp_path,)).values()
    assert problem.key == str(path)
    assert "builds on itself" in problem.reason
    composed = compose_run([f"recipe={path}"])
    assert composed.config.train.steps == 7
    assert len(composed.warnings) == 1


def test_a_file_beside_is_what_a_name_without_its_ending_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my200m.yaml").write_text("defaults: [qwen3-tiny, _self_]\n", encoding="utf-8")
    assert problems("recipe=my200m")["recipe"].fix == "write recipe=./my200m.yaml"


def test_a_folder_of_recipes_and_nothing_else_is_a_recipes_dir(tmp_path: Path) -> None:
    (tmp_path / "qwen3-tiny.yaml").write_text("defaults: [qwen3-tiny, _self_]\ntrain: {steps: 7}\n", encoding="utf-8")
    found = compose_run(["recipe=tiny", "train.seed=3"], recipes_dirs=(tmp_path,))
    assert (found.config.train.steps, found.config.train.seed) == (7, 3)
    assert found.recipe_file == tmp_path / "qwen3-tiny.yaml"
    mine, *builtin = list_recipes((tmp_path,))
    assert (mine.name, mine.shadows, mine.error) == ("qwen3-tiny", True, "")
    assert len(builtin) == len(BUILTIN) - 1


def test_a_runs_own_configuration_repeats_it_somewhere_else(tmp_path: Path) -> None:
    home = tmp_path / "A"
    home.mkdir()
    config = compose_run(["recipe=tiny", "run.dir=A"]).config
    (home / "config.yaml").write_text(dump_resolved(config), encoding="utf-8")
    assert compose_run([f"recipe={home / 'config.yaml'}"]).config == replace(config, run=replace(config.run, dir=None))
    assert compose_run([f"recipe={home / 'config.yaml'}", "run.dir=A"]).config == config


FACTORS = (
    (("recipe=qwen3-30b-a3b",), 1024),
    (("recipe=qwen3-235b-a22b",), 1536),
    (("recipe=qwen3-moe-tiny",), 1024),
    (("recipe=qwen3-moe-tiny", "optimizer.max_preconditioner_dim=2048"), 2048),
    (("recipe=qwen3-8b",), 8192),
)


@pytest.mark.parametrize(
    ("optimizer", "given", "longest"),
    [
        *(("soap", *case) for case in FACTORS),
        ("shampoo", *FACTORS[1]),
    ],
)
def test_experts_have_factors_as_long_as_they_are_wide(optimizer: str, given: tuple[str, ...], longest: int) -> None:
    """SOAP of the 30B model would have 906 GB of factors instead of 109 if they had the hidden size."""
    chosen = compose_run([*given, f"optimizer={optimizer}"]).config.optimizer
    assert isinstance(chosen, KroneckerConfig)
    assert chosen.max_preconditioner_dim == longest
