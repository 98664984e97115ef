"""Values that cannot work together, or would not be trained, are refused; the rest without effect is warned of."""

from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.config.resolve import resolve
from canzona_cli.core.errors import ConfigError
from tests.refusals import refused

OWN = ("recipe=tiny", "optimizer=custom", "optimizer.source=torch.optim:SGD", "optimizer.allow=[torch]")
IMPOSSIBLE = [
    ("optimizer=shampoo engine=layerwise", "engine.strategy"),
    ("optimizer=soap engine.strategy=layerwise", "engine.strategy"),
    ("optimizer=custom optimizer.source=here.py:Own engine=layerwise", "engine.strategy"),
    ("engine=layerwise train.precision=fp32", "train.precision"),
    ("optimizer=soap optimizer.stack=true", "optimizer.stack"),
    ("optimizer.source=here.py:Own", "optimizer.source"),
    ("optimizer=custom", "optimizer.source"),
    ("optimizer=custom optimizer.source=Own", "optimizer.source"),
    ("optimizer=custom optimizer.source=here.py:Own()", "optimizer.source"),
    ("optimizer=custom optimizer.source=absent.py:Own", "optimizer.source"),
    ("optimizer=custom optimizer.source=package.module:Own", "optimizer.source"),
    ("optimizer=custom optimizer.source=package.module:Own optimizer.allow=[pack]", "optimizer.source"),
    ("optimizer=custom optimizer.allow=package", "optimizer.allow"),
    ("optimizer.min_lr_ratio=2", "optimizer.min_lr_ratio"),
    ("optimizer.min_lr=0.001", "optimizer.min_lr"),
    ("schedule.warmup_steps=150", "schedule.warmup_steps"),
    ("data.validation_fraction=0", "data.validation_fraction"),
    ("data=prepared", "data.path"),
    ("model.vocab_size=128", "model.vocab_size"),
    ("model.head_dim=31", "model.head_dim"),
    ("model.positions=128", "train.seq_length"),
    ("model.biases=true model.num_experts=8", "model.biases"),
    ("cluster.reserved_gib=99", "cluster.reserved_gib"),
    ("cluster.transformer_engine=true", "cluster.transformer_engine"),
    ("cluster.rdzv_endpoint=here", "cluster.rdzv_endpoint"),
    ("name=../../etc", "name"),
    ("parallel.tp=8", "parallel.tp"),
    ("parallel.pp=5", "parallel.pp"),
    ("parallel.sequence_parallel=true parallel.tp=1", "parallel.sequence_parallel"),
    ("engine.layout=owner", "engine.layout"),
    ("engine.grouping=greedy", "engine.grouping"),
    ("engine=sc engine.muon_tp_mode=layer_sharded", "engine.muon_tp_mode"),
    ("engine=layerwise engine.muon_tp_mode=layer_sharded", "engine.muon_tp_mode"),
    # It computes another update.
    ("engine=layerwise engine.muon_tp_mode=blockwise", "engine.muon_tp_mode"),
    ("cluster.matmul_tflops=[[2048,1.1],[1024,0.9]]", "cluster.matmul_tflops"),
    ("cluster.matmul_tflops=[1024,2048]", "cluster.matmul_tflops"),
]


@pytest.mark.parametrize(("override", "key"), IMPOSSIBLE)
def test_what_cannot_work_is_named_with_its_reason_and_a_fix(override: str, key: str) -> None:
    problems = refused(compose_run, ["recipe=tiny", *override.split()])
    (problem,) = (problem for problem in problems if problem.key == key)
    assert problem.reason
    assert problem.fix


def test_a_wsd_decay_longer_than_the_run() -> None:
    with pytest.raises(ConfigError, match="after the warm-up"):
        compose_run(["recipe=tiny", "schedule.decay=wsd", "schedule.wsd_decay_steps=145"])


@pytest.mark.parametrize(
    "override",
    [
        *("train.precision=fp32 engine=sc", "optimizer=adamw train.precision=fp32", "train.precision=fp32"),
        *("optimizer=shampoo", "optimizer=soap engine=asc", "optimizer=soap train.precision=fp32"),
        *("engine.mode=hosted engine.reduction=ring", "train.non_finite=skip"),
        *("optimizer.stack=true", "optimizer.min_lr_ratio=0", "train.steps=11"),
        "optimizer=custom optimizer.source=torch.optim:SGD optimizer.allow=[torch]",
        *("optimizer=shampoo engine=sc", "optimizer=soap engine=sc train.precision=fp32"),
        "optimizer=custom optimizer.source=torch.optim:SGD optimizer.allow=[torch] engine=sc",
    ],
)
def test_what_works_passes(override: str) -> None:
    compose_run(["recipe=tiny", *override.split()])


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_a_run_may_be_as_short_as_one_step(steps: int) -> None:
    assert compose_run(["recipe=32b", f"train.steps={steps}"]).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "ignored"),
    [
        ("optimizer=adamw engine.strategy=sc", "engine.strategy"),
        ("train.batch_tokens=512 train.global_batch_size=8", "train.batch_tokens"),
        ("engine=sc engine.mode=hosted", "engine.mode"),
        ("optimizer=adamw engine.splitting=fused", "engine.splitting"),
        ("engine.strategy=layerwise engine.alpha=0.5", "engine.alpha"),
        ("optimizer=adamw engine.mode=hosted", "engine.mode"),
        ("engine.strategy=sc engine.c_max_mib=64", "engine.c_max_mib"),
        ("engine.strategy=sc engine.reduction=reduce", "engine.reduction"),
        ("engine.strategy=layerwise engine.plan=absent.json", "engine.plan"),
        ("optimizer=adamw engine.exchange_dtype=bf16", "engine.exchange_dtype"),
        ("engine=sc parallel.tp=1 engine.exchange_dtype=bf16", "engine.exchange_dtype"),
        ("engine=sc engine.exchange_dtype=fp32", "engine.exchange_dtype"),
        ("engine=sc optimizer.stack=true", "optimizer.stack"),
        ("engine=layerwise optimizer.graph=true", "optimizer.graph"),
        ("parallel.tp=1 engine.exchange_dtype=bf16", "engine.exchange_dtype"),
        ("optimizer=soap engine=sc engine.mode=hosted", "engine.mode"),
        ("optimizer.graph=true", "optimizer.graph"),
        ("parallel.dispatcher=allgather", "parallel.dispatcher"),
        ("engine=canzona engine.alpha=0.5", "engine.alpha"),
        ("engine=asc engine.alpha=0.5", "engine.alpha"),
        ("engine.muon_tp_mode=layer_sharded", "engine.muon_tp_mode"),
        ("engine=sc parallel.tp=1 engine.muon_tp_mode=distributed", "engine.muon_tp_mode"),
        ("optimizer=soap engine=sc engine.muon_tp_mode=distributed", "engine.muon_tp_mode"),
        ("optimizer=adamw engine.muon_tp_mode=distributed", "engine.muon_tp_mode"),
    ],
)
def test_a_setting_without_effect_is_a_warning(overrides: str, ignored: str) -> None:
    (warning,) = compose_run(["recipe=tiny", *overrides.split()]).warnings
    assert warning.startswith(f"{ignored} is ignored")


UNUSED = [
    ("schedule.wsd_decay_steps=5", "schedule.wsd_decay_steps"),
    ("schedule.decay=constant optimizer.min_lr_ratio=0.2", "optimizer.min_lr_ratio"),
    ("schedule.decay=constant schedule.decay_steps=50", "schedule.decay_steps"),
    ("data=stdlib-bytes data.path=x", "data.path"),
    ("data.source=stdlib data.blend={x:1}", "data.blend"),
    ("data=prepared data.path=x data.tokenizer=byte", "data.tokenizer"),
    ("train.precision=fp32 train.grad_reduce_dtype=bf16", "train.grad_reduce_dtype"),
    ("engine=sc train.non_finite=skip", "train.non_finite"),
    ("optimizer=adamw train.non_finite=stop", "train.non_finite"),
    ("engine=sc parallel.tp=2 engine.exchange_dtype=bf16", "engine.exchange_dtype"),
    ("optimizer=soap engine=sc engine.exchange_dtype=bf16", "engine.exchange_dtype"),
    ("engine=sc engine.splitting=split", "engine.splitting"),
    ("engine=layerwise engine.splitting=per_head", "engine.splitting"),
    ("engine=sc optimizer.form=gram", "optimizer.form"),
    ("data.validation=x", "data.validation"),
    ("data.path=x data.validation=y data.validation_fraction=0.1", "data.validation_fraction"),
    ("engine=layerwise optimizer.form=gram", "optimizer.form"),
]


@pytest.mark.parametrize(("overrides", "key"), UNUSED)
def test_what_was_typed_and_would_not_be_trained_is_refused(overrides: str, key: str) -> None:
    (problem,) = refused(compose_run, ["recipe=tiny", *overrides.split()])
    assert problem.key == key
    assert problem.fix


@pytest.mark.parametrize("typed", ["data.path=x", "data.blend={x:1,y:2}"])
@pytest.mark.parametrize("recipe", ["tiny", "0.6b"])
def test_prepared_data_that_are_typed_are_trained_on(recipe: str, typed: str) -> None:
    composed = compose_run([f"recipe={recipe}", typed])
    assert composed.config.data == compose_run([f"recipe={recipe}", "data=prepared", typed]).config.data
    assert composed.config.data.source == "prepared"
    assert composed.warnings == ()


def test_prepared_data_that_a_recipe_names_are_trained_on_unless_others_are_typed(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [qwen3-tiny]\ndata: {path: x}\n", encoding="utf-8")
    assert compose_run([f"recipe={recipe}"]).config.data == compose_run(["recipe=tiny", "data.path=x"]).config.data
    assert compose_run([f"recipe={recipe}", "data=stdlib-bytes"]).config.data.source == "stdlib"


def test_a_number_of_tokens_that_is_typed_counts_in_a_run_that_is_repeated(tmp_path: Path) -> None:
    """A run's own settings have the number of sequences that was chosen for it."""
    repeated = tmp_path / "config.yaml"
    first = resolve(compose_run(["recipe=tiny"]).config)[0]
    repeated.write_text(dump_resolved(first), encoding="utf-8")
    assert first.train.global_batch_size == 16
    config = compose_run([f"recipe={repeated}", "train.batch_tokens=8192"]).config
    assert resolve(config)[0].train.global_batch_size == 32


@pytest.mark.parametrize(
    "overrides",
    [
        *("engine.splitting=fused engine=sc", "engine.splitting=qkv engine=layerwise", "engine.splitting=per_head"),
        *(
            "engine=layerwise engine.muon_tp_mode=distributed",
            "engine=sc parallel.tp=2 engine.muon_tp_mode=distributed",
        ),
        *("parallel.tp=2 engine.exchange_dtype=bf16", "engine.exchange_dtype=bf16", "engine.plan=some.json"),
        # Every rank updates everything, but by canzona's own engine.
        *("optimizer=soap engine=sc engine.splitting=split", "optimizer=shampoo engine=sc train.non_finite=skip"),
        # What contradicts nothing.
        *("schedule.decay=wsd schedule.wsd_decay_steps=5", "schedule.wsd_decay_steps=null", "data.path=null"),
        *("schedule.decay=constant", "train.batch_tokens=512 train.global_batch_size=null"),
        "engine=paper engine.alpha=0.5",
        *("train.precision=fp32 train.grad_reduce_dtype=fp32", "data=stdlib-bytes data.path=null"),
    ],
)
def test_a_setting_with_an_effect_is_no_warning(overrides: str) -> None:
    assert compose_run(["recipe=tiny", *overrides.split()]).warnings == ()


def test_an_own_optimizer_in_a_file_is_looked_for_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("class Own: ...", encoding="utf-8")
    for source in ("own.py:Own", f"{tmp_path}/own.py:Own"):
        monkeypatch.chdir(tmp_path)
        compose_run(["recipe=tiny", "optimizer=custom", f"optimizer.source={source}"])
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match=r"there is no file own\.py in /"):
        compose_run(["recipe=tiny", "optimizer=custom", "optimizer.source=own.py:Own"])


def test_a_package_that_is_not_allowed_is_offered_beside_those_that_are() -> None:
    (problem,) = refused(
        compose_run, ["recipe=tiny", "optimizer=custom", "optimizer.source=b.c:Own", "optimizer.allow=[a]"]
    )
    assert "optimizer.allow=[a,b]" in problem.fix


@pytest.mark.parametrize("name", ["lr", "weight_decay", "params"])
@pytest.mark.parametrize("typed", ["optimizer.options.{}=1", "optimizer.options={{{}:1}}"])
def test_an_option_that_canzona_gives_itself_is_refused(typed: str, name: str) -> None:
    (problem,) = refused(compose_run, [*OWN, typed.format(name)])
    assert problem.key == f"optimizer.options.{name}"
    assert "canzona itself" in problem.reason


def test_why_megatrons_layerwise_takes_no_other_optimizer_is_told() -> None:
    why = {"soap": "ignores optimizer.precondition_frequency", "shampoo": "does not support shampoo"}
    for optimizer, words in why.items():
        with pytest.raises(ConfigError, match=words):
            compose_run(["recipe=tiny", f"optimizer={optimizer}", "engine=layerwise"])


def test_a_plan_needs_no_class_of_an_own_optimizer() -> None:
    compose_run(["recipe=tiny", "optimizer=custom"], training=False)


def test_a_plan_heeds_settings_that_training_ignores() -> None:
    composed = compose_run(["recipe=tiny", "engine.strategy=layerwise", "engine.alpha=0.5"], training=False)
    assert composed.warnings == ()


def test_a_mode_that_megatron_does_not_have_yet_can_be_planned_with() -> None:
    settings = ["recipe=tiny", "engine=layerwise", "parallel.tp=2", "engine.muon_tp_mode=layer_sharded"]
    assert compose_run(settings, training=False).warnings == ()
    (problem,) = refused(compose_run, settings)
    assert "duplicated or distributed" in problem.fix


def test_a_learned_tokenizer_fits_every_vocabulary() -> None:
    assert compose_run(["recipe=tiny", "data=stdlib-bpe"]).config.bpe_ids == 384
    assert compose_run(["recipe=qwen3-0.6b"]).config.bpe_ids == 16384
    (problem,) = refused(compose_run, ["recipe=tiny", "data=stdlib-bpe", "model.vocab_size=128"])
    assert problem.key == "model.vocab_size"
