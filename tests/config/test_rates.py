"""Learning rates: which one counts of a recipe's, that of the recipe it starts from, and a typed one."""

from pathlib import Path

import pytest

from canzona_cli.config.changes import changes
from canzona_cli.config.compose import compose_run, dump_resolved
from canzona_cli.config.overrides import parse_overrides
from canzona_cli.config.recipes import recipe_text, short_recipe_text
from canzona_cli.config.resolve import swept_runs
from canzona_cli.core.errors import ConfigError
from canzona_cli.core.setup import AdamWConfig
from canzona_cli.core.setup.execution import with_strategy

CUSTOM = ("optimizer=custom", "optimizer.source=torch.optim:SGD", "optimizer.allow=[torch]")


def test_a_recipe_may_have_a_learning_rate_for_each_optimizer() -> None:
    """It counts unless one is typed, the minimum follows it, and what is written down has one rate alone."""

    def rates(*overrides: str) -> tuple[float, float]:
        own = compose_run(["recipe=qwen3-tiny", *overrides], training=False).config.optimizer
        assert own.lrs == {}
        return own.lr, own.min_lr

    assert rates() == (0.005, 0.0005)
    assert rates("optimizer=soap") == (0.001, 0.0001)
    assert rates("optimizer=soap", "optimizer.lr=0.004") == (0.004, 0.0004)
    assert rates("optimizer=soap", "optimizer.min_lr_ratio=0.5") == (0.001, 0.0005)
    assert rates("optimizer=normuon", "optimizer.lrs={normuon:0.003}") == (0.003, 0.0003)
    assert rates("optimizer.lr=0.004", "optimizer.lrs={muon:0.003}") == (0.004, 0.0004)
    with pytest.raises(ConfigError, match=r"optimizer\.lrs"):
        rates("optimizer.lrs={mouon:0.003}")


def test_a_custom_optimizer_begins_with_the_rate_of_adamw_unless_it_has_one_itself() -> None:
    """The recipe's rate is Muon's, which lets most other updates diverge; the warning names what was taken."""

    def rate(*overrides: str) -> tuple[float, float, int]:
        run = compose_run(["recipe=qwen3-tiny", *CUSTOM, *overrides])
        return run.config.optimizer.lr, run.config.optimizer.min_lr, len(run.warnings)

    recipe = compose_run(["recipe=qwen3-tiny"]).config.optimizer.lr
    adamw = compose_run(["recipe=qwen3-tiny", "optimizer=adamw"]).config.optimizer.lr
    assert rate() == (adamw, 0.0001, 2)
    assert adamw < recipe
    assert rate("optimizer.lrs={custom:0.01}")[:2] == (0.01, 0.001)
    assert rate("optimizer.lr=0.05", "optimizer.cost_like=adamw") == (0.05, 0.005, 0)
    (warning,) = compose_run(["recipe=qwen3-8b", *CUSTOM, "optimizer.cost_like=adamw"]).warnings
    assert warning.startswith("optimizer.lr=0.0005 comes from the recipe")


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [
        ("", (0.001, 0.0001)),
        ("optimizer.lr=0.004", (0.004, 0.0004)),
        ("optimizer.lr=0.003 optimizer.min_lr_ratio=0.5", (0.003, 0.0015)),
    ],
)
def test_a_short_recipe_is_as_good_as_overrides(overrides: str, rates: tuple[float, float], tmp_path: Path) -> None:
    """The recipe's values count although the recipe it starts from has a rate for SOAP and a ratio."""
    values = parse_overrides(overrides.split()).values
    (tmp_path / "mine.yaml").write_text(short_recipe_text("mine", "qwen3-tiny", {"optimizer": "soap"}, values))
    typed = compose_run(["recipe=qwen3-tiny", "optimizer=soap", *overrides.split()]).config.optimizer
    written = compose_run([f"recipe={tmp_path / 'mine.yaml'}"]).config.optimizer
    assert (typed.lr, typed.min_lr) == (written.lr, written.min_lr) == rates


def test_what_a_short_recipe_sets_and_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "base.yaml").write_text(
        "# @package _global_\ndefaults: [qwen3-tiny]\ntrain: {global_batch_size: 32}\n"
    )
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [base]\noptimizer: {lr: 0.003}\ntrain: {batch_tokens: 2048}\n"
    )

    def run(*overrides: str) -> tuple[float, float, int | None]:
        config = compose_run(["recipe=mine", *overrides], recipes_dirs=(tmp_path,)).config
        return config.optimizer.lr, config.optimizer.min_lr, config.train.global_batch_size

    assert run() == (0.003, 0.0003, None)
    assert run("optimizer=soap")[0] == 0.001, "the recipe's rate is Muon's"
    assert run("optimizer.lrs={muon:0.004}")[0] == 0.004
    assert run("optimizer.lr=0.001", "train.global_batch_size=8") == (0.001, 0.0001, 8)


def _adamw(*overrides: str, recipe: str = "llama3-tiny") -> tuple[float, float, float]:
    """The rate, the minimum and the weight decay of parameters that are not matrices."""
    rates = compose_run([f"recipe={recipe}", *overrides], training=False).config.optimizer.adamw_rates
    return rates.lr, rates.min_lr, rates.weight_decay


def test_adamw_has_the_rates_of_matrices_unless_they_are_set_apart() -> None:
    assert _adamw() == (0.005, 0.0005, 0.1)
    assert _adamw("optimizer=soap", "optimizer.lr=0.004") == (0.004, 0.0004, 0.1)
    assert _adamw("optimizer.adamw_lr=0.001") == pytest.approx((0.001, 0.0001, 0.1))
    assert _adamw("optimizer.adamw_lr=0.001", "optimizer.min_lr_ratio=0.5") == (0.001, 0.0005, 0.1)
    assert _adamw("optimizer.adamw_lr_ratio=0.2", "optimizer.lr=0.004") == (0.0008, 0.00008, 0.1)
    assert _adamw("optimizer.adamw_weight_decay=0") == (0.005, 0.0005, 0.0)
    with pytest.raises(ConfigError, match="keep one"):
        _adamw("optimizer.adamw_lr=0.001", "optimizer.adamw_lr_ratio=0.2")


def test_a_recipes_rate_of_adamw_counts_for_every_optimizer_unless_one_is_typed() -> None:
    assert _adamw(recipe="qwen3-tiny") == _adamw("optimizer=soap", recipe="qwen3-tiny") == (0.02, 0.002, 0.1)
    assert _adamw("optimizer.lr=0.004", recipe="qwen3-tiny") == (0.02, 0.002, 0.1)
    assert _adamw("optimizer.adamw_lr_ratio=0.2", recipe="qwen3-tiny") == (0.001, 0.0001, 0.1)


def test_a_rate_of_adamw_outlives_an_optimizer_and_a_sweep(tmp_path: Path) -> None:
    """So that optimizers are compared, and not the rates of embeddings."""
    own = tmp_path / "own.yaml"
    own.write_text(dump_resolved(compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr=0.003"]).config))
    swept = swept_runs([f"recipe={own}", "optimizer.lr=1e-4,2e-2"], [])
    assert [(run.config.optimizer.lr, run.config.optimizer.adamw_lr) for run in swept] == [(1e-4, 0.003), (2e-2, 0.003)]
    baseline = with_strategy(swept[1].config.setup, "adamw").optimizer
    assert isinstance(baseline, AdamWConfig)
    assert baseline.adamw_rates == swept[1].config.optimizer.adamw_rates


def test_a_resumed_run_says_what_became_of_both_rates() -> None:
    old = compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr_ratio=0.2"]).config
    new = compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr_ratio=0.2", "optimizer.lr=0.004"]).config
    alone = compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr=null"]).config
    assert [line.partition(" now")[0] for line in changes(old, new, step=5).warnings] == [
        "optimizer.adamw_lr is 0.0008",
        "optimizer.lr is 0.004",
    ]
    assert changes(alone, old, step=5).warnings == ("optimizer.adamw_lr is 0.001 now; up to step 5 it was null",)


def test_only_optimizers_whose_matrices_have_moments_have_betas_of_adamw() -> None:
    soap = compose_run(["recipe=qwen3-tiny", "optimizer=soap", "optimizer.adamw_beta2=0.9"]).config.optimizer
    assert (soap.beta2, soap.adamw_betas) == (0.95, (0.9, 0.9))
    with pytest.raises(ConfigError, match=r"optimizer\.adamw_beta2: muon has no such setting"):
        compose_run(["recipe=qwen3-tiny", "optimizer.adamw_beta2=0.9"])


def test_a_rate_of_adamw_that_diverges_is_warned_about() -> None:
    (warning,) = compose_run(["recipe=qwen3-tiny", "optimizer.adamw_lr=0.3"]).warnings
    assert warning.startswith("optimizer.adamw_lr=0.3 is above 0.1")


def test_a_complete_copy_keeps_its_values_for_the_optimizer_that_it_names(tmp_path: Path) -> None:
    """Another optimizer has values of its own, and that is said."""
    copy = compose_run(["recipe=qwen3-tiny", "optimizer.clip_grad=0.3"]).config
    (tmp_path / "mine.yaml").write_text(recipe_text(copy, origin="qwen3-tiny"))
    mine = f"recipe={tmp_path}/mine.yaml"
    same, other = compose_run([mine, "optimizer=muon"]), compose_run([mine, "optimizer=soap"])
    assert same.config.optimizer == compose_run([mine]).config.optimizer
    assert (same.config.optimizer.lr, same.config.optimizer.clip_grad) == (0.005, 0.3)
    assert not any("values of its own" in warning for warning in same.warnings)
    assert any(
        f"optimizer=soap has values of its own, lr {other.config.optimizer.lr:g}" in one for one in other.warnings
    )
    typed = compose_run([mine, "optimizer=soap", "optimizer.lr=0.001"])
    assert not any("values of its own" in warning for warning in typed.warnings)
