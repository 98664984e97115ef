"""Finds settings on the command line that have no effect, and values that will probably work badly.

If an ignored setting was meant to change what is trained, the run is refused; otherwise there is a warning.
"""

from collections.abc import Iterator

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.core.errors import Problem, value_of, with_own_values
from canzona_cli.core.setup import AdamWConfig, CustomConfig, Execution, FastPath, MomentumConfig
from canzona_cli.core.setup.execution import has_tp_modes

_REFUSED = (
    ("train.grad_reduce_dtype", ("fp32",), "train.precision=bf16"),
    ("model.experts_per_token", (0,), "model.num_experts=8"),
    ("model.shared_ffn_hidden_size", (0,), "model.num_experts=8"),
    ("model.moe_layer_freq", (0,), "model.num_experts=8"),
    ("model.dense_ffn_hidden_size", (0,), "model.num_experts=8"),
    ("model.dense_ffn_hidden_size", (1,), "model.moe_layer_freq=2"),
    ("model.balancing_loss", (0,), "model.num_experts=8"),
    ("model.balancing_weight", (0,), "model.num_experts=8"),
    ("model.balancing_weight", ("none",), "model.balancing_loss=sequence"),
    ("schedule.wsd_decay_steps", ("cosine", "linear", "constant"), "schedule.decay=wsd"),
    ("schedule.decay_steps", ("constant",), "schedule.decay=cosine"),
    ("optimizer.min_lr_ratio", ("constant",), "schedule.decay=cosine"),
)
"""A setting that changes what is trained, the values of another setting with which it has no effect, and an
override of the other setting with which it has an effect."""
_HARMLESS = {
    ("train.grad_reduce_dtype", "fp32"),
    ("optimizer.clip_grad", 0),
    ("model.shared_ffn_hidden_size", 0),
    ("model.moe_layer_freq", 1),
    ("model.dense_ffn_hidden_size", 0),
}
"""The settings and values that are accepted although they have no effect, because they change nothing."""
_IGNORED = (("train.eval_sequences", "train.eval_interval"),)
"""Pairs of settings: the first has no effect if the second is 0."""
_FIXED = (
    ("canzona", "alpha", None, "always balances compute"),
    ("asc", "alpha", None, "balances nothing"),
)
"""A strategy, a setting of the engine that it ignores, the value that it uses instead (None if there is no such
value), and the reason."""


def unused_problems(config: RunConfig, explicit: frozenset[str], *, training: bool) -> list[Problem]:
    """Returns a problem for each setting on the command line, and for a recipe's data path or blend, that was
    meant to change what is trained but has no effect.

    Args:
        explicit: the dotted keys and the groups that the command line sets.
        training: False if the run is only planned, which is possible with any strategy.
    """
    problems = [*_unused_data(config, explicit), *(_unused_engine(config, explicit) if training else ())]
    for key, idle_values, remedy in _REFUSED:
        other_key = remedy.partition("=")[0]
        value, other_value = value_of(config, key), value_of(config, other_key)
        if key in explicit and other_value in idle_values and value is not None and (key, value) not in _HARMLESS:
            reason = f"has no effect: {other_key} is {override_text(other_value)}"
            problems.append(Problem(key, reason, f"write {remedy}, or leave it out"))
    return with_own_values(config, problems)


def config_warnings(config: RunConfig, explicit: frozenset[str], *, training: bool) -> Iterator[str]:
    """Yields warnings about settings on the command line that have no effect, and about values that will
    probably work badly.

    Ignored settings that were meant to change what is trained are refused instead (`unused_problems`).

    Args:
        explicit: the dotted keys and the groups that the command line sets.
        training: False if the run is only planned. The settings of plans then have an effect even if the
            strategy would not execute a plan.
    """
    yield from _plan_warnings(config, explicit, training=training)
    yield from _unverified_warnings(config, explicit)
    yield from _optimizer_warnings(config, explicit)
    if {"train.batch_tokens", "train.global_batch_size"} <= explicit and config.train.global_batch_size is not None:
        yield "train.batch_tokens is ignored: train.global_batch_size is set"
    has_no_plan = training and config.execution is not Execution.PLANNED
    for strategy, key, only_value, why in _FIXED:
        has_other_value = f"engine.{key}" in explicit and vars(config.engine)[key] != only_value
        if config.engine.strategy == strategy and not has_no_plan and has_other_value:
            yield f"engine.{key} is ignored: engine.strategy is {strategy}, which {why}"
    tp = config.parallel.tp
    if tp == 1 and "engine.exchange_dtype" in explicit and not has_no_plan:
        yield "engine.exchange_dtype is ignored: with parallel.tp=1 there is no exchange between TP ranks"
    if training and "engine.muon_tp_mode" in explicit and (why := _no_tp_modes(config)):
        yield f"engine.muon_tp_mode is ignored: {why}"
    if tp is not None and tp > config.cluster.gpus_per_node:
        yield f"parallel.tp={tp} spans several nodes of {config.cluster.gpus_per_node} ranks: it will be slow"
    if "parallel.dispatcher" in explicit and (config.model.num_experts == 0 or config.parallel.ep == 1):
        yield "parallel.dispatcher is ignored: no experts are divided among ranks"
    if config.model.positions:
        for key in sorted(explicit & {"model.rope_base", "model.rope_scaling"}):
            yield f"{key} is ignored: the model has learned positions"
    for key, other in _IGNORED:
        if key in explicit and value_of(config, other) == 0:
            yield f"{key} is ignored: {other} is 0"


def _plan_warnings(config: RunConfig, explicit: frozenset[str], *, training: bool) -> Iterator[str]:
    """Yields the warnings about settings of the engine and the plan that this run does not use."""
    execution = config.execution
    if execution is Execution.ADAMW and explicit & {"engine", "engine.strategy"}:
        yield "engine.strategy is ignored: with optimizer=adamw Megatron's DistributedOptimizer updates everything"
    if training and execution is not Execution.PLANNED:
        why = _no_plan(config)
        for key in ("alpha", "mode", "c_max_mib", "reduction", "exchange_dtype", "plan"):
            if f"engine.{key}" in explicit:
                yield f"engine.{key} is ignored: {why}, which does not use a plan"
        for key in ("stack", "graph"):
            if f"optimizer.{key}" in explicit and not execution.ours:
                yield f"optimizer.{key} is ignored: {why}, which runs Megatron's own optimizer"
        if execution is Execution.ADAMW and "engine.splitting" in explicit:
            yield "engine.splitting is ignored: optimizer is adamw, which updates element by element"
    elif config.cluster.device == "cpu" and getattr(config.optimizer, "graph", False) is True:
        yield "optimizer.graph is ignored: CUDA graphs need GPUs"


def _unverified_warnings(config: RunConfig, explicit: frozenset[str]) -> Iterator[str]:
    """Yields a warning that names the fast paths that a run on GPUs was asked to use and that have not been verified
    there."""
    cluster, optimizer = config.cluster, config.optimizer
    if cluster.device == "cpu":
        if "cluster.verified" in explicit:
            yield "cluster.verified is ignored: it is about GPUs; CPU ranks may use every fast path"
        return
    asked: dict[str, FastPath] = {}
    if isinstance(optimizer, MomentumConfig) and config.execution.ours:
        asked |= {"optimizer.form=gram": "gram"} if optimizer.form == "gram" else {}
        asked |= {"optimizer.graph=true": "graphs"} if optimizer.graph is True else {}
        asked |= {"engine.mode=shared": "shared"} if config.engine.mode == "shared" else {}
    settings = [setting for setting, path in asked.items() if not cluster.may_choose(path)]
    if "cluster.verified" in explicit and cluster.verified:
        settings.append(f"cluster.verified=[{','.join(cluster.verified)}]")
    if settings:
        yield (
            f"{', '.join(settings)} was asked for by name: profile {cluster.name} does not say that anybody has run it "
            "on these GPUs; canzona doctor --gpu-check FILE.json finds out whether it works"
        )


def _optimizer_warnings(config: RunConfig, explicit: frozenset[str]) -> Iterator[str]:
    if isinstance(config.optimizer, CustomConfig) and "optimizer" in explicit:
        if "optimizer.lr" not in explicit:
            rate = f"optimizer.lr={config.optimizer.lr:g}"
            yield f"{rate} comes from the recipe and was not chosen for your optimizer: set optimizer.lr"
        if "optimizer.cost_like" not in explicit:
            like = config.optimizer.cost_like
            yield f"plans price your optimizer like {like}: set optimizer.cost_like to the most similar optimizer"
    if config.optimizer.lr > (highest := config.optimizer.PLAUSIBLE_LR):
        name = config.optimizer.name
        yield f"optimizer.lr={config.optimizer.lr:g} is above {highest:g}: with {name}, training will probably diverge"
    adamw_lr = config.optimizer.adamw_lr
    if adamw_lr is not None and adamw_lr > (highest := AdamWConfig.PLAUSIBLE_LR):
        yield f"optimizer.adamw_lr={adamw_lr:g} is above {highest:g}: training will probably diverge"


def _no_tp_modes(config: RunConfig) -> str:
    """Returns the reason why `engine.muon_tp_mode` has no effect on a run; empty if it has one, or may have one once
    the layout is known."""
    if has_tp_modes(config.setup):
        return "with parallel.tp=1 there are no TP ranks to divide updates" if config.parallel.tp == 1 else ""
    if config.execution is Execution.ADAMW or config.optimizer.name != "muon":
        return f"optimizer is {config.optimizer.name}, and only Megatron's own Muon has such modes"
    return f"engine.strategy is {config.engine.strategy}, and only Megatron's own Muon (layerwise, sc) has such modes"


def _no_plan(config: RunConfig) -> str:
    """Returns the reason why a run does not execute a plan."""
    return (
        "optimizer is adamw" if config.execution is Execution.ADAMW else f"engine.strategy is {config.engine.strategy}"
    )


def _unused_data(config: RunConfig, explicit: frozenset[str]) -> Iterator[Problem]:
    data = config.data
    chosen = explicit & {"data", "data.source"}
    for key, value in (("data.path", data.path), ("data.blend", data.blend), ("data.validation", data.validation)):
        # A data group or source on the command line replaces the data of the recipe, and data that a recipe names
        # choose their source.
        of_recipe = key == "data.validation" and not chosen
        if value and data.source == "stdlib" and (key in explicit or of_recipe):
            reason = "is not read: data.source is stdlib, the source code of Python's standard library"
            yield Problem(key, reason, f"write data=prepared to use it, or {key}=null")
    if "data.validation_fraction" in explicit and data.validation_set and data.validation_fraction > 0:
        reason = f"has no effect: the run is validated on data.validation={data.validation}"
        yield Problem("data.validation_fraction", reason, "leave one of them out")
    if "data.tokenizer" in explicit and data.source == "prepared":
        fix = "leave it out, or prepare the data again: canzona data prepare ... --tokenizer NAME"
        yield Problem("data.tokenizer", "has no effect: prepared data has already been tokenised", fix)


def _unused_engine(config: RunConfig, explicit: frozenset[str]) -> Iterator[Problem]:
    """Yields problems with settings that only canzona's engine supports, if the run does not use this
    engine."""
    execution, engine, optimizer = config.execution, config.engine, config.optimizer
    adamw = execution is Execution.ADAMW
    if execution is Execution.PLANNED:
        return
    why = _no_plan(config)
    instead = "leave it out" if adamw else "use engine.strategy=canzona, or leave it out"
    if "train.non_finite" in explicit and not execution.ours:
        reason = f"has no effect: {why}, which runs Megatron's own optimizer, without such a guard"
        yield Problem("train.non_finite", reason, instead)
    if adamw:
        return
    exchanges_bf16 = engine.exchange_dtype == "bf16" and config.parallel.tp != 1
    if "engine.exchange_dtype" in explicit and exchanges_bf16:
        reason = f"has no effect: {why}, which sends gradients between TP ranks in fp32"
        yield Problem("engine.exchange_dtype", reason, instead)
    if execution.ours:
        return
    if "engine.splitting" in explicit and engine.splitting in ("split", "per_head"):
        reason = f"is not possible: {why}, which runs Megatron's own Muon, which keeps gate and up together"
        yield Problem("engine.splitting", reason, "use engine.splitting=qkv, or engine.strategy=canzona")
    if "optimizer.form" in explicit and isinstance(optimizer, MomentumConfig) and optimizer.form == "gram":
        reason = f"has no effect: {why}, which runs Megatron's own Muon, which has only the standard form"
        yield Problem("optimizer.form", reason, "use engine.strategy=canzona, or optimizer.form=standard")
