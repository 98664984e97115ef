"""`canzona calibrate` in the launcher: starts the ranks, reads their measurements and writes a cluster
profile.

Operations are measured in loops, in which caches are warm and ranks arrive at the same time. In training,
neither is the case. Therefore two short benches run with the new profile, one with data-parallel ranks and
one with pairs of tensor-parallel ranks. For each phase, the ratio of measured to predicted time becomes a
factor in the profile.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from canzona_cli.bench.calibrate.profile import (
    FULL,
    Effort,
    Orders,
    Record,
    fit_to_steps,
    profile_of,
    read_record,
    shorten,
    significant,
)
from canzona_cli.bench.results import BenchResult
from canzona_cli.bench.session import Say, prepare, run
from canzona_cli.checkpoint.commit import begin, write_part
from canzona_cli.checkpoint.manifest import Buffer, Shard
from canzona_cli.config.compose import dump_resolved
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.recipes import check_destination
from canzona_cli.config.resolve import fill, resolve
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.machine import machine_facts
from canzona_cli.core.errors import CanzonaError, ConfigError, ExitCode, Problem, SaveFailed, write_error
from canzona_cli.core.host import cores, existing_folder
from canzona_cli.core.reading import expanded
from canzona_cli.core.setup import ClusterConfig, Layout
from canzona_cli.core.setup.execution import AnyStrategy
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.launch import preflight, torchrun
from canzona_cli.launch.outcome import Outcome
from canzona_cli.launch.supervisor import Supervision
from canzona_cli.launch.view import TrainView
from canzona_cli.records.files import RunFiles, write_json_atomic

WORKER_MODULE = "canzona_cli.bench.calibrate.worker"
NOISE = 0.2
"""The relative spread (interquartile range divided by median) above which a measurement is reported as
noisy."""
CHECKPOINT_BYTES = 256 << 20
"""The size of the checkpoint that is written."""
VERSION = 1
"""The version of the `--json` output; additions do not change it."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration."""

    base: ClusterConfig
    profile: ClusterConfig
    """The base profile, updated with the measured values."""
    record: Record
    outcome: Outcome
    seconds: float
    load: float
    """The load average over the minute before the start."""
    logs: Path | None
    """The folder with the ranks' logs; None unless the ranks failed."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings about the quality of the measurements: a busy machine, large spreads, missing
        parts, fast paths that do not agree with their references."""
        warnings = []
        if self.load > cores() / 2:
            warnings.append(
                f"load average {self.load:.1f} on {cores()} cores at the start: other programs are running; repeat on "
                "an idle machine"
            )
        noisy = [m for m in self.record.measurements if m.spread.relative > NOISE]
        if noisy:
            worst = sorted(noisy, key=lambda m: -m.spread.relative)[:3]
            listed = ", ".join(f"{m.name} {m.spread.relative:.0%}" for m in worst)
            more = "" if len(noisy) <= 3 else f" and {len(noisy) - 3} more"
            warnings.append(f"spread above {NOISE:.0%}: {listed}{more}")
        warnings += [
            f"fast path {check.path} is not verified: {check.summary}"
            for check in self.record.fast_paths
            if not check.agrees
        ]
        if self.profile.not_measured:
            warnings.append(f"not measured: {', '.join(self.profile.not_measured)}; taken from {self.base.name}")
        return tuple(warnings)


def prepare_run(config: RunConfig) -> tuple[RunConfig, Layout]:
    """Returns the run that the calibration measures, and its layout: all ranks are data-parallel on one
    machine, and communication does not overlap with computation.

    Raises:
        ConfigError: the ranks are on several machines, or there are too few CPU ranks for a collective.
    """
    cluster = config.cluster
    if config.gpus > cluster.gpus_per_node or (cluster.nodes or 1) > 1:
        reason = (
            f"needs several machines, but a calibration measures one, which has {cluster.gpus_per_node} ranks in "
            f"profile {cluster.name}"
        )
        fix = f"gpus={cluster.gpus_per_node}, or fewer"
        raise ConfigError(Problem(key="gpus", value=config.gpus, reason=reason, fix=fix))
    if cluster.device == "cpu" and config.gpus < 2:
        reason = "is too few: collectives cannot be measured with fewer than 2 CPU ranks"
        fix = "gpus=4 measures groups of 2 and 4, gpus=8 also groups of 8"
        raise ConfigError(Problem(key="gpus", value=config.gpus, reason=reason, fix=fix))
    micro_batch = config.train.micro_batch_size or 1
    if config.train.micro_batch_size is None:
        with suppress(CanzonaError):  # the recipe's own run may not be possible on this machine
            micro_batch = resolve(config)[1].micro_batch_size
    layout = Layout.plain(dp=config.gpus, micro_batch_size=micro_batch)
    single_machine = replace(
        config,
        cluster=replace(cluster, nodes=1, node_rank=None, rdzv_endpoint=None),
        parallel=replace(config.parallel, overlap_grad_reduce=False, overlap_param_gather=False),
    )
    return fill(single_machine, layout), layout


def calibrate(
    config: RunConfig, layout: Layout, view: TrainView, *, name: str, effort: Effort = FULL, worker: str = WORKER_MODULE
) -> Calibration:
    """Measures this machine. After Ctrl-C or a crash, all measurements made so far are kept.

    Args:
        config: the run to measure, from `prepare_run`.
        layout: the run's layout, from `prepare_run`.
        name: the name of the new profile.
        effort: the time budgets of the measurements.
        worker: the module that each rank runs.

    Raises:
        EnvironmentProblem: this machine does not have the GPUs, the memory or the packages.
    """
    preflight.check_machine(shorten(config), layout)
    files = RunFiles(Path(tempfile.mkdtemp(prefix="canzona-calibrate-")))
    started, load = time.time(), os.getloadavg()[0]
    keep_logs = False
    try:
        files.ranks.mkdir()
        files.logs.mkdir()
        write_text_atomic(files.config, dump_resolved(config))
        write_json_atomic(files.layout, asdict(layout))
        # A GPU's speed does not depend on other GPUs, so one rank measures. CPU ranks share caches and cores,
        # so all of them measure at the same time, as in a run.
        workers = config.gpus if config.cluster.device == "cpu" else 1
        Orders(effort=effort.for_device(config.cluster.device), workers=workers).write(files)
        command = torchrun.build(config, files.root, module=worker)
        outcome = Supervision(files, command, view, ranks=range(config.gpus)).run()
        record = read_record(files)
        keep_logs = outcome.failed
    finally:
        if not keep_logs:
            shutil.rmtree(files.root, ignore_errors=True)
    runs = expanded(config.run.root).absolute()
    rate = None if outcome.exit_code else checkpoint_rate(runs, config.gpus)
    seconds = time.time() - started
    facts = {
        **machine_facts(config.cluster.device),
        **({} if rate is None else {"checkpoints_in": str(runs)}),
        "ranks": config.gpus,
        "date": time.strftime("%Y-%m-%d", time.localtime(started)),
        "seconds": round(seconds, 1),
        "load": round(load, 2),
        "base": config.cluster.name,
    }
    profile = profile_of(config, layout, record, name=name, facts=facts)
    return Calibration(
        base=config.cluster,
        profile=replace(profile, checkpoint_gb_per_s=None if rate is None else significant(rate)),
        record=record,
        outcome=outcome,
        seconds=seconds,
        load=load,
        logs=files.root if keep_logs else None,
    )


def content_of(calibration: Calibration, written: Path | None) -> dict[str, object]:
    """Returns the output of `--json`."""
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


_RUN_SETTINGS = ("nodes", "node_rank", "rdzv_endpoint")
"""The cluster settings that belong to a run, not to a machine. Profiles do not contain them."""
_ELSEWHERE = "--out FILE.yaml in a folder you may write to"


def default_path(base: str) -> Path:
    """Returns the path of the new profile if the user does not name one.

    Args:
        base: the name of the base profile.
    """
    return Path(f"{base.removesuffix('-calibrated')}-calibrated.yaml")


def check_writable(path: Path, *, force: bool) -> None:
    """Checks, before anything is measured, that the profile can be written to a path. Creates its folder.

    Raises:
        ConfigError: the path does not end in .yaml or .yml, is a folder, or exists and `force` is False.
        EnvironmentProblem: the folder cannot be created or is not writable.
    """
    check_destination(path, force=force, what="a profile", key="--out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise write_error("--out", path, error, fix=_ELSEWHERE) from None


def write_profile(path: Path, calibration: Calibration) -> None:
    """Writes the profile.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    try:
        write_text_atomic(path, profile_text(calibration))
    except OSError as error:
        raise write_error("--out", path, error, fix=_ELSEWHERE) from None


def profile_text(calibration: Calibration) -> str:
    """Returns the profile as YAML, with comments about the measurements at the top."""
    settings: dict[str, object] = json.loads(json.dumps(asdict(calibration.profile)))
    for name in _RUN_SETTINGS:
        del settings[name]
    # In the style None, lists of plain values are written in one line.
    text: str = yaml.safe_dump(settings, default_flow_style=None, sort_keys=False, width=1000, allow_unicode=True)
    return "\n".join([*_header(calibration), text])


def _header(calibration: Calibration) -> Iterator[str]:
    profile, machine = calibration.profile, calibration.profile.measured_on
    yield f"# Measured by `canzona calibrate` on {machine.get('date', '?')} in {calibration.seconds:.0f} s."
    yield f"# Values that are not measured come from profile {calibration.base.name}."
    host = f"{machine.get('processor', '?')}, {machine.get('cores', '?')} cores, torch {machine.get('torch', '?')}"
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    yield f"# On {gpu}{host}; load average {calibration.load:.1f} at the start."
    workers, threads = machine.get("workers"), machine.get("threads", "?")
    if workers is not None:
        yield f"# {machine.get('ranks', '?')} ranks, {workers} computing at a time, {threads} threads each."
    yield "# Values are medians; `canzona calibrate --json` has their spreads."
    for warning in calibration.warnings:
        yield f"# Warning: {warning}"
    for skipped in calibration.record.skipped:
        yield f"# Left to the cost model: {skipped}"
    if profile.not_measured:
        yield f"# INCOMPLETE: the parts in measured_on.not_measured come from profile {calibration.base.name}."


BENCHED: tuple[AnyStrategy, ...] = ("canzona", "sc", "adamw")
"""The strategies of the short benches: canzona's engine, Megatron's Muon, Megatron's DistributedOptimizer."""
RANKS = 2
_LAYERS = 2
_ROUNDS, _STEPS = 3, 2
_REPLACED = ("gpus", "cluster", "parallel", "optimizer", "engine", "run", "train.steps")
"""The settings that the short benches choose. The user's overrides of them are ignored."""


class ShortBenches:
    """The short benches of a calibration, with a few layers of the recipe's model.

    Args:
        overrides: the overrides of the calibration.
        config: the run that these overrides compose to.
        profile: the file of the cluster profile that the benches use.
        say: a function that shows a line of progress.
    """

    def __init__(
        self, overrides: Sequence[str], config: RunConfig, profile: Path, say: Say, recipes_dirs: Sequence[Path] = ()
    ) -> None:
        on_cpu = config.cluster.device == "cpu"
        # CPU ranks that share a core evict each other's data from its caches, so the benches have as many
        # ranks as the run, but at most two per core.
        most = min(config.gpus, 2 * cores() if on_cpu else RANKS)
        self.ranks = most if most < RANKS else most // RANKS * RANKS
        self.overrides = [
            *(override for override in overrides if not _is_replaced(override)),
            f"cluster={profile.absolute()}",
            "parallel.pp=1",
            "optimizer=muon",
            f"model.num_layers={min(_LAYERS, config.model.num_layers)}",
            # A pattern of layers does not fit fewer layers.
            *(("model.moe_layer_freq=1", "model.dense_ffn_hidden_size=0") if config.model.moe_layer_freq != 1 else ()),
        ]
        self._say, self._recipes_dirs = say, recipes_dirs

    def bench(self, ranks: int, tp: int) -> BenchResult:
        """Benches the strategies of `BENCHED` on `ranks` ranks with tensor-parallel size `tp`.

        Raises:
            CanzonaError: see `session.prepare` and `session.run`.
            KeyboardInterrupt: the user stopped the bench.
        """
        folder = Path(tempfile.mkdtemp(prefix="canzona-calibrate-"))
        try:
            session = prepare(
                [*self.overrides, f"gpus={ranks}", f"parallel.tp={tp}", f"run.dir={text_value(str(folder / 'steps'))}"],
                strategies=BENCHED,
                rounds=_ROUNDS,
                steps_per_turn=_STEPS,
                recipes_dirs=self._recipes_dirs,
            )
            return run(session, self._say)[0]
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def with_steps(calibration: Calibration, benches: ShortBenches, write: Callable[[Calibration], None]) -> Calibration:
    """Runs the short benches and adds the factors of complete steps to the profile.

    If a bench fails or is stopped, the factors come only from earlier benches, and "steps" is added to the
    profile's `measured_on.not_measured`.

    Args:
        write: a function that writes the profile; called once, with the result.
    """
    started, results = time.time(), list[BenchResult]()
    profile, outcome = calibration.profile, calibration.outcome
    for tp in dict.fromkeys((1, min(RANKS, benches.ranks))):
        try:
            results.append(benches.bench(benches.ranks, tp))
        except (KeyboardInterrupt, CanzonaError) as error:
            stopped = isinstance(error, KeyboardInterrupt)
            outcome = replace(
                outcome,
                status="interrupted" if stopped else "failed",
                exit_code=ExitCode.INTERRUPTED if stopped else ExitCode.CRASH,
                message="" if stopped else f"bench of complete steps with TP {tp}: {error}",
            )
            missing = " ".join((*profile.not_measured, "steps"))
            profile = replace(profile, measured_on={**profile.measured_on, "not_measured": missing})
            break
    if results:
        profile = fit_to_steps(profile, results)
    seconds = calibration.seconds + time.time() - started
    profile = replace(profile, measured_on={**profile.measured_on, "seconds": round(seconds, 1)})
    result = replace(calibration, seconds=seconds, profile=profile, outcome=outcome)
    write(result)
    return result


def _is_replaced(override: str) -> bool:
    key = key_of(override.lstrip("+~"))
    return any(key == name or key.startswith(f"{name}.") for name in _REPLACED)


def checkpoint_rate(folder: Path, ranks: int) -> float | None:
    """Returns the GB/s at which the ranks of one machine together write a checkpoint: as a save does, with hashes,
    until the disk has it. Returns None if it cannot be written.

    Args:
        folder: where runs are, or will be; only its file system matters.
    """
    size = CHECKPOINT_BYTES // ranks
    buffer = Buffer(dtype="U8", shape=(size,), data=memoryview(os.urandom(size)))
    try:
        with tempfile.TemporaryDirectory(prefix=".canzona-", dir=existing_folder(folder)) as temporary:
            partial = begin(Path(temporary), 1)
            started = time.perf_counter()
            with ThreadPoolExecutor(ranks) as pool:
                saves = [
                    pool.submit(write_part, partial, rank, Shard(tensors={f"rank{rank}/bytes": buffer}, scalars={}))
                    for rank in range(ranks)
                ]
            for save in saves:
                save.result()
            return ranks * size / (time.perf_counter() - started) / 1e9
    except (OSError, SaveFailed):
        return None
