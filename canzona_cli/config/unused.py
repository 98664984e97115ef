"""Settings that were typed but have no effect. A run that would then train something else than was typed is refused;
where training is the same, `checks.config_warnings` mentions it."""

from collections.abc import Iterator

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import MomentumConfig, RunConfig
from canzona_cli.config.settings import problem_with
from canzona_cli.errors import Problem


def unused_problems(config: RunConfig, explicit: frozenset[str], *, training: bool) -> Iterator[Problem]:
    """Lists typed settings that the run would ignore and thereby train something else.

    Args:
        explicit: dotted keys, and groups, that the command line sets.
        training: False for planning only, which has canzona's plan whatever strategy the run has.
    """
    yield from _data(config, explicit)
    yield from _schedule(config, explicit)
    yield from _clipping(config, explicit)
    train = config.train
    if "train.grad_reduce_dtype" in explicit and train.grad_reduce_dtype == "bf16" and train.precision == "fp32":
        reason = "has no effect: train.precision is fp32, whose gradients are summed in fp32"
        yield problem_with(config, "train.grad_reduce_dtype", reason, "leave it out, or use train.precision=bf16")
    if training:
        yield from _engine(config, explicit)


def _data(config: RunConfig, explicit: frozenset[str]) -> Iterator[Problem]:
    data = config.data
    chosen = explicit & {"data", "data.source"}
    for key, value in (("data.path", data.path), ("data.blend", data.blend)):
        # Data chosen on the command line replace those that a recipe names.
        if value and data.source == "stdlib" and (key in explicit or not chosen):
            reason = "is not read: data.source is stdlib, Python's own sources"
            yield problem_with(config, key, reason, f"write data=prepared to train on it, or {key}=null")
    for key in ("data.tokenizer", "data.tokenizer_vocab_size"):
        if key in explicit and data.source == "prepared":
            reason = "has no effect: prepared data have the tokenizer that they were prepared with"
            fix = "leave it out, or make other data: canzona data prepare ... --tokenizer NAME"
            yield problem_with(config, key, reason, fix)
        elif key == "data.tokenizer_vocab_size" and key in explicit and data.tokenizer != "bpe":
            reason = f"has no effect: data.tokenizer is {data.tokenizer}"
            yield problem_with(config, key, reason, "write data=stdlib-bpe, or leave it out")


def _schedule(config: RunConfig, explicit: frozenset[str]) -> Iterator[Problem]:
    schedule, optimizer = config.schedule, config.optimizer
    if "schedule.wsd_decay_steps" in explicit and schedule.wsd_decay_steps is not None and schedule.decay != "wsd":
        reason = f"has no effect: schedule.decay is {schedule.decay}"
        yield problem_with(config, "schedule.wsd_decay_steps", reason, "write schedule.decay=wsd, or leave it out")
    if schedule.decay != "constant":
        return
    ends = {
        "schedule.decay_steps": schedule.decay_steps,
        "optimizer.min_lr": optimizer.min_lr,
        "optimizer.min_lr_ratio": optimizer.min_lr_ratio,
    }
    for key in (key for key, value in ends.items() if key in explicit and value is not None):
        reason = "has no effect: schedule.decay is constant, so the rate never comes down"
        yield problem_with(config, key, reason, "write schedule.decay=cosine, linear or wsd, or leave it out")


def _clipping(config: RunConfig, explicit: frozenset[str]) -> Iterator[Problem]:
    optimizer = config.optimizer
    if "optimizer.clip_grad" in explicit and optimizer.clip == "none" and optimizer.clip_grad > 0:
        reason = "has no effect: optimizer.clip is none"
        yield problem_with(config, "optimizer.clip_grad", reason, "write optimizer.clip=all, or leave it out")
    if "optimizer.clip" in explicit and optimizer.clip != "none" and optimizer.clip_grad == 0:
        reason = "has no effect: optimizer.clip_grad is 0, which switches clipping off"
        yield problem_with(config, "optimizer.clip", reason, "write optimizer.clip_grad=1, or leave it out")


def _engine(config: RunConfig, explicit: frozenset[str]) -> Iterator[Problem]:
    """Lists settings that only canzona's engine knows, in a run of another one."""
    execution, engine, optimizer = execution_of(config), config.engine, config.optimizer
    adamw = execution is Execution.ADAMW
    if execution is Execution.PLANNED:
        return
    why = "optimizer is adamw" if adamw else f"engine.strategy is {engine.strategy}"
    instead = "leave it out" if adamw else "use engine.strategy=canzona, or leave it out"
    if "train.non_finite" in explicit and not execution.ours:
        reason = f"has no effect: {why}, which runs Megatron's own optimizer, and that has no such guard"
        yield problem_with(config, "train.non_finite", reason, instead)
    if adamw:
        return
    rounds = engine.exchange_dtype == "bf16" and config.parallel.tp != 1
    if "engine.exchange_dtype" in explicit and rounds:
        reason = f"has no effect: {why}, which sends gradients between TP ranks in fp32"
        yield problem_with(config, "engine.exchange_dtype", reason, instead)
    if execution.ours:
        return
    if "engine.splitting" in explicit and engine.splitting in ("split", "per_head"):
        reason = f"is further than Megatron's own Muon splits ({why}): it leaves gate and up together"
        fix = "use engine.splitting=qkv, or engine.strategy=canzona"
        yield problem_with(config, "engine.splitting", reason, fix)
    if "optimizer.form" in explicit and isinstance(optimizer, MomentumConfig) and optimizer.form == "gram":
        reason = f"has no effect: {why}, which runs Megatron's own Muon, and that has the standard form alone"
        yield problem_with(config, "optimizer.form", reason, "use engine.strategy=canzona, or optimizer.form=standard")
