"""The launcher's side of `canzona calibrate`: start the ranks, read their measurements, make a profile of them."""

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from canzona_cli.calibrate.measurement import FULL, Effort, Measurement, Orders, Record, read_record
from canzona_cli.calibrate.profile import profile_of, shortened
from canzona_cli.cluster.fit import resolve
from canzona_cli.cluster.layouts import fill
from canzona_cli.cluster.machine import machine_facts
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.schema import ClusterConfig, Layout, RunConfig
from canzona_cli.errors import CanzonaError, ConfigError, Problem
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
"""Of what `--json` prints; additions keep it."""


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
        found = []
        if self.load > cores() / 2:
            found.append(
                f"load average {self.load:.1f} on {cores()} cores at the start: other programs are running; repeat on "
                "an idle machine"
            )
        noisy = [m for m in self.record.measurements if m.spread.relative > NOISE]
        if noisy:
            worst = sorted(noisy, key=lambda m: -m.spread.relative)[:3]
            named = ", ".join(f"{describe(m)} {m.spread.relative:.0%}" for m in worst)
            more = "" if len(noisy) <= 3 else f" and {len(noisy) - 3} more"
            found.append(f"spread above {NOISE:.0%}: {named}{more}")
        if self.profile.not_measured:
            found.append(f"not measured: {', '.join(self.profile.not_measured)}; taken from {self.base.name}")
        return tuple(found)


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
        name: of the profile.
        effort: how much time each measurement gets.
        worker: the module each rank runs.

    Raises:
        EnvironmentProblem: GPUs, memory or packages are missing here.
    """
    preflight.check_machine(shortened(config), layout)
    files = RunFiles(Path(tempfile.mkdtemp(prefix="canzona-calibrate-")))
    begun, load = time.time(), os.getloadavg()[0]
    kept = False
    try:
        files.ranks.mkdir()
        files.logs.mkdir()
        write_text_atomic(files.config, dump_resolved(config))
        write_json_atomic(files.layout, asdict(layout))
        # A GPU is no faster while others idle; CPU ranks share caches and cores, so all of them compute as in a run.
        workers = config.gpus if config.cluster.device == "cpu" else 1
        Orders(effort=effort.on(config.cluster.device), workers=workers).write(files)
        command = torchrun.build(config, files.root, module=worker)
        outcome = Supervision(files, command, view, ranks=range(config.gpus)).run()
        record = read_record(files)
        kept = outcome.failed
    finally:
        if not kept:
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
        logs=files.root if kept else None,
    )


def describe(measurement: Measurement) -> str:
    """What was measured, on one line."""
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


def content_of(found: Calibration, written: Path | None) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "version": VERSION,
        "profile_file": None if written is None else str(written),
        "status": found.outcome.status,
        "seconds": found.seconds,
        "load": found.load,
        "warnings": list(found.warnings),
        "left_to_cost_model": list(found.record.skipped),
        "profile": json.loads(json.dumps(asdict(found.profile))),
        "measurements": [{**asdict(m), "relative_spread": m.spread.relative} for m in found.record.measurements],
    }
