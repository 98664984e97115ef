"""The YAML of a calibrated cluster profile: what `cluster=./FILE.yaml` reads, with each number's spread beside it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from canzona_cli.calibrate.calibrate import Calibration
from canzona_cli.calibrate.measurement import Measurement, Quantity
from canzona_cli.config.schema import ClusterConfig
from canzona_cli.errors import Problem, refuse, unwritable
from canzona_cli.run.files import write_text_atomic

_PLACES = ("nodes", "node_rank", "rdzv_endpoint", "rdzv_id")
"""Of one run, not of a machine."""
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
    """Where a profile goes that nobody names a file for."""
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


def write_profile(path: Path, found: Calibration) -> None:
    """Raises EnvironmentProblem when it cannot be written."""
    try:
        write_text_atomic(path, profile_text(found))
    except OSError as error:
        raise unwritable("--out", path, error, fix=_ELSEWHERE) from None


def profile_text(found: Calibration) -> str:
    """The file's text; composes to `found.profile`."""
    return "\n".join([*_header(found), *_settings(found)]) + "\n"


def _header(found: Calibration) -> Iterator[str]:
    profile, on = found.profile, found.profile.measured_on
    yield f"# Measured by `canzona calibrate` on {on.get('date', '?')} in {found.seconds:.0f} s."
    yield f"# What it does not measure is of profile {found.base.name}."
    where = f"{on.get('processor', '?')}, {on.get('cores', '?')} cores, torch {on.get('torch', '?')}"
    gpu = f"{on['gpu']}, " if "gpu" in on else ""
    yield f"# On {gpu}{where}; load average {found.load:.1f} at the start."
    workers = on.get("workers")
    if workers is not None:
        yield f"# {on.get('ranks', '?')} ranks, {workers} computing at a time, {on.get('threads', '?')} threads each."
    yield "# Medians. +- 3% of 40: half the interquartile range, over 40 repetitions on all ranks."
    for warning in found.warnings:
        yield f"# Warning: {warning}"
    for skipped in found.record.skipped:
        yield f"# Left to the cost model: {skipped}"
    if profile.not_measured:
        yield "# CUT OFF: what not_measured names comes from the profile above."


def _settings(found: Calibration) -> Iterator[str]:
    profile = found.profile
    single: dict[str, Measurement] = {m.quantity: m for m in found.record.measurements if not m.key}
    for field in fields(ClusterConfig):
        name, value = field.name, getattr(profile, field.name)
        if name in _PLACES:
            continue
        if name in _TABLES and value:
            yield f"{name}:"
            yield from _rows(found, name, value)
            continue
        changed = value and value != getattr(found.base, name)
        meaning = f" # {_MEANING[name]}" if name in _MEANING and changed else ""
        if isinstance(value, dict) and value:
            yield f"{name}:{meaning}"
            yield from (f"  {_scalar(key)}: {_scalar(item)}" for key, item in value.items())
        else:
            plain = list(value) if isinstance(value, tuple) else value
            yield f"{name}: {_scalar(plain)}" + (meaning or (f" # {_spread(single[name])}" if name in single else ""))


def _rows(found: Calibration, name: str, table: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """A row on a line, each with its spread."""
    quantity, width = _TABLES[name]
    measured: dict[tuple[object, ...], Measurement] = {
        m.key: m for m in found.record.measurements if m.quantity == quantity
    }
    for row in table:
        own = measured.get(row[:width])
        yield f"  - {_scalar(list(row))} # {f'as {found.base.name}' if own is None else _spread(own)}"


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
