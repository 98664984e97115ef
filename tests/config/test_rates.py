"""Learning rates: which one counts of a recipe's, that of the recipe it starts from, and a typed one."""

from pathlib import Path

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.overrides import parse_overrides
from canzona_cli.config.recipes import short_recipe_text
from canzona_cli.core.errors import ConfigError

CUSTOM = ("optimizer=custom", "optimizer.source=torch.optim:SGD", "optimizer.allow=[torch]")


def test_a_recipe_may_have_a_learning_rate_for_each_optimizer() -> None:
    """It counts unless one is typed, the minimum follows it, and what is written down has one rate alone."""

    def rates(*overrides: str) -> tuple[float, float]:
        own = compose_run(["recipe=qwen3-tiny", *overrides], training=False).config.optimizer
        assert own.lrs == {}
        return own.lr, own.min_lr

    assert rates() == (0.005, 0.0005)
    assert rates("optimizer=soap") == (0.002, 0.0002)
    assert rates("optimizer=soap", "optimizer.lr=0.004") == (0.004, 0.0004)
    assert rates("optimizer=soap", "optimizer.min_lr=0.001") == (0.002, 0.001)
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
    assert rate() == (adamw, 0.0002, 2)
    assert adamw < recipe
    assert rate("optimizer.lrs={custom:0.01}")[:2] == (0.01, 0.001)
    assert rate("optimizer.lr=0.05", "optimizer.cost_like=adamw") == (0.05, 0.005, 0)
    (warning,) = compose_run(["recipe=qwen3-8b", *CUSTOM, "optimizer.cost_like=adamw"]).warnings
    assert warning.startswith("optimizer.lr=0.0005 comes from the recipe")


@pytest.mark.parametrize(
    ("overrides", "rates"),
    [
        ("", (0.002, 0.0002)),
        ("optimizer.lr=0.004", (0.004, 0.0004)),
        ("optimizer.lr=0.003 optimizer.min_lr=0.001", (0.003, 0.001)),
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
    assert run("optimizer=soap")[0] == 0.002, "the recipe's rate is Muon's"
    assert run("optimizer.lrs={muon:0.004}")[0] == 0.004
    assert run("optimizer.lr=0.001", "train.global_batch_size=8") == (0.001, 0.0001, 8)
