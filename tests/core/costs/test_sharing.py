"""The matrices that TP ranks may update together."""

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.core.costs.sharing import mode_warnings
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.simulate import fit

TP2 = ("gpus=4", "parallel.tp=2", "parallel.pp=1", "engine.mode=shared")


@pytest.mark.parametrize(
    ("settings", "because"),
    [
        (("recipe=tiny", "optimizer.form=gram"), None),
        (("recipe=tiny", "optimizer.form=gram", "parallel.tp=1"), "parallel.tp is 1"),
        (("recipe=tiny", "optimizer=soap"), "optimizer soap"),
        (("recipe=tiny", "optimizer.form=standard"), "optimizer.form is the standard"),
        (("recipe=tiny", "optimizer.form=auto", "model.hidden_size=64", "train.precision=fp32"), "no matrix has"),
        (("recipe=tiny", "optimizer.form=gram", "engine=paper"), "engine.strategy is paper"),
        (("recipe=qwen3-moe-tiny", "optimizer.form=gram", "parallel.ep=1"), None),
        (("recipe=qwen3-moe-tiny", "optimizer.form=gram", "parallel.ep=2"), "parallel.ep is 2"),
    ],
    ids=str,
)
def test_a_run_says_why_its_plan_shares_nothing(settings: tuple[str, ...], because: str | None) -> None:
    typed = {each.split("=", 1)[0] for each in settings}
    defaults = [each for each in TP2 if each.split("=", 1)[0] not in typed]
    config, layout = fit.resolve(compose_run([*defaults, *settings], training=False).config.setup)
    warnings = [*mode_warnings(config, layout)]
    assert bool(make_plan(config, layout).assignment.shared_costs) is (because is None)
    assert [warning.startswith(f"engine.mode=shared is ignored: {because}") for warning in warnings] == (
        [] if because is None else [True]
    )
