"""What canzona takes for granted about Megatron-core beyond its documentation, as data that can be checked.

Each entry is one name, the sentence it stands for, and a look at that name in the installed package. Looking is all
`verify` does: nothing is built and nothing runs. What a look cannot tell is tested on real ranks in `tests/dist`.
"""

import hashlib
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass

from canzona_cli.errors import Problem

Check = Callable[[object], str | None]
"""What is wrong with the object that a name stands for; None when it is as expected."""

_WRITTEN_FOR = {"megatron": "megatron-core 0.19.2", "torch": "torch 2.10 or newer"}


def exists(found: object) -> str | None:
    """The name alone is relied on."""
    return None


def accepts(*parameters: str) -> Check:
    """A function, or a class's constructor, that takes these parameters by name."""

    def check(found: object) -> str | None:
        if not callable(found):
            return "it cannot be called"
        given = inspect.signature(found).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values()):
            return None
        return _lacks("parameter", parameters, given)

    return check


def keeps(*attributes: str) -> Check:
    """A class whose constructor sets these attributes of its instances."""

    def check(found: object) -> str | None:
        if not isinstance(found, type):
            return "it is no class"
        words = _words(found.__init__)  # type: ignore[misc]
        assigned = {
            name
            for own, dot, name, then in zip(words, words[1:], words[2:], words[3:], strict=False)
            if (own, dot) == ("self", ".") and then in ("=", ":")
        }
        return _lacks("attribute", attributes, assigned)

    return check


def has(*members: str) -> Check:
    """A class with these methods, or a dataclass with these fields."""

    def check(found: object) -> str | None:
        known = {item.name for item in fields(found)} if is_dataclass(found) else set(dir(found))
        return _lacks("field" if is_dataclass(found) else "method", members, known)

    return check


def says(*texts: str) -> Check:
    """Code that has these words in it, strings with their quotes off."""

    def check(found: object) -> str | None:
        return _lacks("mention of", texts, {word.strip("'\"") for word in _words(found)})

    return check


def reads(digest: str) -> Check:
    """Code that is token for token what it was; canzona has its own version of it, which must do the same."""

    def check(found: object) -> str | None:
        now = source_digest(found)
        return None if now == digest else f"its source has changed (digest {now})"

    return check


def source_digest(code: object) -> str:
    """Of the code without comments and blank lines."""
    return hashlib.sha256("\n".join(_words(code)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """One thing that is relied on."""

    name: str
    """Importable: megatron.core.module.Class.method."""
    relied_on: str
    """What canzona needs it to be, as one sentence without a final full stop."""
    check: Check = exists


def verify() -> list[Problem]:
    """Everything that is not as canzona needs it; empty with the release canzona was written for."""
    return [problem for pin in PINNED for problem in _broken(pin)]


def _broken(pin: Pinned) -> Iterator[Problem]:
    try:
        wrong = pin.check(_resolve(pin.name))
    except (ImportError, AttributeError) as error:
        wrong = f"it is missing ({error})"
    except (OSError, TypeError, ValueError, tokenize.TokenError) as error:
        wrong = f"it cannot be looked at ({error})"
    if wrong is not None:
        package = pin.name.partition(".")[0]
        yield Problem(key=pin.name, reason=f"{pin.relied_on}, but {wrong}", fix=f"install {_WRITTEN_FOR[package]}")


def _resolve(name: str) -> object:
    """The object that `name` stands for: the longest prefix that is a module, and attributes of it."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Something else that is missing, deeper down, is not a matter of a shorter prefix.
            if error.name is None or not module.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module named {parts[0]}")


def _lacks(kind: str, wanted: tuple[str, ...], known: object) -> str | None:
    missing = [name for name in wanted if name not in known]  # type: ignore[operator]
    return f"it has no {kind} {', '.join(missing)}" if missing else None


def _words(code: object) -> list[str]:
    """Source of `code` as tokens, without comments and line breaks; blocks open and close by name."""
    unwrapped = inspect.unwrap(code) if callable(code) else code
    source = io.StringIO(textwrap.dedent(inspect.getsource(unwrapped)))  # type: ignore[arg-type]
    left_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
    blocks = (tokenize.INDENT, tokenize.DEDENT)
    return [
        tokenize.tok_name[token.type] if token.type in blocks else token.string
        for token in tokenize.generate_tokens(source.readline)
        if token.type not in left_out
    ]


_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_GROUP = f"{_BUFFER}._ParamAndGradBucketGroup"
_DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
_OPTIMIZER = "megatron.core.optimizer"
_LAYER_WISE = f"{_OPTIMIZER}.layer_wise_optimizer"
_DISTRIBUTED = f"{_OPTIMIZER}.distrib_optimizer.DistributedOptimizer"
_LAYOUT = f"{_OPTIMIZER}.param_layout"
_RANDOM = "megatron.core.tensor_parallel.random"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"

PINNED: tuple[Pinned, ...] = (
    # Buffers in which matrices lie apart (matrix_buffers).
    Pinned(
        name=f"{_BUFFER}.group_params_for_buffers",
        relied_on="parameters are sorted into buffers by the tag is_managed_by_layer_wise_optimizer",
        check=says("is_managed_by_layer_wise_optimizer"),
    ),
    Pinned(
        name=f"{_LAYOUT}.BufferKey",
        relied_on="a buffer of matrices can be told from the others",
        check=has("param_dtype", "grad_dtype", "is_managed_by_layer_wise_optimizer"),
    ),
    Pinned(
        name=f"{_LAYOUT}.PerBufferParamLayout",
        relied_on="a buffer's layout is given as positions of parameters and of buckets",
        check=has(
            "param_index_map", "bucket_indices", "per_bucket_numel_unpadded", "param_indices", "num_optimizer_shards"
        ),
    ),
    Pinned(name=f"{_LAYOUT}.FullParamLayout", relied_on="it maps buffers to layouts", check=has("layouts")),
    Pinned(
        name=f"{_BUFFER}._ParamAndGradBuffer.__init__",
        relied_on="a buffer takes a layout as it is given",
        check=accepts("param_layout", "param_indices"),
    ),
    Pinned(
        name=f"{_DISTRIBUTED}._compute_per_buffer_param_layout",
        relied_on="it lays out the parameters that are no matrices",
        check=accepts("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
    ),
    Pinned(
        name=_DDP,
        relied_on="it takes a layout of all buffers",
        check=accepts("config", "ddp_config", "module", "pg_collection", "full_param_layout"),
    ),
    # Bucket groups that send gradients to owners (owner_bucket_group) and that are timed (instrument).
    Pinned(
        name=_DDP,
        relied_on="it keeps its buffers and bucket groups in lists, and which parameter is in which group",
        check=keeps("buffers", "bucket_groups", "param_to_bucket_group"),
    ),
    Pinned(
        name=f"{_DDP}._make_backward_post_hook",
        relied_on="hooks look a parameter's bucket group up each time, so that groups can be replaced",
        check=says("param_to_bucket_group", "register_grad_ready"),
    ),
    Pinned(
        name=f"{_DDP}._make_forward_pre_hook",
        relied_on="hooks look a parameter's bucket group up each time, so that groups can be replaced",
        check=says("param_to_bucket_group", "finish_param_sync"),
    ),
    Pinned(
        name="megatron.core.distributed.DistributedDataParallelConfig",
        relied_on="what canzona's bucket groups cannot do is a setting that is off",
        check=has(
            "average_in_collective",
            "check_for_large_grads",
            "check_for_nan_in_grad",
            "num_distributed_optimizer_instances",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "param_name_patterns_for_fp32_local_accumulation",
            "reduce_scatter_with_fp32_accumulation",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "use_distributed_optimizer",
        ),
    ),
    Pinned(
        name=f"{_BUFFER}.partition_buckets",
        relied_on="every bucket gets a group of its own",
        check=accepts("buffers", "force_single_bucket_group"),
    ),
    Pinned(
        name=f"{_BUFFER}._ParamAndGradBucket",
        relied_on="a bucket has views of its parameters and gradients, and a factor to scale these by",
        check=keeps("params_list", "param_data", "grad_data", "bucket_id", "gradient_scaling_factor", "param_to_index"),
    ),
    Pinned(
        name=_GROUP,
        relied_on="a bucket group is made of buckets, a configuration and the ranks of its collectives",
        check=accepts("buckets", "ddp_config", "collective_group", "collective_group_size"),
    ),
    Pinned(
        name=_GROUP,
        relied_on="a bucket group keeps handles of what is under way, and its neighbours",
        check=keeps(
            "buckets",
            "grad_reduce_handle",
            "grad_reduce_finished",
            "intra_distributed_optimizer_instance_group",
            "is_first_batch",
            "next_param_gather_bucket_group",
            "param_gather_dispatched",
            "param_gather_handle",
            "per_param_grad_ready_counts",
            "previous_grad_reduce_bucket_group",
        ),
    ),
    Pinned(
        name=f"{_GROUP}.start_grad_sync",
        relied_on="OwnerBucketGroup.start_grad_sync does what it does around the collective",
        check=reads("f7c86b0ac5273799"),
    ),
    Pinned(
        name=f"{_GROUP}.start_param_sync",
        relied_on="OwnerBucketGroup.start_param_sync does what it does around the collective",
        check=reads("f232bb0a1771163d"),
    ),
    Pinned(
        name=f"{_GROUP}.finish_grad_sync",
        relied_on="it starts what was not started, waits by grad_reduce_handle.wait() and does so once an iteration",
        check=says("start_grad_sync", "grad_reduce_handle", "wait", "grad_reduce_finished", "is_first_batch"),
    ),
    Pinned(
        name=f"{_GROUP}.finish_param_sync",
        relied_on="it starts what was not started, waits by param_gather_handle.wait() and starts the next group",
        check=says("start_param_sync", "param_gather_handle", "wait", "next_param_gather_bucket_group"),
    ),
    Pinned(
        name=f"{_GROUP}.finish_param_sync",
        relied_on="starting the next group can be left out",
        check=accepts("skip_next_bucket_dispatch"),
    ),
    Pinned(
        name=f"{_GROUP}.check_grads",
        relied_on="it checks a bucket's gradients before they travel",
        check=accepts("check_for_nan_or_inf", "check_for_large"),
    ),
    Pinned(name=f"{_GROUP}._post_param_sync", relied_on="it ends every gathering of parameters"),
    Pinned(
        name="torch.distributed.distributed_c10d._coalescing_manager",
        relied_on="collectives started under it are one launch on a GPU",
        check=accepts("group", "device", "async_ops"),
    ),
    # AdamW beside the matrices (adamw).
    Pinned(
        name=f"{_OPTIMIZER}._get_param_groups",
        relied_on="it sorts parameters into groups, the same on all ranks",
        check=accepts("model_chunks", "config", "config_overrides"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}._get_megatron_optimizer_based_on_param_groups",
        relied_on="it builds a DistributedOptimizer of given groups over given buffers",
        check=accepts(
            "config",
            "model_chunks",
            "param_groups",
            "per_model_buffers",
            "model_parallel_group",
            "data_parallel_group",
            "data_parallel_group_idx",
            "intra_dist_opt_group",
            "pg_collection",
        ),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.get_standard_config_overrides",
        relied_on="it takes weight decay off 1-D parameters",
        check=accepts("config"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer_config.ParamKey",
        relied_on="it picks parameters by a predicate",
        check=has("predicate"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer_config.ParamPredicate",
        relied_on="it is a named function of a parameter",
        check=has("name", "fn"),
    ),
    Pinned(
        name="megatron.core.process_groups_config.ProcessGroupCollection.setup_process_groups_for_optimizer",
        relied_on="it names the process groups a DistributedOptimizer wants",
        check=says("mp_group", "intra_dp_cp_group", "intra_dist_opt_group"),
    ),
    Pinned(
        name=f"{_DISTRIBUTED}.start_param_sync_for_bucket_group_subset",
        relied_on="DistributedOptimizer gathers its own parameters and leaves the matrices' alone",
        check=says("_bucket_is_managed_by_layer_wise_optimizer"),
    ),
    # What Megatron's own optimizers hold, for checkpoints (holdings).
    Pinned(
        name=f"{_DISTRIBUTED}.__init__",
        relied_on="it knows where the master of a parameter's part lies among its parameter groups",
        check=says("model_param_group_index_map", "is_stub_optimizer"),
    ),
    Pinned(
        name=f"{_DISTRIBUTED}._get_model_param_range_map",
        relied_on="it tells which elements of a parameter this rank updates",
        check=accepts("param"),
    ),
    Pinned(
        name=f"{_DISTRIBUTED}._build_model_gbuf_param_range_map",
        relied_on="that range is the entry `param`, in elements of the flat parameter",
        check=says("param", "gbuf_world_in_bucket"),
    ),
    Pinned(
        name=f"{_DISTRIBUTED}._copy_main_params_to_model_params",
        relied_on="it rounds masters into this rank's part of the parameter buffer",
        check=exists,
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.Float16OptimizerWithFloat16Params",
        relied_on="it lists parameters beside their masters",
        check=keeps("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups", "is_stub_optimizer"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
        relied_on="it rounds masters into the parameters",
        check=exists,
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.FP32Optimizer",
        relied_on="it updates parameters themselves",
        check=keeps("is_stub_optimizer"),
    ),
    Pinned(
        name=f"{_DDP}.start_param_sync",
        relied_on="with force_sync it gathers all parameters before it returns",
        check=accepts("force_sync"),
    ),
    Pinned(
        name="megatron.core.tensor_parallel.random.CudaRNGStatesTracker",
        relied_on="its states can be taken and given back",
        check=has("get_states", "set_states"),
    ),
    # Megatron's own optimizers as baselines (optimizer), and their phases (instrument).
    Pinned(
        name=f"{_LAYER_WISE}.tag_params_for_buffer_routing",
        relied_on="it tags what the layer-wise optimizer manages",
        check=accepts("model_chunks"),
    ),
    Pinned(
        name=f"{_LAYER_WISE}.LayerWiseDistributedOptimizer.compute_full_param_layout",
        relied_on="it lays out the buffers of the layer-wise optimizer",
        check=accepts("params", "bucket_size", "data_parallel_world_size", "ddp_config"),
    ),
    Pinned(
        name=f"{_DISTRIBUTED}.compute_full_param_layout",
        relied_on="it lays out the buffers of DistributedOptimizer",
        check=accepts("params", "bucket_size", "data_parallel_world_size", "ddp_config"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.get_megatron_optimizer",
        relied_on="it builds Megatron's own optimizers without gloo groups",
        check=accepts("config", "model_chunks", "use_gloo_process_groups", "pg_collection"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.ChainedOptimizer",
        relied_on="it lists the optimizers it consists of",
        check=keeps("chained_optimizers"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.ChainedOptimizer._step",
        relied_on="it steps its optimizers by their own step_with_ready_grads",
        check=says("step_with_ready_grads", "chained_optimizers"),
    ),
    *(
        Pinned(
            name=f"{where}.{name}",
            relied_on=f"it starts the timers {', '.join(timers)}, by which phases are told apart",
            check=says(*timers),
        )
        for where, name, timers in (
            (_SCHEDULES, "forward_step", ("forward-compute",)),
            (_SCHEDULES, "backward_step", ("backward-compute",)),
            (
                _P2P,
                "P2PCommunicator",
                (
                    "forward-recv",
                    "forward-send",
                    "backward-recv",
                    "backward-send",
                    "forward-send-backward-recv",
                    "backward-send-forward-recv",
                ),
            ),
            (
                "megatron.core.distributed.finalize_model_grads",
                "finalize_model_grads",
                ("all-grads-sync", "non-tensor-parallel-grads-all-reduce", "embedding-grads-all-reduce"),
            ),
        )
    ),
    # canzona's own optimizer (engine).
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.ChainedOptimizer",
        relied_on="its children have equal configs, and it zeroes, lists and schedules through them",
        check=has("zero_grad", "get_parameters", "param_groups", "get_loss_scale", "step_with_ready_grads"),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.optimizer.MegatronOptimizer",
        relied_on="these are all that an optimizer of ours has to be",
        check=has(
            "prepare_grads",
            "step_with_ready_grads",
            "zero_grad",
            "get_loss_scale",
            "reload_model_params",
            "state_dict",
            "load_state_dict",
            "step",
            "sharded_state_dict",
            "get_grads_for_grad_norm",
        ),
    ),
    Pinned(
        name=f"{_OPTIMIZER}.clip_grads.clip_grad_by_total_norm_fp32",
        relied_on="it scales the gradients of AdamW's fp32 shards in place by max_norm / (total_norm + 1e-6)",
        check=accepts("parameters", "max_norm", "total_norm"),
    ),
    # The model (model), and Megatron without CUDA (cpu_backend).
    Pinned(
        name="megatron.core.transformer.transformer_layer.TransformerLayer",
        relied_on="a layer knows its number in the whole model, from 1",
        check=keeps("layer_number"),
    ),
    Pinned(
        name="megatron.core.transformer.transformer_block.TransformerBlock._build_layers",
        relied_on="a stage's layers are its module list `layers`",
        check=says("layers", "ModuleList"),
    ),
    Pinned(name=f"{_RANDOM}._get_cuda_rng_state", relied_on="forked random states are read by it"),
    Pinned(
        name=f"{_RANDOM}._set_cuda_rng_state",
        relied_on="forked random states are set by it",
        check=accepts("new_state"),
    ),
)
