"""Checks that the settings of a run work together. `setup.layout_rules` checks which sizes must divide
which, and `config.unused` finds settings that have no effect."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import get_args

from canzona_cli.config.schema import RunConfig
from canzona_cli.config.secrets import safety_problems
from canzona_cli.config.settings import override_text, settings
from canzona_cli.core.errors import Problem, with_own_values
from canzona_cli.core.model.fp8 import fp8_problems
from canzona_cli.core.reading import expanded
from canzona_cli.core.setup import Collective, CustomConfig, Execution
from canzona_cli.core.setup.execution import RELEASED_TP_MODES, has_tp_modes
from canzona_cli.core.setup.layout_rules import layout_problems

BYTE_TOKENIZER_IDS = 257
"""The number of ids of the byte tokenizer: 256 bytes and an end-of-document token."""
SRUN_OPTIONS = ("--nodes", "--ntasks", "--ntasks-per-node", "--kill-on-bad-exit", "--wait")
"""The options of srun that the job script sets."""


def config_problems(config: RunConfig, *, training: bool = True) -> list[Problem]:
    """Returns the problems that checks of types and ranges do not find: values that cannot work, alone or
    together, and texts that `safety_problems` refuses.

    Args:
        training: False for plans; skips the checks that only a training run needs.
    """
    problems = [
        *_value_problems(config),
        *layout_problems(config.setup),
        *fp8_problems(config.setup),
        *_schedule_problems(config),
        *_rampup_problems(config),
        *(_engine_problems(config) if training else ()),
        *(_custom_optimizer_problems(config) if training else ()),
        *_data_problems(config),
        *(_tokenizer_problems(config) if training else ()),
        *_cluster_problems(config),
        *_measurement_problems(config),
        *(_training_problems(config) if training else ()),
    ]
    return [*with_own_values(config, problems), *safety_problems(config)]


def _value_problems(config: RunConfig) -> Iterator[Problem]:
    train, limit = config.train, settings()["train.global_batch_size"].range.at_most
    if train.global_batch_size is None and train.batch_tokens // train.seq_length > limit:
        reason = f"is more than {limit:,} sequences of {train.seq_length} tokens, the limit for one step"
        fix = f"use train.batch_tokens={int(limit) * train.seq_length} or less"
        yield Problem("train.batch_tokens", reason, fix)
    if config.data.validation_fraction == 0 and not config.data.validation_set and config.train.eval_interval > 0:
        fix = "use data.validation_fraction=0.02 or data.validation=PREFIX, or switch it off with train.eval_interval=0"
        yield Problem("data.validation_fraction", "leaves no documents for validation", fix)
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name) is None:
        reason = (
            "must be a name for the run directory: up to 100 letters, digits, dots, "
            "dashes and underscores, beginning with a letter or digit"
        )
        yield Problem("name", reason, "for example name=my-run")
    yield from _expert_problems(config)
    yield from _gpt2_problems(config)
    if config.model.head_dim % 2:
        reason = "must be even: rotary embedding rotates pairs of dimensions"
        yield Problem("model.head_dim", reason, f"use model.head_dim={config.model.head_dim + 1}")


def _expert_problems(config: RunConfig) -> Iterator[Problem]:
    experts, per_token = config.model.num_experts, config.model.experts_per_token
    if 0 < experts < per_token:
        reason = f"is fewer than model.experts_per_token={per_token}"
        fix = f"use model.num_experts={per_token} or more, or 0 for a dense model"
        yield Problem("model.num_experts", reason, fix, value=experts)
    layers, frequency = config.model.num_layers, config.model.moe_layer_freq
    if isinstance(frequency, tuple) and experts:
        text = override_text(frequency)
        if len(frequency) != layers:
            fix = "give a 1 or 0 for each layer, or a number: 2 puts experts in every second layer, 1 in every layer"
            reason = f"has {len(frequency)} entries, and model.num_layers is {layers}"
            yield Problem("model.moe_layer_freq", reason, fix, value=text)
        elif not any(frequency):
            yield Problem("model.moe_layer_freq", "leaves no layer with experts", "use model.num_experts=0", value=text)


def _gpt2_problems(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.biases and model.num_experts:
        fix = "leave model.biases out, or use model.num_experts=0"
        yield Problem("model.biases", "experts have none", fix, value=True)
    if 0 < model.positions < config.train.seq_length:
        reason = f"is longer than model.positions={model.positions:,}"
        yield Problem("train.seq_length", reason, f"use train.seq_length={model.positions}, or more positions")


def _schedule_problems(config: RunConfig) -> Iterator[Problem]:
    steps = config.train.steps
    schedule = config.schedule.complete(steps)
    assert schedule.warmup_steps is not None
    assert schedule.decay_steps is not None
    if config.schedule.decay_steps is not None and schedule.warmup_steps >= schedule.decay_steps:
        reason = f"leaves no steps for the decay after the warm-up of {schedule.warmup_steps} steps"
        yield Problem("schedule.decay_steps", reason, f"use schedule.decay_steps={steps} or leave it null")
    elif schedule.warmup_steps >= steps:
        reason = f"the warm-up takes all of train.steps={steps}: the full learning rate is never reached"
        fix = f"use schedule.warmup_steps={steps // 10}"
        yield Problem("schedule.warmup_steps", reason, fix, value=schedule.warmup_steps)
    elif schedule.decay == "wsd" and schedule.wsd_decay_steps is not None:
        available_steps = schedule.decay_steps - schedule.warmup_steps
        if schedule.wsd_decay_steps > available_steps:
            reason = f"only {available_steps} steps are left after the warm-up"
            fix = f"use schedule.wsd_decay_steps={max(available_steps // 10, 1)}, or leave it null"
            yield Problem("schedule.wsd_decay_steps", reason, fix, value=schedule.wsd_decay_steps)


def _rampup_problems(config: RunConfig) -> Iterator[Problem]:
    train, key = config.train, "train.batch_rampup"
    sizes = [size for size, _ in train.batch_rampup]
    full = train.global_batch_size or train.batch_tokens / train.seq_length
    if any(size >= larger for size, larger in pairwise([*sizes, full])):
        reason = f"must be pairs of sequences and steps, with rising numbers of sequences below the batch of {full:g}"
        yield Problem(key, reason, "for example train.batch_rampup=[[8,100],[16,100]]")
    steps = sum(steps for _, steps in train.batch_rampup)
    if steps >= train.steps:
        reason = f"takes all of train.steps={train.steps}: the batch of {full:g} sequences is never reached"
        yield Problem(key, reason, f"use fewer steps than {train.steps} in all pairs together")


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    if config.engine.muon_tp_mode not in RELEASED_TP_MODES and has_tp_modes(config.setup):
        reason = "is a mode of Megatron-LM's main branch, which Megatron-core 0.19 cannot run"
        fix = f"use {' or '.join(RELEASED_TP_MODES)}; `canzona plan` shows the simulated time of all modes"
        yield Problem("engine.muon_tp_mode", reason, fix)
    if config.execution is not Execution.LAYERWISE:
        return
    name = config.optimizer.name
    if name != "muon":
        limitation = {
            "soap": "ignores optimizer.precondition_frequency",
            "custom": "does not accept custom classes",
        }.get(name, f"does not support {name}")
        fix = "use engine.strategy=canzona (or sc, in which every rank updates everything), or optimizer=muon"
        yield Problem("engine.strategy", f"is Megatron's own layer-wise optimizer, which {limitation}", fix)
    elif config.train.precision != "bf16":
        reason = "Megatron's layer-wise optimizer needs bf16 weights"
        yield Problem("train.precision", reason, "use train.precision=bf16, or engine.strategy=sc")


def _custom_optimizer_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields the problems with the place of a custom optimizer's class, and with its options. Nothing is imported; the
    worker says if the place does not have the class."""
    custom = config.optimizer
    if not isinstance(custom, CustomConfig):
        return
    location, colon, name = custom.source.rpartition(":")
    form = "optimizer.source=FILE.py:Class, or module:Class of an installed package"
    if not custom.source:
        yield Problem("optimizer.source", "a custom optimizer needs a class", f"write {form}")
        return
    if not colon or not location or not name.isidentifier():
        reason = "must name a file or module, and a class in it"
        yield Problem("optimizer.source", reason, f"write {form}")
    elif not location.endswith(".py") and not custom.built_in and location.partition(".")[0] not in custom.allow:
        package = location.partition(".")[0]
        reason = f"would run code from {package}, which optimizer.allow does not list"
        fix = f"if you trust it: optimizer.allow=[{','.join([*custom.allow, package])}]"
        yield Problem("optimizer.source", reason, fix)
    elif location.endswith(".py"):
        if not Path(location).is_file():
            yield Problem("optimizer.source", f"there is no file {location} in {Path.cwd()}", f"write {form}")
    elif find_spec(package := location.partition(".")[0]) is None:
        yield Problem("optimizer.source", f"there is no package {package} here", f"write {form}")
    for key in sorted({"lr", "weight_decay", "params"} & custom.options.keys()):
        reason = f"{key} is set by canzona itself"
        fix = f"use optimizer.{key}" if key != "params" else "leave it out: params are the matrices"
        yield Problem(f"optimizer.options.{key}", reason, fix, value=custom.options[key])


def _data_problems(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if data.source == "prepared":
        if data.path and data.blend:
            reason = f"cannot be combined with data.path={data.path}"
            yield Problem("data.blend", reason, "add that path to the blend with a weight, and set data.path=null")
        elif not data.path and not data.blend:
            fix = "run `canzona data prepare`, then write data.path=PREFIX (for PREFIX.bin and PREFIX.idx)"
            yield Problem("data.path", "prepared data needs a path", fix)
        paths = Counter(os.path.abspath(expanded(path)) for path in data.blend or [data.path or ""])
        for path in (path for path, times in paths.items() if times > 1):
            yield Problem("data.blend", "is listed twice", "list it once, with the sum of its weights", value=path)
        if data.validation and os.path.abspath(expanded(data.validation)) in paths:
            fix = "name other data, or write data.validation=null to hold out documents of it"
            yield Problem("data.validation", "is trained on too", fix)


def _tokenizer_problems(config: RunConfig) -> Iterator[Problem]:
    data, vocabulary = config.data, config.model.vocab_size
    if data.source == "prepared":
        return
    if data.tokenizer in ("byte", "bpe") and vocabulary < BYTE_TOKENIZER_IDS:
        reason = f"is below the {BYTE_TOKENIZER_IDS} ids of bytes and an end of document"
        fix = "use model.vocab_size=384, or write data.path=PREFIX for data of another tokenizer"
        yield Problem("model.vocab_size", reason, fix)


def _cluster_problems(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.reserved_gib >= cluster.memory_gib:
        reason = f"leaves no memory: cluster.memory_gib is {cluster.memory_gib}"
        yield Problem("cluster.reserved_gib", reason, "lower it, or raise cluster.memory_gib")
    if cluster.device == "cpu" and cluster.transformer_engine:
        fix = "use cluster.transformer_engine=false"
        yield Problem("cluster.transformer_engine", "Transformer Engine needs a GPU", fix)
    if cluster.rdzv_endpoint is not None and re.fullmatch(r"[\w.:\[\]-]+:\d{1,5}", cluster.rdzv_endpoint) is None:
        fix = "for example cluster.rdzv_endpoint=node0:29500"
        yield Problem("cluster.rdzv_endpoint", "is not of the form host:port", fix)
    for option in cluster.srun_args:
        name = option.partition("=")[0]
        if not name.startswith("--") or name in SRUN_OPTIONS:
            reason = "is set by the job script" if name in SRUN_OPTIONS else "is not a long option of srun"
            yield Problem("cluster.srun_args", reason, "for example --container-image=FILE", value=option)
    if cluster.nodes is not None and cluster.node_rank is not None and cluster.node_rank >= cluster.nodes:
        range_text = f"0 to {cluster.nodes - 1}"
        reason = f"machines are numbered from {range_text}"
        yield Problem("cluster.node_rank", reason, f"use cluster.node_rank={range_text}")


def _training_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields a problem if the range of steps to profile is not within the run."""
    last_step = config.train.steps
    steps = config.run.profile_steps
    if steps is not None and not 1 <= steps[0] <= steps[1] <= last_step:
        reason = f"must be the first and the last step to record, in this order, between 1 and {last_step}"
        fix = f"for example run.profile_steps=[{min(3, last_step)},{min(5, last_step)}]"
        yield Problem("run.profile_steps", reason, fix, value=f"[{steps[0]},{steps[1]}]")


def _measurement_problems(config: RunConfig) -> Iterator[Problem]:
    """Yields the problems with the tables of measurements in the cluster profile."""
    table = config.cluster.matmul_tflops
    sizes = [size for size, _ in table]
    if sizes != sorted(set(sizes)):
        reason = "must be pairs of a matrix size and a rate in TFLOP/s, in ascending order of size"
        fix = "for example cluster.matmul_tflops=[[2048,540],[8192,800]]"
        yield Problem("cluster.matmul_tflops", reason, fix, value=[list(entry) for entry in table])
    for kind, ranks, size, seconds, busy in config.cluster.collectives:
        if kind not in get_args(Collective) or ranks < 2:
            reason = (
                f"must be one of {', '.join(get_args(Collective))}, at least 2 ranks, bytes, seconds, and "
                "the number of processor cores that it keeps busy"
            )
            fix = "for example cluster.collectives=[[all_reduce,2,1048576,0.002,1.5]]"
            yield Problem("cluster.collectives", reason, fix, value=[kind, ranks, size, seconds, busy])
