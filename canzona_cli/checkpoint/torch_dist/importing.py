"""Imports a checkpoint in Megatron's format `torch_dist`: masters, and the state of Muon or AdamW, so that
canzona continues a run of Megatron."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Final

import torch

from canzona_cli.checkpoint.commit import write_checkpoint
from canzona_cli.checkpoint.contents import MASTER
from canzona_cli.checkpoint.manifest import NO_OPTIMIZER, Buffer, Progress, Scalar, Shard
from canzona_cli.checkpoint.shard_file import raw_bytes
from canzona_cli.checkpoint.torch_dist.folder import TorchDistFolder
from canzona_cli.checkpoint.torch_dist.names import Kind, Parameter, kind_of_state, parameters, tensor_problems
from canzona_cli.checkpoint.verify import limit_problems
from canzona_cli.config.compose import Composed, compose_run, dump_resolved
from canzona_cli.config.megatron_arguments import saved_arguments
from canzona_cli.config.megatron_translation import MegatronRun, translated
from canzona_cli.config.overrides import key_of
from canzona_cli.config.schema import RunConfig
from canzona_cli.config.settings import override_text
from canzona_cli.config.settings import settings as all_settings
from canzona_cli.core.engine.stored_state import stored_step, zero_moments
from canzona_cli.core.errors import CheckpointInvalid, Problem, refuse, value_of
from canzona_cli.core.model.geometry import unit_shape
from canzona_cli.core.optimizers.facts import MOMENTS
from canzona_cli.core.setup import PARTS_OF_LLAMA
from canzona_cli.core.writing import write_text_atomic
from canzona_cli.records.files import RunFiles

_JOB_ARGUMENTS: Final = (
    *("use_checkpoint_args", "perform_rl_step", "yaml_cfg", "fp16", "fp8", "fp4", "use_megatron_fsdp", "decoupled_lr"),
    *("num_distributed_optimizer_instances", "optimizer_cpu_offload", "cpu_offloading_num_layers"),
    *("fine_grained_activation_offloading", "hybrid_context_parallel", "muon_scalar_optimizer", "muon_tp_mode"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "overlap_param_gather"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout"),
    *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards", "expert_model_parallel_size"),
    *("num_virtual_stages_per_pipeline_rank", "recompute_granularity", "recompute_method"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "expert_tensor_parallel_size"),
)
"""The arguments of Megatron's job that have no effect on the weights and the state in a checkpoint."""
_NO_DROPOUT: Final = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_CHOSEN_LATER: Final = ("gpus", "parallel.", "cluster.", "train.micro_batch_size")
"""The settings that an import does not determine, because they are chosen when the run is trained."""
_OPTIMIZERS: Final = ("adam", "muon", "dist_muon")
"""The optimizers of Megatron whose state can be imported."""
_MUST_MATCH: Final = ("model.", "train.seq_length")
"""The settings, and groups of settings, that must equal the checkpoint's arguments, except `_FREE`."""
_FREE: Final = ("model.name", "model.init_std", "model.balancing_loss", "model.balancing_weight")
_MOST_COUNTED: Final = 10**12
"""The largest number of steps or samples, as in canzona's own checkpoints."""
_MOST: Final = 20
"""The maximum number of problems with tensors that are listed."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """A checkpoint to import, after it has been compared with the run that it is imported into."""

    folder: TorchDistFolder
    composed: Composed
    kind: Kind | None
    """The optimizer whose state is imported; None for weights without state."""
    progress: Progress
    step: float
    """The number of steps that AdamW has taken."""
    masters: bool
    """True to import fp32 masters, which the checkpoint then has for all parameters; False to import the model's
    weights as masters."""
    notes: tuple[str, ...]
    """The notes for the user on state and features that are not imported."""

    @property
    def config(self) -> RunConfig:
        return self.composed.config

    @property
    def bytes(self) -> int:
        """The size of the masters and the state in fp32, in bytes."""
        stored = parameters(self.config.model)
        return 4 * sum(prod(parameter.shape) * (1 + len(self.fields(parameter))) for parameter in stored)

    def fields(self, parameter: Parameter) -> tuple[str, ...]:
        """Returns the names of the parameter's state tensors that are imported."""
        return parameter.state_fields(self.kind) if self.kind else ()


def plan_import(folder: TorchDistFolder, overrides: Sequence[str], recipes_dirs: Sequence[Path] = ()) -> Import:
    """Composes the run of an import from the checkpoint's arguments and the overrides; checks that the
    checkpoint contains the run's model.

    Raises:
        ConfigError: canzona does not support the model, or the recipe has another model; lists all settings
            and at most `_MOST` tensors that differ.
    """
    run, notes = _translate(folder)
    settings = {key: value for key, value in run.overrides.items() if not key.startswith(_CHOSEN_LATER)}
    # The run's data are named when it is resumed, and checked then: its tokenizer may have fewer ids than the recipe's.
    theirs = compose_run([f"{key}={value}" for key, value in settings.items()], training=False).config
    kind = kind_of_state(folder.keys, theirs.model) if folder.arguments.get("optimizer") in _OPTIMIZERS else None
    settings["optimizer"] = kind or run.optimizer
    asked = {key_of(override) for override in overrides}
    if asked & {"recipe", "model"}:
        settings = {}
    if "optimizer" in asked:  # Megatron's settings do not apply to another optimizer
        settings = {key: value for key, value in settings.items() if not key.startswith("optimizer")}
    derived = [f"{key}={value}" for key, value in settings.items() if key not in asked]
    composed = compose_run([*derived, *overrides], recipes_dirs=recipes_dirs, training=False)
    refuse([*_setting_problems(folder, composed.config, theirs), *_tensor_problems(folder, theirs)])
    return _with_state(folder, composed, kind, notes)


def _translate(folder: TorchDistFolder) -> tuple[MegatronRun, tuple[str, ...]]:
    """Translates the arguments of the run that saved the checkpoint; also returns a note on features of the
    run that canzona does not have.

    Raises:
        ConfigError: canzona cannot train the model.
    """
    given = {name: value for name, value in folder.arguments.items() if name not in _JOB_ARGUMENTS}
    dropped = [name for name, value in _NO_DROPOUT.items() if given.get(name, value) != value]
    if given.get("optimizer") not in _OPTIMIZERS:
        given["optimizer"] = "muon"  # the run will start from the weights only
    arguments = saved_arguments({**given, **_NO_DROPOUT, "world_size": 1, "micro_batch_size": 1}, folder.asked)
    run = translated(arguments, {})
    unsupported = [*run.plans_only]
    for key, llama in PARTS_OF_LLAMA.items():
        if (value := run.overrides[f"model.{key}"]) != override_text(llama):
            unsupported.append(f"only models without parts of GPT-2 can be imported, not with model.{key}={value}")
    fix = "import a decoder like Qwen3, dense or with experts, or Llama"
    refuse(Problem(key="DIR", value=folder.path, reason=reason, fix=fix) for reason in unsupported)
    other = [*(f"{name} {given[name]}" for name in dropped), *run.left_out]
    return run, (f"Megatron trained with features that canzona does not have: {', '.join(other)}",) if other else ()


def _setting_problems(folder: TorchDistFolder, ours: RunConfig, theirs: RunConfig) -> Iterator[Problem]:
    """Yields a problem for each setting of the run that differs from the checkpoint's arguments."""
    compared = (key for key in all_settings() if key.startswith(_MUST_MATCH) and key not in _FREE)
    for key in compared:
        value, stored = value_of(ours, key), value_of(theirs, key)
        if value != stored:
            reason = f"is {override_text(stored)} in {folder.path}"
            yield Problem(key=key, value=value, reason=reason, fix=f"{key}={override_text(stored)}")


def _tensor_problems(folder: TorchDistFolder, theirs: RunConfig) -> list[Problem]:
    fix = "the checkpoint's arguments belong to another model, or the model is not a decoder like Qwen3 or Llama"
    problems = tensor_problems(folder.keys, theirs.model).items()
    return limit_problems([Problem(key=key, reason=reason, fix=fix) for key, reason in problems], _MOST, key="tensors")


def _with_state(folder: TorchDistFolder, composed: Composed, kind: Kind | None, notes: tuple[str, ...]) -> Import:
    """Returns an import with optimizer state if the run can use it, otherwise without."""
    step, optimizer = stored_step(folder.common.get("optimizer")), composed.config.optimizer.name
    samples, iteration = folder.arguments.get("consumed_train_samples"), folder.common.get("iteration")
    counts = {"consumed_train_samples": samples, "iteration": iteration, "step of the optimizer": step}
    refuse(filter(None, (_count_problem(folder, *count) for count in counts.items())), CheckpointInvalid)
    every = list(parameters(composed.config.model))
    without = [parameter.name for parameter in every if parameter.stored_key(folder.keys, MASTER) is None]
    if 0 < len(without) < len(every):
        # Masters of some parameters beside rounded weights of others would be a model that no step has had.
        count = f"{len(without)} of {len(every)} parameters, the first is {without[0]}, have no fp32 master"
        notes = (*notes, f"all masters begin as the model's weights, in the precision that it trained in: {count}")
    of_muon = [each.keys[0] for each in every if each.updated_by_muon(folder.keys)]
    if kind == "muon" and of_muon:
        notes = (*notes, zero_moments(of_muon))
    imported = partial(Import, folder=folder, composed=composed, masters=not without)
    nothing = Progress(step=0, samples=0, tokens=0)
    if kind is None:
        why = "its optimizer state is missing, belongs to another optimizer, or is tied to a layout of ranks"
    elif kind != optimizer:
        why = f"its optimizer state belongs to {kind}, but the recipe's optimizer is {optimizer}"
    elif type(samples) is not int or type(iteration) is not int or step is None or not 0 < step <= iteration:
        why = "it lacks the number of steps that its optimizer has taken, or the number of samples"
    else:
        tokens = samples * composed.config.train.seq_length
        progress = Progress(step=iteration, samples=samples, tokens=tokens)
        return imported(kind=kind, progress=progress, step=step, notes=notes)
    note = f"weights only, as step 0: {why}"
    return imported(kind=None, progress=nothing, step=0.0, notes=(*notes, note))


def _count_problem(folder: TorchDistFolder, name: str, count: object) -> Problem | None:
    """Returns a problem if a stored count is a number, but not one that a run can have reached."""
    if not isinstance(count, int | float) or 0 <= count <= _MOST_COUNTED:
        return None
    reason = f"its {name} is {count:g}, so it is damaged"
    return Problem(key="DIR", value=folder.path, reason=reason, fix="import an earlier checkpoint")


def import_torch_dist(source: Import, files: RunFiles, *, on_bytes: Callable[[int], None] = lambda _: None) -> Path:
    """Writes the checkpoint into a run directory, with only a part of one layer in memory at a time; returns
    the checkpoint's folder.

    The run's `config.yaml` is written as well, for `canzona resume`.

    Raises:
        CheckpointInvalid: a tensor cannot be read, or is not finite.
        SaveFailed: the checkpoint cannot be written.
    """
    keys, tensors, scalars = source.folder.keys, defaultdict[int | None, dict[str, Buffer]](dict), dict[str, Scalar]()
    for parameter in parameters(source.config.model):
        fields = source.fields(parameter)
        by_field = {field: parameter.stored_key(keys, field) for field in fields}
        by_field[MASTER] = parameter.stored_key(keys, MASTER if source.masters else "")
        units = dict.fromkeys(block.unit for block in parameter.blocks)
        for field, key in by_field.items():
            read = _unit_reader(source.folder, parameter, key, on_bytes)
            for unit in units:
                shape = unit_shape(unit, source.config.model)
                data = partial(read, unit)
                tensors[parameter.layer][f"{unit}/{field}"] = Buffer(dtype="F32", shape=shape, data=data)
        if MOMENTS[0] in fields:
            scalars |= {f"{unit}/step": source.step for unit in units}
    shards = [Shard(tensors=part, scalars=scalars if layer is None else {}) for layer, part in tensors.items()]
    folder = write_checkpoint(files, shards, source.config, source.progress, optimizer=source.kind or NO_OPTIMIZER)
    write_text_atomic(files.config, dump_resolved(source.config))
    return folder


def _unit_reader(
    folder: TorchDistFolder, parameter: Parameter, key: str | None, on_bytes: Callable[[int], None]
) -> Callable[[str], Iterator[memoryview]]:
    """Returns a function that yields the bytes of a unit of the parameter, and must be called exactly once
    for each unit. It reads the stored tensor only once, at the first call.

    The function raises CheckpointInvalid if the tensor cannot be read, or is not finite.
    """
    unwritten: dict[str, torch.Tensor] = {}

    def read(unit: str) -> Iterator[memoryview]:
        if not unwritten:
            unwritten.update(_units(folder, parameter, key))
        data = unwritten.pop(unit)
        on_bytes(data.nbytes)
        yield raw_bytes(data)

    return read


def _units(folder: TorchDistFolder, parameter: Parameter, key: str | None) -> dict[str, torch.Tensor]:
    """Reads the tensor with this key, and returns its units by name; zeros if there is no key."""
    whole = torch.zeros(parameter.shape) if key is None else folder.read(key, parameter.place(key))
    if not all(bound.isfinite() for bound in torch.aminmax(whole)):
        reason, fix = "has elements that are infinite or NaN", "import an earlier checkpoint"
        raise CheckpointInvalid(Problem(key=key or parameter.name, value=folder.path, reason=reason, fix=fix))
    rows = whole.view(-1, whole.size(-1))
    parts: dict[str, list[torch.Tensor]] = defaultdict(list)
    for block in sorted(parameter.blocks, key=lambda block: block.unit_row):
        parts[block.unit].append(rows[block.row : block.row + block.rows])
    return {unit: torch.cat(blocks) if len(blocks) > 1 else blocks[0] for unit, blocks in parts.items()}
