"""Bench results by hand, with numbers as they come from four CPU ranks, for tests of reports."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from canzona_cli.bench.results import BenchResult, Measured, Predicted, StrategyBench
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.records.statistics import OverRanks
from tests.sizes import layout

PHASES = {
    "data": 0.0003,
    "forward": 0.212,
    "backward": 0.431,
    "grad_reduce": 0.018,
    "grad_reduce_total": 0.062,
    "norm_clip": 0.009,
    "exchange": 0.014,
    "exchange_total": 0.046,
    "matrix_update": 0.151,
    "adamw_update": 0.022,
    "param_gather": 0.011,
    "param_gather_total": 0.038,
    "other": 0.006,
}
UPDATES: Mapping[AnyStrategy, float] = {
    "canzona": 1.0,
    "paper": 1.02,
    "asc": 1.03,
    "layerwise": 2.2,
    "sc": 4.1,
    "adamw": 0.0,
}
WOBBLE = (1.0, 1.02, 0.99, 1.04, 0.98, 1.01)
"""The noise of six rounds. Only asc, whose times are close to canzona's, has the same noise in other rounds."""


def phases_of(strategy: AnyStrategy) -> dict[str, float]:
    """Seconds of a step, mean over ranks."""
    found = dict(PHASES)
    found["matrix_update"] *= UPDATES[strategy]
    if strategy in ("sc", "adamw"):
        del found["exchange"], found["exchange_total"]
    if strategy == "sc":
        del found["param_gather"], found["param_gather_total"]
    if strategy == "adamw":
        del found["matrix_update"]
        found["adamw_update"] *= 2
    return found


def measured(strategy: AnyStrategy, *, ranks: int = 4, scale: float = 1.0) -> Measured:
    found = {name: scale * seconds for name, seconds in phases_of(strategy).items()}
    step = sum(seconds for name, seconds in found.items() if not name.endswith("_total"))
    tail = ("norm_clip", "exchange", "matrix_update", "adamw_update", "param_gather")
    optimizer = sum(found.get(name, 0.0) for name in tail)
    update = found.get("matrix_update", 0.0)
    noise = (*WOBBLE[1:], *WOBBLE[:1]) if strategy == "asc" else WOBBLE
    wobbles = [value + 0.002 * (number % 3) * len(strategy) / 4 for number, value in enumerate(noise)]
    return Measured(
        iteration_s=tuple(step * wobble for wobble in wobbles),
        optimizer_s=tuple(optimizer * wobble for wobble in wobbles),
        processor_s=tuple(2.1 * step * wobble for wobble in wobbles),
        phases={name: OverRanks(min_s=0.9 * s, mean_s=s, max_s=1.12 * s) for name, s in found.items()},
        load_balance=1.04 if update else 1.0,
        losses=tuple(9.7 - 0.4 * step + 1e-5 * UPDATES[strategy] for step in range(8)),
        tensor_bytes=tuple((300 + 5 * rank) * 2**20 for rank in range(ranks)),
        update_s=tuple(update * (0.94 + 0.04 * rank) for rank in range(ranks)) if update else (),
    )


def predicted(strategy: AnyStrategy, *, scale: float = 1.0) -> Predicted:
    found = {
        name: scale * seconds * (1.1 if name == "matrix_update" else 0.95)
        for name, seconds in phases_of(strategy).items()
    }
    tail = ("norm_clip", "exchange", "matrix_update", "adamw_update", "param_gather")
    return Predicted(
        iteration_s=sum(seconds for name, seconds in found.items() if not name.endswith("_total")),
        optimizer_s=sum(found.get(name, 0.0) for name in tail),
        phases=found,
        load_balance=1.02,
        tensor_bytes=None if strategy in ("sc", "layerwise", "adamw") else 310 * 2**20,
        memory_bytes=702 * 2**20,
    )


def bench(
    strategies: Sequence[AnyStrategy] = ("canzona", "asc", "layerwise", "sc", "adamw"),
    *,
    tp: int = 2,
    dp: int = 2,
    scale: float = 1.0,
    optimizer: str = "muon",
) -> BenchResult:
    """All strategies in one bench."""
    ours = measured(strategies[0], ranks=tp * dp, scale=scale)
    return BenchResult(
        recipe="qwen3-mini",
        overrides=("model.num_layers=4", "train.seq_length=256"),
        optimizer=optimizer,
        layout=layout(tp=tp, dp=dp),
        device="cpu",
        profile="cpu-here",
        calibrated=True,
        machine={"processor": "Intel Xeon", "cores": 2, "torch": "2.13.0", "ranks": tp * dp, "load_average": 0.62},
        rounds=len(WOBBLE),
        steps_per_turn=3,
        warm_up_rounds=1,
        reference=strategies[0],
        strategies={
            name: StrategyBench(
                measured=ours if name == strategies[0] else measured(name, ranks=tp * dp, scale=scale),
                predicted=predicted(name, scale=scale),
                arithmetic="adamw" if name == "adamw" else "fused",
            )
            for name in strategies
        },
        arithmetic="the standard form in all strategies",
        notes=("splitting qkv: as far as sc and layerwise go, so that all update the same matrices",),
    )


def of_rounds(result: BenchResult, rounds: int) -> BenchResult:
    """`result` with the first rounds alone."""

    def first(measured: Measured) -> Measured:
        times = ("iteration_s", "optimizer_s", "processor_s")
        return replace(measured, **{name: getattr(measured, name)[:rounds] for name in times})

    strategies = {name: replace(found, measured=first(found.measured)) for name, found in result.strategies.items()}
    return replace(result, rounds=rounds, strategies=strategies)


def with_measured(result: BenchResult, name: AnyStrategy, **changes: object) -> BenchResult:
    """`result` with other measurements of one strategy."""
    found = result.strategies[name]
    changed = replace(found, measured=replace(found.measured, **changes))  # type: ignore[arg-type]
    return replace(result, strategies={**result.strategies, name: changed})
