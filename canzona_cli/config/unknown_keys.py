"""Finds the setting that a user means by an unknown key: a misspelt or removed setting, or a name from
Megatron, Hugging Face, torchtitan, torchtune or NeMo."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Final

from canzona_cli.config.recipes import GROUPS
from canzona_cli.config.settings import sections, settings
from canzona_cli.core.errors import Problem, closest

_NAMES: Final[Mapping[str, str]] = {
    "gpus": "n np nproc nproc_per_node num_gpus world_size devices num_devices",
    "cluster.nodes": "num_nodes nnodes",
    "recipe": "config config_name flavor model_size",
    "run.dir": "o out output output_dir save resume work_dir out_dir checkpoint_dir checkpoint.folder",
    "run.root": "dump_folder exp_dir log_dir",
    "run.trackers": "report_to loggers",
    "model.num_layers": "num_hidden_layers n_layer n_layers",
    "model.hidden_size": "n_embd d_model dim embed_dim",
    "model.ffn_hidden_size": "intermediate_size ffn_dim hidden_dim d_ff mlp_dim",
    "model.num_attention_heads": "n_head n_heads num_heads",
    "model.num_query_groups": "num_key_value_heads n_kv_heads num_kv_heads",
    "model.head_dim": "kv_channels",
    "model.num_experts": "num_moe_experts n_experts num_local_experts",
    "model.experts_per_token": "num_experts_per_tok moe_router_topk router_topk",
    "model.balancing_weight": "moe_aux_loss_coeff router_aux_loss_coef",
    "model.qk_norm": "qk_layernorm",
    "model.tied_embeddings": "tie_word_embeddings share_embeddings_and_output_weights",
    "model.rope_base": "rotary_base rope_theta",
    "model.norm_eps": "norm_epsilon layernorm_epsilon rms_norm_eps",
    "model.init_std": "init_method_std initializer_range",
    "train.steps": "iters iterations train_iters max_steps num_steps max_steps_per_epoch max_iters num_iterations",
    "train.seq_length": (
        "seq_len block_size max_seq_len max_seq_length context_length max_position_embeddings context ctx_len"
    ),
    "train.global_batch_size": "batch_size gbs batch train_batch_size",
    "train.batch_tokens": "total_batch_size tokens_per_batch tokens_per_step",
    "train.micro_batch_size": "per_device_train_batch_size local_batch_size mbs device_batch_size",
    "train.precision": "dtype torch_dtype params_dtype mixed_precision",
    "train.recompute": (
        "recompute_granularity activation_checkpoint activation_checkpointing activation_checkpoint.mode"
    ),
    "train.ema": "ema_decay",
    "train.eval_interval": (
        "eval_steps eval_every eval_freq val_check_interval val_every val_interval val_steps val_freq "
        "validation_every validation_interval validation_steps validation_freq"
    ),
    "name": "run_name experiment_name",
    "optimizer": "optim optimizer_type optimizer.type optimizer_name",
    "optimizer.momentum": "muon_momentum mu",
    "optimizer.ns_steps": "muon_num_ns_steps ns_iters ns_iterations newton_schulz_steps",
    "optimizer.precondition_frequency": "update_freq preconditioner_update_freq precond_freq",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr muon_lr matrix_lr",
    "optimizer.min_lr_ratio": "min_lr_frac final_lr_frac",
    "optimizer.adamw_lr": "decoupled_lr embedding_lr embed_lr adam_lr head_lr scalar_lr adam.lr adamw.lr",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_grad": "grad_clip max_grad_norm clip_grad_norm gradient_clip_val gradient_clipping max_norm",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon",
    "optimizer.nesterov": "muon_nesterov",
    "optimizer.coefficients": "muon_coefficient_type",
    "optimizer.scale_mode": "muon_scale_mode",
    "optimizer.scale_factor": "muon_extra_scale_factor",
    "schedule.decay": (
        "lr_scheduler lr_scheduler_type lr_decay_style lr_schedule scheduler decay_type optimizer.schedule "
        "schedule.type schedule.name wsd cosine"
    ),
    "schedule.warmup_steps": "lr_warmup_iters num_warmup_steps lr_warmup_steps",
    "schedule.decay_steps": "lr_decay_iters",
    "schedule.wsd_decay_steps": "lr_wsd_decay_iters cooldown cooldown_steps cooldown_iters",
    "checkpoint.every_steps": (
        "save_every save_interval save_steps save_freq checkpoint_interval every_n_train_steps "
        "checkpoint_every checkpoint.interval ckpt_every ckpt_interval"
    ),
    "checkpoint.keep": "save_total_limit save_top_k keep_latest_k keep_last keep_last_n",
    "checkpoint.resume": "load resume_from_checkpoint load_step resume_from",
    "checkpoint.weights_from": "model_name_or_path pretrained_checkpoint initial_load_path restore_from_path",
    "data.path": "data_path dataset_path files data_prefix train_data dataset",
    "data.validation": "valid_path val_path valid_data_path val_data_path validation_path validation_data valid_data",
    "data.tokenizer": "tokenizer_model tokenizer_name_or_path tokenizer_type tokenizer.path",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel tensor_parallel_size tp_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel pp_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size expert_parallel_degree expert_parallel expert_parallel_size ep_size",
    "parallel.dispatcher": "moe_token_dispatcher_type",
    "parallel.bucket_elements": "ddp_bucket_size",
    "parallel.cp": "context_parallel_size context_parallel_degree context_parallel cp_size",
}
RENAMED: Final[Mapping[str, str]] = {name: key for key, names in _NAMES.items() for name in names.split()}
"""canzona's keys by the names of settings in other programs that take the same values. `resume` is `run.dir`,
because a run continues in its directory."""

_LEAVE_OUT: Final[Mapping[str, str]] = {
    "expert experts moe": "the settings of experts are model.num_experts, .experts_per_token and parallel.ep",
    "lora qlora peft adapter adapters": "canzona does not have LoRA; it trains all weights",
    "fsdp fsdp2 zero zero1 zero2 zero3 deepspeed hsdp shard": (
        "canzona does not have FSDP or ZeRO; its default strategy divides optimizer state among ranks"
    ),
    "use_distributed_optimizer": "the default strategy divides optimizer state among ranks",
    "compile": "canzona does not have torch.compile; it runs the model as Megatron does",
    "dropout": "canzona does not have dropout",
    "packed packing": "documents are always packed into sequences",
    "distributed_backend backend": "follows from the device: NCCL on GPUs, gloo on CPUs",
    "num_workers dataloader_num_workers": "is fixed: two processes per rank on GPUs, none on CPUs",
    "flash": "attention follows from the layers: Transformer Engine has flash attention",
    "offload": "canzona does not move optimizer state to host memory",
    "swa z_loss qk_clip softcap label_smoothing early_stopping sliding_window window_size mtp latent": (
        "canzona does not have this"
    ),
    "document_mask reset_attention_mask reset_position_ids inter_document_masking": (
        "canzona packs documents into sequences without a mask between them"
    ),
    "log_every log_freq log_interval logging_steps log_every_n_steps": "every step is logged, in metrics.jsonl",
}
"""The reasons why users cannot set a feature, by words of its name. A word matches names that contain it
between dots or underscores; a word with underscores matches the part of a name after its last dot, a dotted word
all of it."""
_OTHERWISE: Final[Mapping[str, tuple[str, str]]] = {
    "sft dpo rlhf finetune finetuning": (
        "canzona does not fine-tune on instructions; it trains on plain text",
        "init=DIR starts from the weights of a Hugging Face folder",
    ),
    "dp data_parallel data_parallel_size replicate": ("is gpus / (tp * pp * cp)", "set gpus=N"),
    "float8 fp8_recipe fp8_format mxfp8 transformer_engine_fp8": (
        "is a value of one setting",
        "write train.fp8=delayed",
    ),
    "fp8_param fp8_param_gather fp8_params": ("weights stay bf16 and are gathered in bf16", "leave it out"),
    "fp4 nvfp4": ("canzona does not have FP4", "use train.precision=bf16"),
    "fp16": ("canzona does not train in fp16", "use train.precision=bf16"),
    "bf16": ("is a value of train.precision", "write train.precision=bf16, or fp32"),
    "accumulation accumulate accum": (
        "accumulation follows from the batch: train.global_batch_size / (train.micro_batch_size * DP)",
        "set train.global_batch_size=N",
    ),
    "checkpointing": ("recomputation is set by its amount", "write train.recompute=selective, or full"),
    "tensorboard wandb mlflow": ("trackers are listed in one setting", "write run.trackers=[{}]"),
    "comet neptune aim": ("canzona does not support this tracker", "write run.trackers=[tensorboard]"),
    "train.tokens train_tokens max_tokens total_tokens num_tokens": (
        "the length of a run is its number of steps",
        "write train.steps=N, with N = tokens / train.batch_tokens",
    ),
    "rampup rampup_batch_size step_batch_size_schedule": (
        "a ramp-up is a list of batches, each with its steps",
        "write train.batch_rampup=[[SEQUENCES,STEPS],...]",
    ),
    "epoch epochs": ("the length of a run is its number of steps", "write train.steps=N"),
    "eval_iters limit_val_batches val_iters val_batches validation_batches eval_batches": (
        "a validation is a number of sequences, whatever the batch",
        "set train.eval_sequences=N",
    ),
    "warmup_ratio lr_warmup_fraction warmup_fraction warmup_frac warmup_tokens lr_warmup_samples": (
        "the warm-up is a number of steps",
        "write schedule.warmup_steps=N",
    ),
    "betas beta adam_betas": ("each moment has its own", "write optimizer.beta1=B1 optimizer.beta2=B2"),
    "untie_embeddings_and_output_weights": ("has the opposite meaning here", "write model.tied_embeddings=false"),
    "split": (
        "validation data are set as a share of the data",
        "write data.validation_fraction=0.01",
    ),
    "master_addr master_port": ("address and port are one setting", "write cluster.rdzv_endpoint=HOST:PORT"),
    "enable_profiling profiling": ("profiling is set by its steps", "write run.profile_steps=[10,12]"),
}
"""The reasons and fixes for features that canzona sets in another way, by words of their names, which match as
in `_LEAVE_OUT`. In a fix, `{}` is replaced by the matching word."""
_ADVICE: Final = {**{words: (reason, "leave it out") for words, reason in _LEAVE_OUT.items()}, **_OTHERWISE}


def missing_feature_problem(name: str) -> Problem | None:
    """Returns a problem with advice if `name`, dotted or not, is the name of a feature that canzona does not
    have or sets in another way; otherwise None."""
    flat = name.replace("-", "_").lower()
    words = {*flat.replace(".", "_").split("_")}
    bare_name = flat.rpartition(".")[2]
    if {flat, bare_name} & RENAMED.keys():
        return None
    for listed, (reason, fix) in _ADVICE.items():
        if matching := [word for word in listed.split() if word in words or word in (bare_name, flat)]:
            return Problem(name, reason, fix.format(min(matching)))
    return None


REMOVED: Final[Mapping[str, str]] = {
    "run.trace_steps": "use run.profile_steps: torch's profiler writes a Chrome trace of each rank",
    "engine.layout": "leave it out: engine=paper keeps Megatron's order of buckets, engine=canzona sorts them by owner",
    "engine.grouping": "leave it out: engine=paper has the paper's micro-groups",
    "cluster.crowding": "leave it out: cores are divided evenly",
    "cluster.intra_node_channels": "leave it out: 24 are assumed",
    "cluster.inter_node_channels": "leave it out: 2 for each port are assumed",
    "cluster.pass_us": "leave it out: 150 us are assumed",
    "cluster.forward_factor": "write cluster.pass_factors=[FORWARD,BACKWARD]",
    "cluster.backward_factor": "write cluster.pass_factors=[FORWARD,BACKWARD]",
    "cluster.forward_module_us": "write cluster.module_us=[FORWARD,BACKWARD]",
    "cluster.backward_module_us": "write cluster.module_us=[FORWARD,BACKWARD]",
    "cluster.not_measured": "write cluster.measured_on.not_measured=PARTS",
    "cluster.rdzv_id": "leave it out: a rendezvous has the name of the run directory",
    "cluster.gpu_hour_price": "multiply the GPU hours that a dry run shows",
    **dict.fromkeys(
        ("train.loss_spike", "train.loss_spike_sigmas"),
        "use train.divergence: it stops or warns if the loss does not come down again",
    ),
    **dict.fromkeys(
        ("train.sample_every", "train.sample_prompt", "train.sample_tokens"),
        "run `canzona generate RUN --prompt TEXT` on any checkpoint",
    ),
    "data.tokenizer_vocab_size": "set model.vocab_size: a learned tokenizer has as many entries, but at most 16384",
    "data.cache_dir": "set CANZONA_CACHE=FOLDER in the environment",
    "optimizer.tf32": "set NVIDIA_TF32_OVERRIDE=0 in the environment for matmuls in fp32",
    "optimizer.min_lr": "write optimizer.min_lr_ratio=SHARE, the minimum as a share of optimizer.lr",
    "optimizer.roots": "leave it out: Shampoo's inverse roots are computed in the way that is predicted to be faster",
    "optimizer.shampoo_eps": "leave it out: it is 1e-12",
    "optimizer.grafting": "leave it out: Shampoo's updates have the norm of Adam's",
    "optimizer.clip": "leave it out: every gradient is clipped; optimizer.clip_grad=0 clips none",
    "cluster.symmetric_factor": "leave it out: symmetric matmuls take as long as general ones of their size",
}
"""The fixes for removed settings."""


def unknown_key(key: str, text: object, *, where: str = "") -> Problem:
    """Returns a problem for a key that is not a setting. The fix suggests the most similar setting."""
    if key in REMOVED:
        return Problem(key, f"no longer exists{where}", REMOVED[key], value=text)
    names = sections().get(key)
    if names is not None:
        takers = [name for name in sorted(names) if text in settings()[f"{key}.{name}"].choices]
        example = f"{key}.{takers[0]}={text}" if takers else f"{key}.{min(names)}=VALUE"
        return Problem(key, f"is a section{where}, not a setting", f"for example {example}", value=text)
    if (advice := missing_feature_problem(key)) is not None:
        return replace(advice, value=text, reason=f"{advice.reason}{where}")
    group = None if "." in key or key in RENAMED else closest(key, GROUPS, cutoff=0.8)
    hint = group or closest_key(key) or ""
    choices = settings()[hint].choices if hint in settings() else ()
    value = next((f"={typed}" for typed in (key, str(text)) if typed in choices), "")
    fix = f"did you mean {hint}{value}?" if hint else "`canzona recipes show NAME` lists every setting of a recipe"
    return Problem(key, f"there is no such setting{where}", fix, value=text)


def as_override(option: str, value: str, *, exact: bool) -> str | None:
    """Returns an option as an override, such as `gpus=4` for `--gpus 4`; None if it does not resemble a
    setting.

    Args:
        value: the option's value; empty if it has none.
        exact: True accepts only the exact names of settings; False also accepts similar names.
    """
    word = option.lstrip("-").replace("-", "_").lower()
    key = word if word in GROUPS else exact_key(word)
    if key is None and not exact and len(word) >= 2:
        key = closest_key(word)
    if key is None:
        return None
    placeholder = "DIR" if key == "run.dir" else "VALUE"
    if key in settings() and settings()[key].kind == "boolean":
        placeholder = "true"
    return f"{key}={value or placeholder}"


MIN_SIMILARITY = 0.8
"""The minimum similarity, from 0 to 1, of a key that is suggested for an unknown one."""


def exact_key(word: str) -> str | None:
    """Returns the key of the setting with this dotted key, bare name, or name in another program; None if
    there is no such setting, or if several share the bare name."""
    flat = word.replace("-", "_").lower()
    if flat in RENAMED or flat in settings():
        return RENAMED.get(flat, flat)
    with_name = [key for key in settings() if key.rpartition(".")[2] == flat]
    return with_name[0] if len(with_name) == 1 else None


def closest_key(key: str) -> str | None:
    """Returns the setting that the user probably meant by `key`; None if none is similar enough.

    The bare name has more weight than the section: `tp` means `parallel.tp`, and `train.lr` means
    `optimizer.lr`. Missing words have little weight: `wsd_steps` means `wsd_decay_steps`, although `ns_steps`
    looks more like it.
    """
    flat = key.strip("/").replace("/", ".").replace("-", "_").lower()
    bare_key = flat.rpartition(".")[2]
    if (name := flat if flat in RENAMED else bare_key) in RENAMED:
        return RENAMED[name]
    best, best_score = None, 0.0
    for name in settings():
        section, _, bare_name = name.rpartition(".")
        key_similarity = SequenceMatcher(None, flat, name).ratio()
        name_similarity = SequenceMatcher(None, bare_key, bare_name).ratio()
        missing_words = set(bare_name.split("_")) - set(bare_key.split("_"))
        if set(bare_key.split("_")) < set(bare_name.split("_")):
            name_similarity = max(name_similarity, 0.95 - 0.05 * len(missing_words))
        if sorted(bare_key) == sorted(bare_name):  # letters in another order, such as gpsu
            name_similarity = max(name_similarity, 0.95)
        given_section = flat.rpartition(".")[0] or section
        section_similarity = SequenceMatcher(None, given_section, section).ratio()
        score = max(key_similarity, 0.9 * name_similarity + 0.1 * section_similarity)
        if score > best_score:
            best, best_score = name, score
    return best if best_score >= MIN_SIMILARITY else None
