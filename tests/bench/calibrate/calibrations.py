"""A calibration of qwen3-tiny on two CPU ranks, for tests of profiles and reports."""

from dataclasses import replace
from pathlib import Path

from canzona_cli.bench.calibrate.calibrate import Calibration, prepare_run
from canzona_cli.bench.calibrate.profile import Facts, Measurement, Part, Quantity, Record, profile_of
from canzona_cli.config.compose import compose_run
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.setup import ClusterConfig, Layout
from canzona_cli.launch.outcome import Outcome
from canzona_cli.records.statistics import Quartiles

ALL: tuple[Part, ...] = ("arithmetic", "memory", "adamw", "collectives", "model", "updates")


def number(quantity: Quantity, value: float, *key: str | int, busy: float = 0.0, spread: float = 0.1) -> Measurement:
    around = Quartiles(low=value * (1 - spread / 2), median=value, high=value * (1 + spread / 2))
    return Measurement(quantity=quantity, key=key, spread=around, repetitions=9, busy=busy)


MEASUREMENTS = (
    number("matmul_tflops", 0.03, 64),
    number("matmul_tflops", 0.9, 512),
    number("matmul_tflops", 0.8, 2048),
    number("fp32_tflops", 0.2),
    number("qr_tflops", 0.04),
    number("eigh_tflops", 0.1),
    number("launch_us", 0.912345),
    number("memory_gb_per_s", 17.0),
    number("adamw_ns", 3.5, spread=0.5),
    number("collectives", 1e-4, "all_to_all", 2, 8, busy=1.0),
    number("collectives", 5.1e-3, "all_to_all", 2, 8 << 20, busy=1.5),
    number("collectives", 2e-5, "all_reduce", 2, 8, busy=1.25),
    number("forward", 0.03, 1),
    number("backward", 0.08, 1),
    number("forward", 0.2, 8),
    number("backward", 0.5, 8),
    number("updates", 2.5e-3, "muon/standard/5", 256, 768),
    number("updates", 3.5e-3, "megatron/muon/standard/5", 256, 768),
)
RECORD = Record(
    measurements=MEASUREMENTS,
    done=ALL,
    facts=Facts(torch="2.10.0", backend="gloo", threads=1, workers=2, bf16_in_fp32=True),
)


def run(*overrides: str) -> tuple[RunConfig, Layout]:
    return prepare_run(compose_run(["recipe=tiny", "gpus=2", *overrides], training=False).config)


def profile(record: Record = RECORD, *overrides: str) -> ClusterConfig:
    config, layout = run(*overrides)
    return profile_of(config, layout, record, name="here", facts={"processor": "A", "cores": 2, "base": "cpu"})


def calibration(record: Record = RECORD, outcome: Outcome | None = None) -> Calibration:
    config, _ = run()
    return Calibration(
        base=config.cluster,
        profile=profile(record),
        record=record,
        outcome=outcome or Outcome(status="done", exit_code=0, message=""),
        seconds=61.0,
        load=0.1,
        logs=None,
    )


def cut_off() -> Calibration:
    """Returns a calibration as Ctrl-C leaves it: collectives half measured, and nothing after them."""
    half = replace(RECORD, measurements=MEASUREMENTS[:10], done=ALL[:3])
    return calibration(half, Outcome(status="interrupted", exit_code=130, message="stopped"))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
