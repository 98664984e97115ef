"""Translates the arguments of a Megatron-LM run into canzona's settings.

Arguments for a model or an optimizer that canzona cannot plan are refused by name. Arguments for a model that
canzona can plan but not train are listed, and so are arguments that change a step in a way that canzona does
not simulate.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, get_args

from canzona_cli.config.compose import compose_run
from canzona_cli.config.megatron_arguments import Arguments, default, defaults, limited, read_arguments, table
from canzona_cli.config.overrides import key_of, text_value
from canzona_cli.config.recipes import GROUPS, builtin_recipes_dir, group_options
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text, settings
from canzona_cli.config.unknown_keys import exact_key
from canzona_cli.core.errors import ConfigError, Problem, refuse, value_of
from canzona_cli.core.reading import read_yaml
from canzona_cli.core.setup.stages import count_parts_as_layers

_REQUIRED: Final = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")
_SHAPE: Final = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim"),
    *("tied_embeddings", "qk_norm", "num_experts", "shared_ffn_hidden_size", "moe_layer_freq", "dense_ffn_hidden_size"),
    *("gated", "layernorm", "biases", "positions"),
)
"""The settings that identify a built-in model."""
_MOST_LAYERS: Final = 2048
"""The number of layers of the deepest model."""
_DECAYS: Final = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
BALANCING: Final = {"seq_aux_loss": "sequence", "global_aux_loss": "global", "none": "none"}
"""Megatron's names of the losses that spread tokens over experts, with canzona's."""
_BATCH_ENTRY: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?[KMBT]?):(\d{1,9})", re.IGNORECASE)
"""A batch in `--step-batch-size-schedule`, after the number of tokens from which on it is used."""
PROGRAM: Final = "program"
"""The word that stands for a setting when a user gives the program of a run: `program=gpt`."""
_ASKED: Final = {"bf16": "train.precision", "global_batch_size": "train.global_batch_size"}
"""The arguments that a command line must give, although Megatron has defaults, with their settings."""
_WITH_VOCABULARY: Final = (None, "NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer")
"""The types of tokenizers whose size `--vocab-size` gives; all others have a size of their own."""
_INTERLEAVED: Final = ("overlap_p2p_comm", "align_param_gather")
"""The arguments that Megatron switches off unless a stage has several model chunks."""
_EXCLUDING: Final = (
    ("train_iters", "train_samples", "the length of a run is given in iterations or in samples"),
    (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "both give the number of model chunks",
    ),
)
"""The pairs of arguments that Megatron does not accept together, with the reason."""


TpMode = Literal["blockwise", "duplicated", "distributed"]


@dataclass(frozen=True, kw_only=True)
class MegatronRun:
    """The settings of a Megatron-LM run, translated to canzona's."""

    path: Path
    overrides: Mapping[str, str]
    """The overrides for `canzona train`: values by key. The first is `recipe`, unless the user sets it."""
    arguments: Mapping[str, str]
    """The argument that determines each setting, as written, by the setting's key."""
    optimizer: Literal["adamw", "muon"]
    distributed: bool
    """True if data-parallel ranks divide the optimizer's work and state."""
    tp_mode: TpMode
    """The method by which Muon orthogonalises matrices that tensor parallelism divides."""
    tp_overlap: bool
    """True if tensor-parallel collectives overlap with matmuls, which canzona does not do."""
    dispatch_overlap: bool
    """True if transfers of tokens to experts overlap with computation, which canzona does not do."""
    not_understood: tuple[str, ...]
    """The arguments that canzona does not know, as written."""
    assumed: tuple[str, ...]
    """The arguments that a log does not have, although the installed Megatron has them and they have an
    effect. Their defaults are taken."""
    left_out: tuple[str, ...]
    """The arguments, with their values, that change a step in a way that canzona neither offers nor
    simulates."""
    plans_only: tuple[str, ...]
    """The reasons why canzona cannot train the model; empty if it can."""
    no_effect: tuple[str, ...]
    """The arguments that have no effect on a plan, as written."""

    def command(
        self, config: RunConfig, user_overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()
    ) -> tuple[str, ...]:
        """Returns the overrides that train the same model with canzona: the recipe, the translated values that
        differ from it, and the user's overrides.

        Args:
            config: the run with all overrides.
            user_overrides: the user's overrides.
        """
        recipe = [f"{key}={value}" for key, value in self.overrides.items() if key == "recipe"]
        groups = [override for override in user_overrides if key_of(override) in GROUPS]
        base = compose_run([*recipe, *groups], recipes_dirs=recipes_dirs, training=False).config
        changed = [
            f"{key}={value}"
            for key, value in self.overrides.items()
            if key != "recipe" and value_of(base, _leaf(key)) != value_of(config, _leaf(key))
        ]
        return *recipe, *changed, *user_overrides

    def by_argument(self, problem: Problem) -> Problem:
        """Returns the problem with the key replaced by the argument that determines the setting; unchanged if
        no argument determines it."""
        written = self.arguments.get(problem.key)
        return problem if written is None else replace(problem, key=f"{written} ({problem.key})")


def _leaf(key: str) -> str:
    return f"{key}.name" if key in GROUPS else key


def read_megatron_run(source: str, user_values: Sequence[str]) -> MegatronRun:
    """Reads and translates the arguments of a Megatron-LM run.

    Args:
        source: a log, a file with a command line, or a command line (see `read_arguments`).
        user_values: the user's overrides, and `program=gpt`, which take precedence over the source.

    Raises:
        ConfigError: the overrides choose an optimizer other than muon; or the source cannot be read; or
            arguments are missing, impossible, or describe a model or an optimizer that canzona cannot plan.
            All problems with the arguments are reported at once.
    """
    values = {key_of(override): override.partition("=")[2] for override in user_values}
    if values.get("optimizer", "muon") != "muon":
        reason = "--from-megatron compares Megatron's optimizers with canzona's Muon"
        fix = "leave it out here, and add it to the command that --from-megatron shows"
        raise ConfigError(Problem("optimizer", reason, fix, value=values["optimizer"]))
    arguments = read_arguments(source)
    arguments.program = values.pop(PROGRAM, arguments.program)
    return translated(arguments, values)


def translated(arguments: Arguments, user_values: Mapping[str, str]) -> MegatronRun:
    """Translates the arguments of a Megatron-LM run.

    Args:
        user_values: the user's values by key, which take precedence over the arguments.

    Raises:
        ConfigError: arguments are missing, impossible, or describe a model or an optimizer that canzona
            cannot plan.
    """
    translation = _Translation(arguments, user_values)
    run = translation.run()
    refuse(translation.problems)
    return run


class _Translation:
    """The translation of one run: its settings, and the problems with its arguments.

    Args:
        user_values: the user's values by key.
    """

    def __init__(self, arguments: Arguments, user_values: Mapping[str, str]) -> None:
        self._given, self._typed = arguments, user_values
        self.problems: list[Problem] = []
        self._overrides: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._left_out: list[str] = []
        self._plans_only: list[str] = []

    def run(self) -> MegatronRun:
        """Translates all arguments; collects problems in `problems`."""
        self._check()
        for name in table()["same"]:
            if (key := exact_key(name)) is not None:
                self._set(key, self._text(name), name)
        self._model()
        self._parallel()
        batch = self._batch()
        self._schedule(batch)
        self._optimizer()
        self._omissions()
        recipe = {} if "recipe" in self._typed else {"recipe": self._recipe()}
        mode = self._text("muon_tp_mode")
        return MegatronRun(
            path=self._given.path,
            overrides={**recipe, **self._overrides},
            arguments=self._names,
            optimizer="adamw" if self._text("optimizer") == "adam" else "muon",
            distributed=self._distributed,
            tp_mode=next((possible for possible in get_args(TpMode) if possible == mode), "blockwise"),
            tp_overlap=self._on("tp_comm_overlap"),
            dispatch_overlap=self._on("overlap_moe_expert_parallel_comm"),
            not_understood=tuple(dict.fromkeys(self._given.not_understood)),
            assumed=tuple(self._given.assumed),
            left_out=tuple(self._left_out),
            plans_only=tuple(self._plans_only),
            no_effect=tuple(dict.fromkeys(self._given.no_effect)),
        )

    @property
    def _distributed(self) -> bool:
        names = ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer")
        return any(map(self._on, names)) or self._text("optimizer") == "dist_muon"

    def _check(self) -> None:
        """Reports arguments that are missing, refused or contradictory, and lists the reasons why canzona can
        only plan the model."""
        if self._given.program != "gpt":
            reason = "is not known" if self._given.program is None else "is another program than pretrain_gpt.py"
            fix = f"add {PROGRAM}=gpt to this command if the run trains Megatron's GPTModel"
            self.problems.append(
                Problem(PROGRAM, f"{reason}; canzona plans GPT models only", fix, value=self._given.program)
            )
        for name in _REQUIRED:
            if self._text(name) is None and exact_key(name) not in self._typed:
                self._report(name, "is missing", f"add it, or {exact_key(name)}=N to this command")
        for name, key in _ASKED.items():
            scheduled = name == "global_batch_size" and self._text("step_batch_size_schedule") is not None
            if not (self._given.complete or scheduled or name in self._given.written or key in self._typed):
                value = "bf16 or fp32" if name == "bf16" else "N"
                self._report(name, "is missing", f"add it, or {key}={value} to this command")
        for name, given in self._given.values.items():
            if default(name) in ("true", "false") and given not in ("true", "false", None):
                self._report(name, "is neither True nor False")
        for name, accepted, reason in limited("refused"):
            if not self._is_accepted(name, accepted):
                if name not in self._given.written:
                    reason += f"; without the flag, Megatron uses {self._text(name)}"
                self._report(name, reason)
        for name, accepted, reason in limited("plans_only"):
            if not self._is_accepted(name, accepted):
                remark = "" if name in self._given.written else " (Megatron's default)"
                self._plans_only.append(f"{self._listed(name)}{remark}: {reason}")
        for name, other, reason in _EXCLUDING:
            if self._text(name) is not None and self._text(other) is not None:
                self._report(name, f"{reason}, and {self._written(other)} is given too", "keep one of them")
        if self._on("overlap_param_gather") and not self._on("overlap_grad_reduce"):
            self._report("overlap_param_gather", "needs --overlap-grad-reduce", "give both, or none")
        if self._on("overlap_param_gather") and not self._distributed:
            self._report("overlap_param_gather", "needs --use-distributed-optimizer", "give both, or none")
        if (mode := self._text("muon_tp_mode")) not in get_args(TpMode):
            self._report("muon_tp_mode", f"{mode} is not one of {', '.join(get_args(TpMode))}")
        if self._text("recompute_method") == "block":
            self._report("recompute_method", "canzona recomputes the same part of every layer", "use uniform")

    def _model(self) -> None:
        hidden, heads = self._number("hidden_size", 1), self._number("num_attention_heads", 1)
        if self._text("kv_channels") is None and hidden % heads:
            self._report("hidden_size", f"is not a multiple of the {heads} attention heads", "give --kv-channels")
        gated = self._on("swiglu")
        experts = self._number("num_experts", 0)
        default_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        ffn = self._number("ffn_hidden_size", default_ffn)
        groups = self._number("num_query_groups", 1) if self._on("group_query_attention") else heads
        self._set("model.head_dim", self._number("kv_channels", hidden // heads), "kv_channels")
        self._set("model.num_query_groups", groups, "num_query_groups")
        ffn_argument = "moe_ffn_hidden_size" if experts else "ffn_hidden_size"
        self._set("model.ffn_hidden_size", self._number(ffn_argument, ffn), ffn_argument)
        self._set("model.tied_embeddings", not self._on("untie_embeddings_and_output_weights"))
        self._set("model.gated", gated, "swiglu")
        self._set("model.layernorm", self._text("normalization") == "LayerNorm", "normalization")
        if (biases := self._on("add_bias_linear")) and experts:
            self._plans_only.append("canzona trains experts only with --disable-bias-linear")
        self._set("model.biases", biases and not experts, "add_bias_linear")
        positions = 0
        if self._text("position_embedding_type") == "learned_absolute":
            positions = self._number("max_position_embeddings", 1)
            self._overrides.pop("model.rope_base", None)
        self._set("model.positions", positions, "position_embedding_type")
        if self._on("use_rope_scaling"):
            self._set("model.rope_scaling", self._text("rope_scaling_factor"), "rope_scaling_factor")
        self._set("model.num_experts", experts, "num_experts")
        frequency = self._layers_with_experts() if experts else 1
        self._set("model.moe_layer_freq", override_text(frequency), "moe_layer_freq")
        self._set("model.dense_ffn_hidden_size", 0 if frequency == 1 else ffn, "ffn_hidden_size")
        shared = self._number("moe_shared_expert_intermediate_size", 0) if experts else 0
        self._set("model.shared_ffn_hidden_size", shared, "moe_shared_expert_intermediate_size")
        if experts:
            self._set("model.experts_per_token", self._number("moe_router_topk", 2), "moe_router_topk")
            balancing = self._text("moe_router_load_balancing_type") or ""
            if balancing in BALANCING:
                self._set("model.balancing_loss", BALANCING[balancing], "moe_router_load_balancing_type")
            else:
                self._left_out.append(self._listed("moe_router_load_balancing_type"))
            if balancing != "none":
                self._set("model.balancing_weight", self._text("moe_aux_loss_coeff"), "moe_aux_loss_coeff")
        self._vocabulary()

    def _layers_with_experts(self) -> int | Sequence[int]:
        """Returns the value of `model.moe_layer_freq`; 1 if all layers have experts."""
        text, layers = (self._text("moe_layer_freq") or "1").strip(), self._number("num_layers", 1)
        if " " in text and text.replace(" ", "").isdecimal():  # a list in a checkpoint's arguments
            text = f"[{text.replace(' ', ',')}]"
        try:
            frequency = _evaluated(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            frequency = 0
        if isinstance(frequency, int) and frequency > 0:
            return frequency
        if isinstance(frequency, list) and len(frequency) == layers and {1} <= {*frequency} <= {0, 1}:
            return frequency if 0 in frequency else 1
        reason = f"is neither a number nor a list of a 1 or 0 for each of the {layers} layers, with at least one 1"
        self._report("moe_layer_freq", reason, "for example 2, or ([0]*1+[1]*3)")
        return 1

    def _vocabulary(self) -> None:
        if padded := self._number("padded_vocab_size", 0):
            self._set("model.vocab_size", padded, "padded_vocab_size")
            return
        is_given = self._text("vocab_size") is not None and self._given.tokenizer in _WITH_VOCABULARY
        if not is_given:
            if not {"model.vocab_size", "recipe"} & self._typed.keys():
                fix = "add model.vocab_size=N to this command: the padded size, which the run's log has"
                self._report("padded_vocab_size", "is missing: it depends on the tokenizer, which is not read", fix)
            return
        size = self._number("vocab_size", 1)
        multiple = self._number("make_vocab_size_divisible_by", 128) * self._number("tensor_model_parallel_size", 1)
        padded = -(-size // multiple) * multiple if self._on("pad_vocab_size") else size
        self._set("model.vocab_size", padded, "vocab_size")

    def _parallel(self) -> None:
        self._gpus = self._number("world_size", 0, key="gpus")
        if not self._gpus:
            self.problems.append(Problem("gpus", "the number of GPUs is not known", "add gpus=N to this command"))
        self._set("gpus", self._gpus, "world_size")
        if self._given.per_node and (self._given.nodes or 1) > 1:
            self._set("cluster.gpus_per_node", self._given.per_node, "world_size")
        if self._number("tensor_model_parallel_size", 1) > 1 and not self._on("sequence_parallel"):
            self._set("parallel.sequence_parallel", False)
        self._stages()
        if self._number("num_experts", 0) or self._number("expert_model_parallel_size", 1) > 1:
            self._expert_parallelism()

    def _stages(self) -> None:
        layers, pp = self._number("num_layers", 1), self._number("pipeline_model_parallel_size", 1)
        counts = tuple(self._on(f"account_for_{part}_in_pipeline_split") for part in ("embedding", "loss"))
        counted_layers = layers + sum(counts)
        per_chunk = self._number("num_layers_per_virtual_pipeline_stage", 0)
        chunks = self._number("num_virtual_stages_per_pipeline_rank", 1)
        chunks = self._number("virtual_pipeline_model_parallel_size", chunks)
        if per_chunk:
            chunks, rest = divmod(counted_layers, pp * per_chunk)
            if rest or not chunks:
                reason = f"does not cut {counted_layers} layers on {pp} stages into whole chunks"
                self._report("num_layers_per_virtual_pipeline_stage", reason, "use a divisor of a stage's layers")
        self._chunks = max(1, chunks)
        if pp > 1 or chunks > 1:
            self._set("parallel.vpp", self._chunks, "num_layers_per_virtual_pipeline_stage")
        counted_parts = count_parts_as_layers(layers, pp * self._chunks)
        if pp > 1 and counted_parts is not None and counted_parts != counts:
            parts = [part for part, is_counted in counted_parts._asdict().items() if is_counted]
            name = f"account_for_{'loss' if counted_parts.loss != counts[1] else 'embedding'}_in_pipeline_split"
            counted_as_layers = " and ".join(parts) or "nothing"
            reason = f"canzona counts {counted_as_layers} as a layer when it cuts {layers} layers"
            self._report(name, f"{reason} into {pp * self._chunks} parts")

    def _expert_parallelism(self) -> None:
        tp, ep = self._number("tensor_model_parallel_size", 1), self._number("expert_model_parallel_size", 1)
        self._set("parallel.ep", ep, "expert_model_parallel_size")
        expert_tp = self._number("expert_tensor_parallel_size", tp)
        expected = tp if ep == 1 else 1
        if expert_tp != expected:
            context = ", like the rest of the model" if ep == 1 else " with expert parallelism"
            reason = f"would cut experts into {expert_tp} parts; canzona cuts them into {expected}{context}"
            self._report("expert_tensor_parallel_size", reason, f"use {expected}")
        if ep > 1 and self._on("add_bias_linear"):
            reason = "gives experts biases, which canzona does not divide among ranks"
            self._report("add_bias_linear", reason, "use --disable-bias-linear")
        if ep > 1:
            self._set("parallel.dispatcher", self._text("moe_token_dispatcher_type"), "moe_token_dispatcher_type")

    def _batch(self) -> int:
        """Sets batch size, recomputation, precision and data; returns the number of sequences in a step."""
        batch = self._number("global_batch_size", 1)
        name, schedule = self._batch_schedule(batch)
        if schedule and "train.global_batch_size" not in self._typed:
            _, batch = schedule[-1]
        self._set("train.global_batch_size", batch, "global_batch_size")
        self._rampup = _rampup(schedule)
        if self._rampup:
            self._set("train.batch_rampup", override_text(self._rampup), name)
        self._set("train.recompute", self._text("recompute_granularity") or "none", "recompute_granularity")
        self._set("train.precision", "bf16" if self._on("bf16") else "fp32", "bf16")
        if self._on("bf16"):
            reduced = "bf16" if self._on("grad_reduce_in_bf16") else "fp32"
            self._set("train.grad_reduce_dtype", reduced, "grad_reduce_in_bf16")
        if self._text("fp8"):
            self._set("train.fp8", self._text("fp8_recipe"), "fp8_recipe")
        self._data()
        return batch

    def _batch_schedule(self, batch: int) -> tuple[str, list[tuple[int, int]]]:
        """Returns the name of the argument that changes the batch in the run, and its batches, each after the number of
        sequences from which on it is used; none if the batch is constant.

        Args:
            batch: the batch after the ramp-up of `--rampup-batch-size`.
        """
        name, ramp = "step_batch_size_schedule", self._text("rampup_batch_size")
        if (text := self._text(name)) is not None:
            entries = [_BATCH_ENTRY.fullmatch(entry) for entry in text.replace(",", " ").split()]
            length = self._number("seq_length", 1)
            schedule = sorted((_tokens(entry[1]) // length, _tokens(entry[2])) for entry in entries if entry)
            if len(schedule) < len(entries) or not schedule or schedule[0][0] > 0:
                self._report(name, "is not a list of TOKENS:SEQUENCES that begins with 0 tokens")
            return name, schedule
        if ramp is None:
            return name, []
        name = "rampup_batch_size"
        numbers = [int(word) for word in ramp.split() if word.isdecimal() and len(word) < 16]
        if len(numbers) != 3 or not all(numbers) or numbers[0] > batch or (batch - numbers[0]) % numbers[1]:
            self._report(name, f"does not lead to the batch of {batch} sequences in equal increments")
            return name, []
        start, increment, samples = numbers
        increments = (batch - start) // increment
        sizes = [start + increment * index for index in range(increments + 1)]
        return name, [(-(-samples * index // max(1, increments)), size) for index, size in enumerate(sizes)]

    def _data(self) -> None:
        """Sets the data: one path, or several with their weights."""
        words = (self._text("data_path") or "").split()
        weights, paths = words[::2], words[1::2]
        if len(words) == 1:
            weights, paths = ["1"], words
        if not words or {"data", "data.path", "data.blend"} & self._typed.keys():
            return
        if len(weights) > len(paths) or None in map(_number, weights):
            reason = "has no weights: Megatron takes every set as a whole, and canzona's blends have shares"
            fix = "add data.blend='{PATH:WEIGHT,...}' to this command, with the tokens of each set as its weight"
            self._report("data_path", reason, f"{fix} (canzona data show PATH)")
        elif len(paths) == 1:
            self._set("data.path", text_value(paths[0]), "data_path")
        elif twice := [path for path in paths if paths.count(path) > 1]:
            self._report("data_path", f"lists {twice[0]} twice", "list it once, with the sum of its weights")
        else:
            blend = ",".join(f"{path}:{weight}" for weight, path in zip(weights, paths, strict=True))
            self._set("data.blend", f"{{{blend}}}", "data_path")

    def _schedule(self, batch: int) -> None:
        def steps(of: str) -> int | None:
            """Returns a number of steps, which the arguments give in iterations or in samples; None if they
            give neither."""
            iterations, samples = self._number(f"{of}_iters", 0), self._number(f"{of}_samples", 0)
            return iterations or _steps_of(samples, self._rampup, batch) or None

        train_steps = steps("train")
        decay = _DECAYS.get(self._text("lr_decay_style") or "")
        self._set("train.steps", train_steps, "train_iters")
        if decay is None:
            self._left_out.append(self._listed("lr_decay_style"))
            return
        self._set("schedule.decay", decay, "lr_decay_style")
        decay_steps = steps("lr_decay")
        if decay != "constant":
            rate, least = (_number(self._text(name)) for name in ("lr", "min_lr"))
            self._set("optimizer.min_lr_ratio", min_lr_ratio(rate, least) if rate else None, "min_lr")
        if decay != "constant" and decay_steps != train_steps:
            self._set("schedule.decay_steps", decay_steps, "lr_decay_iters")
        if decay == "wsd":
            self._set("schedule.wsd_decay_steps", steps("lr_wsd_decay"), "lr_wsd_decay_iters")
            if self._text("lr_wsd_decay_style") != "linear":
                self._left_out.append(self._listed("lr_wsd_decay_style"))
        text = self._text("lr_warmup_fraction") or "0"
        if (fraction := _number(text)) is None:
            self._unusable("lr_warmup_fraction", text, "schedule.warmup_steps")
        warmup = steps("lr_warmup") or int((fraction or 0.0) * (decay_steps or train_steps or 0))
        self._set("schedule.warmup_steps", warmup, "lr_warmup_iters")

    def _optimizer(self) -> None:
        name = self._text("optimizer")
        if name not in ("adam", "muon", "dist_muon"):
            reason = "canzona simulates only Megatron's adam, muon and dist_muon"
            self._report("optimizer", reason, "use one of these")
        self._set("optimizer", "muon")
        # The splitting of Megatron's Muon, and of canzona's engine in Megatron's loop.
        self._set("engine.splitting", "qkv" if self._on("muon_split_qkv") else "fused", "muon_split_qkv")
        if name == "adam":
            return
        for argument in table()["muon"]:
            if (key := exact_key(argument)) is not None:
                self._set(key, self._text(argument), argument)

    def _omissions(self) -> None:
        """Lists the arguments for features that canzona neither has nor simulates."""
        entries = table()["left_out"]
        assert isinstance(entries, Mapping)
        for name, accepted in entries.items():
            if name in _INTERLEAVED and self._chunks == 1:
                continue
            assert isinstance(accepted, list)
            if not self._is_accepted(name, [default(name), *accepted]):
                self._left_out.append(self._listed(name))

    def _recipe(self) -> str:
        """Returns the built-in recipe for the model. If there is none, returns a recipe of the same family,
        and names the run after the file."""
        if self._same_model is not None:
            return self._same_model
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self._given.path.stem).strip("-._") or "megatron"
        self._set("name", name)
        self._set("model.name", name)
        if self._number("num_experts", 0):
            return "qwen3-30b-a3b"
        return "qwen3-8b" if self._on("qk_layernorm") else "llama3-8b"

    @cached_property
    def _same_model(self) -> str | None:
        """The name of the built-in model with the same matrices, which is also the name of its recipe; None
        if there is no such model."""
        for name, file in group_options("model", [builtin_recipes_dir()]).items():
            model = {key: setting.default for key, setting in settings().items() if key.startswith("model.")}
            model |= {f"model.{key}": value for key, value in read_yaml(file).items()}
            if all(self._overrides.get(f"model.{key}") == _written(model[f"model.{key}"]) for key in _SHAPE):
                return name
        return None

    def _is_accepted(self, name: str, accepted: Sequence[object]) -> bool:
        """Returns True if an argument has one of the accepted values; `=NAME` stands for the value of NAME."""
        value = self._text(name)
        if value is None and name not in self._given.values and name not in defaults():
            return True  # the run's version of Megatron does not have it
        for entry in accepted:
            text = self._text(entry[1:]) if isinstance(entry, str) and entry[:1] == "=" else _written(entry)
            if value == text or _number(value) == _number(text) is not None:
                return True
        return False

    def _text(self, name: str) -> str | None:
        """Returns the value of an argument, or its default if it is not given; None if it has no default
        either."""
        return self._given.text(name)

    def _on(self, name: str) -> bool:
        return self._text(name) == "true"

    def _number(self, name: str, missing: int, *, key: str | None = None) -> int:
        """Returns the user's value of the setting that an argument determines, otherwise the argument's
        value, otherwise `missing`. Reports a value that is not a whole number in range."""
        key = key or exact_key(name) or ""
        text = self._typed.get(key, self._text(name))
        if text is None:
            return missing
        number = _number(text)
        least = min(missing, 1)
        if number is None or not number.is_integer() or not least <= number < 1 << 53:
            self._unusable(name, text, key)
            return missing
        return int(number)

    def _set(self, key: str, value: float | str | None, name: str | None = None) -> None:
        """Sets the value of a setting, unless the user has set it or `value` is None.

        Args:
            name: the argument that determines the value.
        """
        if key in self._typed or value is None:
            return
        text = _written(value)
        assert text is not None
        self._overrides[key] = text
        if name is not None and name in self._given.written:
            self._names[key] = self._given.written[name]

    def _unusable(self, name: str, text: str, key: str) -> None:
        fix = f"add {key}=VALUE to this command" if key else ""
        kind = "a number" if name == "lr_warmup_fraction" else "a positive whole number"
        self._report(name, f"is not {kind}", fix, value=text)

    def _listed(self, name: str) -> str:
        """Returns an argument and its value, as written."""
        value = self._text(name)
        return self._written(name) + ("" if value in ("true", None) else f" {value}")

    def _written(self, name: str) -> str:
        return self._given.written.get(name, f"--{name.replace('_', '-')}")

    def _report(self, name: str, reason: str, fix: str = "", *, value: str | None = None) -> None:
        shown = value or (self._given.values[name] if name in self._given.written else None)
        problem = Problem(self._written(name), reason, fix, value=shown)
        if problem not in self.problems:
            self.problems.append(problem)


def _tokens(text: str) -> int:
    """Returns a number that may end with K, M, B or T."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1].upper(), 1)
    return int(float(text.rstrip("KMBTkmbt")) * factor)


def _rampup(schedule: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the batches before the last one, each with its number of steps.

    Args:
        schedule: the batches, each after the number of sequences from which on it is used. A batch changes only
            between two steps, and is left out if the step before it reached the next batch too.
    """
    stages, done = [], 0
    for (_, size), (end, _) in pairwise(schedule):
        if done < end:
            steps = -(-(end - done) // size)
            stages.append((size, steps))
            done += steps * size
    return stages


def _steps_of(samples: int, rampup: Sequence[tuple[int, int]], batch: int) -> int:
    """Returns the number of steps that read `samples` sequences. As in Megatron, the last step may read more after a
    ramp-up, and does not otherwise."""
    steps = 0
    for size, most in rampup:
        taken = min(most, -(-samples // size))
        steps, samples = steps + taken, max(0, samples - taken * size)
    return steps + (-(-samples // batch) if rampup else samples // batch)


def min_lr_ratio(lr: float, min_lr: float | None) -> float:
    """Returns Megatron's minimum of the learning rate as a share of its peak, to 12 digits, so that the product is the
    minimum again; 0 without a minimum."""
    return float(f"{(min_lr or 0.0) / lr:.12g}")


def _written(value: object) -> str | None:
    """Returns a value from the table or from code as the text of an argument or an override."""
    return None if value is None else override_text(value)


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "nan")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _evaluated(node: ast.expr) -> int | list[int]:
    """Evaluates a pattern of layers, such as `([0]*1+[1]*3)*2`, which Megatron evaluates as Python.

    Raises:
        ValueError: it is not made of numbers, lists, sums and products, or is longer than any model.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=entries):
            return [entry for each in entries if isinstance(entry := _evaluated(each), int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _evaluated(left), _evaluated(right)
            if isinstance(one, list) and isinstance(other, list):
                return one + other
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, other = _evaluated(left), _evaluated(right)
            if isinstance(one, list) and isinstance(other, int) and len(one) * other <= _MOST_LAYERS:
                return one * other
    raise ValueError
