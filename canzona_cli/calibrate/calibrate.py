"""The launcher's side of `canzona calibrate`: starts the ranks, reads their measurements,
and writes a profile of them.

The YAML of the profile is what `cluster=./FILE.yaml` reads, with each number's spread beside it.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from canzona_cli.calibrate.measurement import FULL, Effort, Measurement, Orders, Quantity, Record, read_record
from canzona_cli.calibrate.profile import profile_of, shortened
from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.machine import machine_facts
from canzona_cli.cluster.search import fill
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.errors import CanzonaError, ConfigError, Problem, refuse, unwritable
from canzona_cli.launch import preflight, torchrun
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.supervisor import Supervision
from canzona_cli.launch.view import TrainView
from canzona_cli.run.files import RunFiles, write_json_atomic, write_text_atomic
from canzona_cli.run.machine import cores

WORKER_MODULE = "canzona_cli.calibrate.worker"
NOISE = 0.2
"""A larger spread (interquartile range over median) is reported."""
VERSION = 1
"""The version of what `--json` prints; additions keep it."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration."""

    base: ClusterConfig
    profile: ClusterConfig
    """The base profile with every measured value in place."""
    record: Record
    outcome: Outcome
    seconds: float
    load: float
    """Load average at the start: runnable processes, over one minute."""
    logs: Path | None
    """Kept if the ranks failed."""

    @property
    def warnings(self) -> tuple[str, ...]:
        warnings = []
        if self.load > cores() / 2:
            warnings.append(
                f"load average {self.load:.1f} on {cores()} cores at the start: other programs are running; repeat on "
                "an idle machine"
            )
        noisy = [m for m in self.record.measurements if m.spread.relative > NOISE]
        if noisy:
            worst = sorted(noisy, key=lambda m: -m.spread.relative)[:3]
            named = ", ".join(f"{describe(m)} {m.spread.relative:.0%}" for m in worst)
            more = "" if len(noisy) <= 3 else f" and {len(noisy) - 3} more"
            warnings.append(f"spread above {NOISE:.0%}: {named}{more}")
        if self.profile.not_measured:
            warnings.append(f"not measured: {', '.join(self.profile.not_measured)}; taken from {self.base.name}")
        return tuple(warnings)


def prepared(config: RunConfig) -> tuple[RunConfig, Layout]:
    """The run to calibrate for: on one machine, with a whole model on every rank.

    Raises:
        ConfigError: ranks on several machines, or too few CPU ranks for a collective.
    """
    cluster = config.cluster
    if config.gpus > cluster.gpus_per_node or (cluster.nodes or 1) > 1:
        raise ConfigError(
            Problem(
                key="gpus",
                value=config.gpus,
                reason=f"one machine is measured, and profile {cluster.name} has {cluster.gpus_per_node} ranks on each",
                fix=f"gpus={cluster.gpus_per_node}, or fewer",
            )
        )
    if cluster.device == "cpu" and config.gpus < 2:
        raise ConfigError(
            Problem(
                key="gpus",
                value=config.gpus,
                reason="collectives cannot be measured among fewer than 2 CPU ranks",
                fix="gpus=4 measures groups of 2 and 4, gpus=8 also those of 8",
            )
        )
    micro_batch = _micro_batch(config)
    layout = Layout(
        tp=1,
        pp=1,
        cp=1,
        dp=config.gpus,
        micro_batch_size=micro_batch,
        num_microbatches=1,
        global_batch_size=micro_batch * config.gpus,
        recompute="none",
        sequence_parallel=False,
    )
    alone = replace(
        config,
        cluster=replace(cluster, nodes=1, node_rank=None, rdzv_endpoint=None, rdzv_id=None),
        parallel=replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False),
    )
    return fill(alone, layout), layout


def calibrate(
    config: RunConfig, layout: Layout, view: TrainView, *, name: str, effort: Effort = FULL, worker: str = WORKER_MODULE
) -> Calibration:
    """Measure this machine. After Ctrl-C or a crash, everything measured until then is kept.

    Args:
        config, layout: from `prepared`.
        name: the profile's name.
        effort: the time that each measurement gets.
        worker: the module each rank runs.

    Raises:
        EnvironmentProblem: GPUs, memory or packages are missing here.
    """
    preflight.check_machine(shortened(config), layout)
    files = RunFiles(Path(tempfile.mkdtemp(prefix="canzona-calibrate-")))
    begun, load = time.time(), os.getloadavg()[0]
    keep_logs = False
    try:
        files.ranks.mkdir()
        files.logs.mkdir()
        write_text_atomic(files.config, dump_resolved(config))
        write_json_atomic(files.layout, asdict(layout))
        # A GPU is no faster while others idle; CPU ranks share caches and cores, so all of them compute as in
        # a run.
        workers = config.gpus if config.cluster.device == "cpu" else 1
        Orders(effort=effort.on(config.cluster.device), workers=workers).write(files)
        command = torchrun.build(config, files.root, module=worker)
        outcome = Supervision(files, command, view, ranks=range(config.gpus)).run()
        record = read_record(files)
        keep_logs = outcome.failed
    finally:
        if not keep_logs:
            shutil.rmtree(files.root, ignore_errors=True)
    seconds = time.time() - begun
    facts = {
        **machine_facts(config.cluster.device),
        "ranks": config.gpus,
        "date": time.strftime("%Y-%m-%d", time.localtime(begun)),
        "seconds": round(seconds, 1),
        "load": round(load, 2),
        "base": config.cluster.name,
    }
    return Calibration(
        base=config.cluster,
        profile=profile_of(config, layout, record, name=name, facts=facts),
        record=record,
        outcome=outcome,
        seconds=seconds,
        load=load,
        logs=files.root if keep_logs else None,
    )


def describe(measurement: Measurement) -> str:
    """Describes the measurements in one line."""
    quantity, key = measurement.quantity, measurement.key
    if quantity == "collectives":
        return f"{key[0]} of {key[2]:,} bytes among {key[1]}"
    if quantity == "updates":
        return f"{key[0]} {key[1]} x {key[2]}"
    if quantity == "matmul_tflops":
        return f"bf16 product {key[0]}"
    return quantity


def _micro_batch(config: RunConfig) -> int:
    """That of the recipe's own run; 1 where it could not run here."""
    if config.train.micro_batch_size is not None:
        return config.train.micro_batch_size
    try:
        return resolve(config)[1].micro_batch_size
    except CanzonaError:
        return 1


def content_of(calibration: Calibration, written: Path | None) -> dict[str, object]:
    """Returns what `--json` prints."""
    return {
        "version": VERSION,
        "profile_file": None if written is None else str(written),
        "status": calibration.outcome.status,
        "seconds": calibration.seconds,
        "load": calibration.load,
        "warnings": list(calibration.warnings),
        "left_to_cost_model": list(calibration.record.skipped),
        "profile": json.loads(json.dumps(asdict(calibration.profile))),
        "measurements": [{**asdict(m), "relative_spread": m.spread.relative} for m in calibration.record.measurements],
    }


_PLACES = ("nodes", "node_rank", "rdzv_endpoint", "rdzv_id")
"""Settings of one run, not of a machine."""
_MEANING = {
    "bf16_in_fp32": "this processor has no instructions for bf16",
    "cores": "processor cores the ranks share",
    "bf16_tflops": "what the fastest product or pass reached: no datasheet tells a processor's peak",
    "forward_factor": "measured forward over what the model of it says on this profile",
    "backward_factor": "the same of the backward",
    "forward_module_us": "what of it does not grow with the micro-batch, by module",
    "backward_module_us": "the same of the backward",
    "grouped_collectives": "whether small reductions together take little longer than one",
    "step_factors": "measured time in whole steps over what its parts come to",
    "intra_node_gb_per_s": "from all-to-all of 2 ranks",
    "intra_node_latency_us": "the same, 8 bytes",
}
_ELSEWHERE = "--out FILE.yaml with a place you may write to"


_TABLES: Mapping[str, tuple[Quantity, int]] = {
    "matmul_tflops": ("matmul_tflops", 1),
    "measured_updates": ("updates", 3),
    "collectives": ("collectives", 3),
}
"""Fields that have a measurement per row, and how many of a row's values say of what."""


def default_path(base: str) -> Path:
    """Returns the path of a profile for which nobody names a file."""
    return Path(f"{base.removesuffix('-calibrated')}-calibrated.yaml")


def check_writable(path: Path, *, force: bool) -> None:
    """Refuse before anything is measured what could not be written after.

    Raises:
        ConfigError: no .yaml file, or it is there already.
        EnvironmentProblem: its folder is not there or cannot be written.
    """
    problems = []
    if path.suffix not in (".yaml", ".yml"):
        problems.append(
            Problem(key="--out", value=path, reason="a profile is a YAML file", fix=f"--out {path.stem}.yaml")
        )
    elif path.exists() and not (force and path.is_file()):
        fix = "--force replaces it; --out FILE.yaml names another"
        if not path.is_file():
            fix = "--out FILE.yaml names another"
        problems.append(Problem(key="--out", value=path, reason="is there already", fix=fix))
    refuse(problems)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".{path.name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable("--out", path, error, fix=_ELSEWHERE) from None


def write_profile(path: Path, calibration: Calibration) -> None:
    """Raises EnvironmentProblem when it cannot be written."""
    try:
        write_text_atomic(path, profile_text(calibration))
    except OSError as error:
        raise unwritable("--out", path, error, fix=_ELSEWHERE) from None


def profile_text(calibration: Calibration) -> str:
    """The file's text; composes to `found.profile`."""
    return "\n".join([*_header(calibration), *_settings(calibration)]) + "\n"


def _header(calibration: Calibration) -> Iterator[str]:
    profile, on = calibration.profile, calibration.profile.measured_on
    yield f"# Measured by `canzona calibrate` on {on.get('date', '?')} in {calibration.seconds:.0f} s."
    yield f"# What it does not measure is of profile {calibration.base.name}."
    where = f"{on.get('processor', '?')}, {on.get('cores', '?')} cores, torch {on.get('torch', '?')}"
    gpu = f"{on['gpu']}, " if "gpu" in on else ""
    yield f"# On {gpu}{where}; load average {calibration.load:.1f} at the start."
    workers = on.get("workers")
    if workers is not None:
        yield f"# {on.get('ranks', '?')} ranks, {workers} computing at a time, {on.get('threads', '?')} threads each."
    yield "# Medians. +- 3% of 40: half the interquartile range, over 40 repetitions on all ranks."
    for warning in calibration.warnings:
        yield f"# Warning: {warning}"
    for skipped in calibration.record.skipped:
        yield f"# Left to the cost model: {skipped}"
    if profile.not_measured:
        yield "# CUT OFF: what not_measured names comes from the profile above."


def _settings(calibration: Calibration) -> Iterator[str]:
    profile = calibration.profile
    single: dict[str, Measurement] = {m.quantity: m for m in calibration.record.measurements if not m.key}
    for field in fields(ClusterConfig):
        name, value = field.name, getattr(profile, field.name)
        if name in _PLACES:
            continue
        if name in _TABLES and value:
            yield f"{name}:"
            yield from _rows(calibration, name, value)
            continue
        changed = value and value != getattr(calibration.base, name)
        meaning = f" # {_MEANING[name]}" if name in _MEANING and changed else ""
        if isinstance(value, dict) and value:
            yield f"{name}:{meaning}"
            yield from (f"  {_scalar(key)}: {_scalar(item)}" for key, item in value.items())
        else:
            plain = list(value) if isinstance(value, tuple) else value
            yield f"{name}: {_scalar(plain)}" + (meaning or (f" # {_spread(single[name])}" if name in single else ""))


def _rows(calibration: Calibration, name: str, table: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """A row on a line, each with its spread."""
    quantity, width = _TABLES[name]
    measured: dict[tuple[object, ...], Measurement] = {
        m.key: m for m in calibration.record.measurements if m.quantity == quantity
    }
    for row in table:
        measurement = measured.get(row[:width])
        source = f"as {calibration.base.name}" if measurement is None else _spread(measurement)
        yield f"  - {_scalar(list(row))} # {source}"


def _spread(measurement: Measurement) -> str:
    return f"+- {measurement.spread.relative / 2:.0%} of {measurement.repetitions}"


def _scalar(value: object) -> str:
    """JSON is YAML's flow style, but for exponents without a point, which YAML 1.1 reads as text."""
    if isinstance(value, list):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return json.dumps(value, ensure_ascii=False)
