"""Every setting says at its field what it means, which numbers it admits, and what a change of it affects."""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, get_args, get_origin, get_type_hints

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from canzona_cli.config.changes import changes
from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import parse_overrides
from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import Setting, setting_of, settings, settings_affecting
from canzona_cli.config.typed import build
from canzona_cli.config.unknown_keys import closest_key, hints, renamed, unknown_key
from canzona_cli.core.fields import CURVE, LAYOUT, MODEL, NOTHING, OPTIMIZER, PLAN, SPREAD, Range
from canzona_cli.core.setup import OPTIMIZERS, Layout
from tests.refusals import refused

SETTINGS = [*settings().values()]
TREE: dict[str, object] = asdict(compose_run(["recipe=tiny"]).config)
BOUNDED = [
    setting
    for setting in SETTINGS
    if setting.range != Range() and (not setting.optimizers or "muon" in setting.optimizers)
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_field_says_what_it_means_and_what_it_affects(setting: Setting) -> None:
    assert setting.help.endswith("."), f"{setting.key} needs a sentence of help in its Annotated[...]"
    assert "\n" not in setting.meaning
    assert setting.affects is not None, (
        f"{setting.key} must say what a change of it affects: NOTHING, CURVE | PLAN, ..."
    )
    resumed = setting.affects & ~PLAN
    assert resumed in (NOTHING, CURVE, SPREAD, LAYOUT, MODEL, OPTIMIZER, OPTIMIZER | CURVE)


def test_a_setting_that_is_auto_or_a_boolean_lists_both() -> None:
    """A bare value of another type used to be called a list."""
    (problem,) = refused(compose_run, ["recipe=tiny", "optimizer.stack=maybe"])
    assert (problem.reason, problem.fix) == ("is not one of its choices", "use one of auto, true, false")


def test_a_meaning_ends_with_the_unit_that_follows_from_the_name() -> None:
    assert settings()["cluster.memory_gib"].meaning.endswith("CPU rank. In GiB.")
    assert settings()["run.hang_timeout_s"].meaning.endswith("no limit. In seconds.")
    assert "In " not in settings()["train.steps"].meaning


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_number_has_a_range_that_its_default_is_in(setting: Setting) -> None:
    if setting.kind not in ("integer", "number"):
        assert setting.range == Range()
        return
    lowest, highest = max(setting.range.above, setting.range.at_least), min(setting.range.below, setting.range.at_most)
    assert -math.inf < lowest < highest < math.inf, f"{setting.key} admits numbers that no arithmetic is made for"
    if setting.default is not None:
        assert isinstance(setting.default, int | float)
        assert setting.default in setting.range


@pytest.mark.parametrize("setting", BOUNDED, ids=lambda setting: setting.key)
def test_a_number_out_of_its_range_is_refused_with_a_value_that_is_in_it(setting: Setting) -> None:
    limits = setting.range
    too_low = limits.above if math.isfinite(limits.above) else limits.at_least - 1
    too_high = limits.below if math.isfinite(limits.below) else limits.at_most + 1
    section, _, name = setting.key.rpartition(".")
    for value in (too_low, too_high, -(10**400), 10**400):
        value = value if setting.kind == "number" or abs(value) > 10**300 else int(value)
        own = TREE[section] if section else {}
        assert isinstance(own, dict)
        found = build(TREE | ({section: own | {name: value}} if section else {name: value}), texts={}, where="a file")
        assert isinstance(found, list)
        (problem,) = found
        assert (problem.key, problem.value) == (setting.key, value)
        assert problem.reason == f"must be {limits.words(value)} (in a file)"
        assert f"{setting.key}=" in problem.fix
        assert ("or more" in problem.fix or "or less" in problem.fix) == (setting.kind == "integer")


def _numbers(hint: object, bounded: bool = False) -> Iterator[bool]:
    """Yields, for each number in a type, whether it has a range."""
    if get_origin(hint) is Annotated:
        inner, *marks = get_args(hint)
        yield from _numbers(inner, bounded or any(isinstance(mark, Range) for mark in marks))
    elif hint in (int, float):
        yield bounded
    else:
        yield from (found for part in get_args(hint) for found in _numbers(part))


def test_numbers_inside_lists_and_mappings_have_ranges_too() -> None:
    own = {
        f"{owner.__name__}.{name}"
        for owner in (*(get_type_hints(RunConfig).values()), *OPTIMIZERS.values(), Layout)
        if is_dataclass(owner) and isinstance(owner, type)
        for name, hint in get_type_hints(owner, include_extras=True).items()
        if get_origin(hint) is not ClassVar and not all(_numbers(hint))
    }
    assert own == {"CustomConfig.options", "ClusterConfig.measured_on"}, "a user's own class judges what it is given"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("cluster.matmul_tflops=[[2048,1e300]]", "contains 1e+300, which must be at most 1,000,000,000"),
        ("cluster.collectives=[[all_reduce,2,1024,0,1]]", "contains 0, which must be above 0"),
        ("cluster.step_factors={exchange:0}", "contains 0, which must be above 0"),
        ("cluster.step_factors={exchange:1e-7}", "contains 1e-07, which must be at least 1e-06"),
        ("run.profile_steps=[0,5]", "contains 0, which must be at least 1"),
    ],
)
def test_a_number_inside_a_list_or_mapping_is_refused_with_its_bound(override: str, said: str) -> None:
    (problem,) = refused(compose_run, ["recipe=tiny", override])
    assert problem.key.startswith(override.partition("=")[0])
    assert problem.reason == said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=0", "must be above 0 and at most 1,000,000,000"),
        ("optimizer.lr=-1", "must be above 0 and at most 1,000,000,000"),
        ("optimizer.lr=1e-10", "must be at least 1e-09 and at most 1,000,000,000"),
        ("optimizer.weight_decay=-1", "must be at least 0 and at most 1,000,000,000"),
    ],
)
def test_a_bound_that_stands_for_zero_is_called_zero(override: str, said: str) -> None:
    problems = refused(compose_run, ["recipe=tiny", override])
    assert [problem.reason for problem in problems] == [said]


def test_what_a_recipe_itself_gives_out_of_range_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [qwen3-tiny]\ngpus: 3\noptimizer: {beta1: 2}\nparallel: {tp: 3}\ntrain: {eval_interval: many}\n"
    )
    problems = refused(compose_run, [f"recipe={path}"])
    assert {problem.key for problem in problems} == {
        "optimizer.beta1",
        "parallel.tp",
        "train.eval_interval",
    }
    assert all("mine.yaml" in problem.reason for problem in problems if problem.key != "parallel.tp")


def test_a_resumed_run_is_judged_by_what_its_settings_say() -> None:
    old = compose_run(["recipe=tiny"]).config
    new = replace(
        old,
        gpus=4,
        model=replace(old.model, head_dim=128),
        train=replace(old.train, seq_length=512, eval_interval=1),
        optimizer=replace(old.optimizer, lr=0.1),
    )
    found = changes(old, new, step=1_000)
    assert [problem.key for problem in found.problems] == ["model.head_dim"]
    assert found.warnings == (
        "optimizer.lr is 0.1 now; up to step 1,000 it was 0.005",
        "train.seq_length is 512 now; up to step 1,000 it was 256",
    )
    assert found.spread == ("gpus 2 -> 4",)
    other = changes(old, compose_run(["recipe=tiny", "optimizer=soap"]).config, step=1)
    assert [problem.key for problem in other.problems] == ["optimizer.name"]
    assert not other.warnings, "another optimizer's settings are no news"


def test_the_effects_that_matter_most_are_said() -> None:
    assert {"optimizer.lr", "train.seed", "schedule.decay", "data.source"} <= {*settings_affecting(CURVE)}
    assert {"engine.strategy", "gpus", "cluster.nodes"} <= {*settings_affecting(SPREAD)}
    assert {"num_layers", "qk_norm"} <= {*settings_affecting(MODEL, "model")}
    assert settings_affecting(LAYOUT) == ("parallel.tp", "parallel.pp", "parallel.vpp", "parallel.cp", "parallel.ep")


@pytest.mark.parametrize(("name", "key"), renamed().items())
def test_a_name_of_another_program_is_answered_with_a_setting_that_exists(name: str, key: str) -> None:
    assert key in settings() or key in GROUPS
    ours = {setting.rpartition(".")[2] for setting in settings()} - {"resume"}  # of a checkpoint, which names its run
    assert name not in ours
    value = f"={name}" if name in ("wsd", "cosine") else ""
    assert unknown_key(name, "1").fix == f"did you mean {key}{value}?"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gradient_accumulation_steps", "train.global_batch_size"),
        ("lora.rank", "does not have LoRA"),
        ("rampup_batch_size", "train.batch_rampup=[[SEQUENCES,STEPS],...]"),
        ("mtp_num_layers", "canzona does not have this"),
        ("train.tokens", "train.steps=N"),
        ("bf16", "train.precision=bf16"),
        ("num_train_epochs", "train.steps=N"),
        ("fsdp.cpu_offload", "does not have FSDP"),
        ("betas", "optimizer.beta1=B1 optimizer.beta2=B2"),
        ("optimizer.adam_betas", "optimizer.beta1=B1 optimizer.beta2=B2"),
        ("grad_accum_steps", "train.global_batch_size"),
        ("warmup_fraction", "schedule.warmup_steps=N"),
        ("use_flash_attn", "attention follows from the layers"),
    ],
)
def test_what_canzona_does_not_have_is_said(key: str, words: str) -> None:
    problem = unknown_key(key, "1")
    assert words in f"{problem.reason}; {problem.fix}"
    assert "did you mean" not in problem.fix


@pytest.mark.parametrize(("key", "value"), [("schedule.type", "wsd"), ("lr_scheduler", "wsd"), ("wsd", "true")])
def test_a_hint_has_the_value_where_the_setting_takes_it(key: str, value: str) -> None:
    assert unknown_key(key, value).fix == "did you mean schedule.decay=wsd?"


@pytest.mark.parametrize("far", ["flavour", "parallel.tensors", "attention_backend", "hub_id"])
def test_nothing_is_suggested_that_is_not_near(far: str) -> None:
    assert closest_key(far) is None


def test_spaces_around_the_sign_are_refused_with_what_to_write() -> None:
    parsed = parse_overrides(["optimizer.lr", "=", "1e-3", "gpus=2"])
    assert [(problem.key, problem.fix) for problem in parsed.problems[:1]] == [
        ("optimizer.lr", "write optimizer.lr=VALUE")
    ]
    assert {problem.reason for problem in parsed.problems} == {"is not of the form KEY=VALUE"}
    assert parsed.values == {"gpus": 2}


def test_a_list_of_options_needs_no_quotes_inside() -> None:
    """Hydra's grammar takes no `=` in a list; a command is typed as in a shell."""
    typed = ["cluster.command=[numactl,--membind=0-3,canzona]", "cluster.sbatch=[--gres=gpu:h100:8,--partition=a]"]
    parsed = parse_overrides(typed)
    assert not parsed.problems
    assert parsed.values["cluster.command"] == ["numactl", "--membind=0-3", "canzona"]
    assert parsed.values["cluster.sbatch"] == ["--gres=gpu:h100:8", "--partition=a"]
    assert parse_overrides(["cluster.command=['a b',--c=d]"]).problems, "quotes have to be right"


@pytest.mark.parametrize("key", hints("settings"))
def test_a_removed_setting_says_what_to_use(key: str) -> None:
    problem = unknown_key(key, "1")
    assert (key in settings(), problem.reason, problem.fix) == (False, "no longer exists", hints("settings")[key])
    assert all(setting_of(named) for named in re.findall(r"(?:write|use|set) (\w+\.\w+)", problem.fix))


@pytest.mark.parametrize(
    "text",
    [
        *("0", "8", "-3", "08", "1_0", "1.5", "-0.5", "1.", ".5", "1e-3", "1.5e3", "1E3"),
        *("abc", "a-b", "a.b", "h100-80g", "1-2", "a_b", "-", "NaN", "inf", "True", "null"),
    ],
)
def test_ordinary_values_are_read_as_by_hydra(text: str) -> None:
    expected = OverridesParser.create().parse_override(f"k={text}").value()
    value = parse_overrides([f"optimizer.options.x={text}"]).values["optimizer.options.x"]
    assert (type(value), repr(value)) == (type(expected), repr(expected))
