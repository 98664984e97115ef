"""What a resumed run does otherwise than the run it goes on from: impossible, bending the curve, or harmless."""

from collections.abc import Iterator
from dataclasses import dataclass

from canzona_cli.config.checks import flat
from canzona_cli.config.schedule import complete
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import Problem

_ANOTHER_MODEL = (
    "model.num_layers",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.head_dim",
    "model.vocab_size",
    "model.tied_embeddings",
    "model.qk_norm",
)
"""What decides which weights there are and what they mean."""
_CURVE = (
    "model.rope_base",
    "model.norm_eps",
    "train.seq_length",
    "train.global_batch_size",
    "train.precision",
    "train.grad_reduce_dtype",
    "train.seed",
    "data.source",
    "data.path",
    "data.tokenizer",
    "data.tokenizer_vocab_size",
    "data.validation_fraction",
    "engine.exchange_dtype",
    "optimizer.",
    "schedule.",
)
"""Settings, and sections, after whose change the run goes on otherwise than it would have."""
_SPREAD = (
    "gpus",
    "cluster.nodes",
    "engine.strategy",
    "engine.layout",
    "engine.alpha",
    "engine.splitting",
    "engine.grouping",
    "engine.c_max_mib",
    "engine.reduction",
    "train.recompute",
)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Between the run that was saved and the one that goes on."""

    problems: tuple[Problem, ...]
    """Why it cannot go on."""
    warnings: tuple[str, ...]
    """One for each setting whose change bends the curve."""
    spread: str
    """How the work is shared out otherwise, in one line; empty where it is as before. The curve stays the same."""


def changes(old: RunConfig, new: RunConfig, *, old_layout: Layout, new_layout: Layout, step: int) -> Changes:
    """Compare two resolved runs.

    Args:
        old: the run as it was saved.
        step: of the checkpoint, for messages.
    """
    before, now = _settings(old), _settings(new)
    differing = {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    problems = tuple(_impossible(differing, step))
    foreign = any(_another_optimizer(key, *values) for key, values in differing.items())
    warnings = tuple(
        f"{key} is {_shown(value)} now; up to step {step:,} it was {_shown(previous)}"
        for key, (previous, value) in differing.items()
        if any(key == one or (one.endswith(".") and key.startswith(one)) for one in _CURVE)
        and not (foreign and key.startswith("optimizer."))
    )
    moved = [key for key in _SPREAD if key in differing]
    spread = [f"{key} {_shown(differing[key][0])} -> {_shown(differing[key][1])}" for key in moved]
    shapes = _shape(old_layout), _shape(new_layout)
    if shapes[0] != shapes[1]:
        spread.insert(0, f"{shapes[0]} -> {shapes[1]}")
    return Changes(problems=problems, warnings=warnings, spread=", ".join(spread))


def _settings(config: RunConfig) -> dict[str, object]:
    """All settings, the schedule with its nulls chosen: another number of steps may well be another schedule."""
    found = flat(config)
    chosen = complete(config.schedule, config.train.steps)
    return found | {f"schedule.{name}": value for name, value in vars(chosen).items()}


def _impossible(differing: dict[str, tuple[object, object]], step: int) -> Iterator[Problem]:
    for key, (previous, value) in differing.items():
        if key in _ANOTHER_MODEL:
            reason = f"is another model than the one that was saved at step {step:,}, which has {_shown(previous)}"
        elif _another_optimizer(key, previous, value):
            reason = f"is another optimizer than the one whose state was saved at step {step:,}: {_shown(previous)}"
        else:
            continue
        name = "optimizer" if key == "optimizer.name" else key
        fix = f"{name}={_shown(previous)}, or start another run: run.dir=DIR"
        yield Problem(key=key, value=value, reason=reason, fix=fix)


def _another_optimizer(key: str, previous: object, value: object) -> bool:
    """Another algorithm, or another class of the user's; the same class in another file may be its next version."""
    classes = {str(source).rpartition(":")[2] for source in (previous, value)}
    return key == "optimizer.name" or (key == "optimizer.source" and len(classes) > 1)


def _shape(layout: Layout) -> str:
    return " x ".join(f"{name} {ranks}" for name, ranks in layout.axes)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
