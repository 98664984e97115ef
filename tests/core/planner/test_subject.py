"""A plan is computed from the settings that say so at their field, and from no other."""

from dataclasses import replace
from typing import Any

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import Setting, settings
from canzona_cli.core.fields import PLAN
from canzona_cli.core.planner.make import subject
from canzona_cli.core.planner.plan import Subject
from canzona_cli.core.setup import OPTIMIZERS
from tests.sizes import layout

OWN = ("optimizer.source=torch.optim:SGD", "optimizer.allow=[torch]")
BASE: dict[str, RunConfig] = {
    name: compose_run(["recipe=tiny", f"optimizer={name}", *(OWN if name == "custom" else ())]).config
    for name in OPTIMIZERS
}
OTHERS: dict[str, object] = {
    "optimizer.options": {"momentum": 0.5},
    "cluster.matmul_tflops": ((64, 0.1),),
    "cluster.measured_updates": (("muon/standard/5", 64, 64, 0.1),),
    "cluster.collectives": (("all_reduce", 2, 8.0, 0.1, 0.0),),
    "cluster.step_factors": {"exchange": 2.0},
    "cluster.measured_on": {"cores": 3},
    "cluster.verified": ("gram",),
    "engine.strategy": "asc",
    "optimizer.graph": False,
}
"""Values other than the recipe's, where the type does not give one."""


def another(setting: Setting, value: Any) -> Any:
    if setting.key in OTHERS:
        return OTHERS[setting.key]
    match setting.kind:
        case "boolean":
            return not value
        case "integer":
            return value + 1 if isinstance(value, int) else 3
        case "number":
            return value / 2 + 0.125 if isinstance(value, int | float) else 3.0
        case "choice":
            return next(choice for choice in reversed(setting.choices) if choice != value)
        case "text":
            return "other"
        case _:
            return (1, 2)


def subject_of(config: RunConfig) -> Subject:
    parallel = config.parallel
    tp, pp, cp = parallel.tp or 1, parallel.pp or 1, parallel.cp or 1
    mesh = layout(tp=tp, pp=pp, vpp=parallel.vpp or 1, dp=config.gpus * 64 // (tp * pp * cp))
    return subject(config.setup, replace(mesh, cp=cp, ep=parallel.ep or 1, sequence_parallel=False))


@pytest.mark.parametrize("setting", settings().values(), ids=lambda setting: setting.key)
def test_what_a_setting_says_of_plans_is_so(setting: Setting) -> None:
    if setting.key == "optimizer.name":
        assert len({str(subject_of(config)) for config in BASE.values()}) == len(BASE)
        return
    anyone = not setting.optimizers or "muon" in setting.optimizers
    config = BASE["muon" if anyone else sorted(setting.optimizers)[-1]]
    if setting.key == "optimizer.graph":  # there are none on CPUs, nor on GPUs that have not shown them
        config = replace(config, cluster=replace(config.cluster, device="cuda", verified=("graphs",)))
    if setting.key == "engine.alpha":
        config = replace(config, engine=replace(config.engine, strategy="paper"))
    section, _, name = setting.key.rpartition(".")
    owner = getattr(config, section) if section else config
    values = {name: another(setting, getattr(owner, name))}
    other = replace(config, **({section: replace(owner, **values)} if section else values))
    assert setting.affects is not None
    assert (subject_of(other) != subject_of(config)) is (PLAN in setting.affects)
