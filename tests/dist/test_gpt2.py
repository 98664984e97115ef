"""Models with parts of GPT-2 (`model.gated`, `.layernorm`, `.biases`, `.positions`), and experts beside a network that
processes every token, train in our loop as Megatron's own layers do in one process with its own Muon, and are saved and
read on any layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from canzona_cli.checkpoint.restore import load_weights
from canzona_cli.checkpoint.verify import read_manifest
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.megatron.matrix_buffers import global_parameters
from canzona_cli.core.megatron.model import Model, build_model, initialize_weights
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.setup import Layout
from canzona_cli.training.step import train_step
from tests.dist import jobs
from tests.dist.jobs import EXPERTS, SMALL, Runs, on_ranks
from tests.dist.saved import Case, saving_runs, units_of
from tests.dist.saved import resolve as resolve_saved
from tests.dist.trained import run_trainings
from tests.dist.whole import Fragment, Part, Weights, assemble, part_of
from tests.library.loops import batches_of, by_megatron, optimizer_config, trainee_of

STEPS = 4
FIXED = (
    *SMALL,
    "train.precision=fp32",
    "train.micro_batch_size=4",
    "engine.splitting=qkv",
    "optimizer=muon",
    "optimizer.lr=0.01",
    "optimizer.adamw_lr=0.01",
    # Gradients of the biases of keys are only rounding, and at its usual eps AdamW would make whole steps of it.
    "optimizer.eps=0.001",
    "schedule.decay=constant",
    "schedule.warmup_steps=0",
)
GPT2 = (
    *("model.layernorm=true", "model.biases=true", "model.gated=false", "model.positions=80"),
    *("model.qk_norm=false", "model.num_query_groups=8"),
)
"""All of GPT-2, with more positions than a sequence has tokens."""
BESIDE_EXPERTS = (*EXPERTS, "model.shared_ffn_hidden_size=96", "model.balancing_loss=none")
MODELS = {
    "gpt2": GPT2,
    # LayerNorm of queries and keys, and two parts alone.
    "biases": ("model.biases=true", "model.layernorm=true"),
    "shared experts": BESIDE_EXPERTS,
    "experts without a gate": (*BESIDE_EXPERTS, "model.positions=64", "model.gated=false", "model.qk_norm=false"),
}
LAYOUTS = {
    "tp2": ("gpus=2", "parallel.tp=2"),
    "tp2, sequence parallel": ("gpus=2", "parallel.tp=2", "parallel.sequence_parallel=true"),
    "pp2": ("gpus=2", "parallel.pp=2"),
    "cp2": ("gpus=2", "parallel.cp=2"),
    "tp2 ep2": ("gpus=2", "parallel.tp=2", "parallel.ep=2"),
    "pp2 ep2": ("gpus=4", "parallel.pp=2", "parallel.ep=2"),
    "dp2, recomputed": ("gpus=2", "train.recompute=full"),
}
SHOWN = [
    ("gpt2", "tp2, sequence parallel"),
    ("shared experts", "tp2 ep2"),
]
"""The cases that every change runs; the sweep runs the others."""
SWEPT = [
    ("gpt2", "pp2"),
    ("gpt2", "tp2"),
    ("gpt2", "cp2"),
    ("gpt2", "dp2, recomputed"),
    ("biases", "tp2"),
    ("biases", "pp2"),
    ("shared experts", "pp2 ep2"),
    ("experts without a gate", "tp2 ep2"),
]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Training in one process, of Megatron's own layers with its own Muon."""

    losses: list[float]
    norms: list[float]
    before: Weights
    after: Weights


def _resolve(model: str, *layout: str) -> tuple[RunConfig, Layout]:
    return jobs.resolve(*FIXED, *MODELS[model], *(layout or ("gpus=1",)))


def _megatrons(config: RunConfig) -> GPTModel:
    """Megatron's model, made of nothing of ours."""
    model = config.model
    shared: dict[str, object] = {}
    if model.num_experts:
        shared = {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": model.shared_ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
        }
    normalization = "LayerNorm" if model.layernorm else "RMSNorm"
    mcore = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization=normalization,
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=model.gated,
        activation_func=torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        add_bias_linear=model.biases,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        **shared,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts or None, qk_layernorm=model.qk_norm, normalization=normalization
    )
    positions = model.positions
    built = GPTModel(
        mcore,
        spec,
        vocab_size=model.vocab_size,
        max_sequence_length=positions or config.train.seq_length,
        position_embedding_type="learned_absolute" if positions else "rope",
        rotary_base=model.rope_base,
        share_embeddings_and_output_weights=model.tied_embeddings,
    )
    # Megatron's Muon would update these as matrices.
    for name, param in built.named_parameters():
        if "router" in name or "position_embeddings" in name:
            param.is_embedding_or_output_parameter = True
    return built


def _train_whole(models: Sequence[str]) -> list[Whole]:
    made = {model: _resolve(model) for model in models}

    def work(name: str, world: World) -> tuple[list[float], list[float], Part, Part]:
        config = made[name][0]
        model = _megatrons(config)
        initialize_weights(model, config.model, world, seed=config.train.seed)
        settings = optimizer_config(config, adam_eps=config.optimizer.eps)
        trainee = trainee_of(config, world, lambda _: by_megatron([model], settings, world))
        before, batches = _part(trainee.chunks[0]), batches_of(trainee, STEPS)
        results = [train_step(trainee, batches) for _ in range(STEPS)]
        losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
        return losses, norms, before, _part(trainee.chunks[0])

    found = []
    for name, [(losses, norms, *parts)] in on_ranks(made, work).items():
        before, after = (assemble([part], made[name][0].model) for part in parts)
        found.append(Whole(losses=losses, norms=norms, before=before, after=after))
    return found


def _part(model: torch.nn.Module) -> Part:
    found = {
        name: Fragment(values=param.detach().numpy().copy(), cut=None) for name, param in global_parameters([model])
    }
    return Part(tp_rank=0, pp_rank=0, owner=0, fragments=found)


WHOLE = Runs(dict.fromkeys(model for model, _ in SHOWN), lambda _: 1, _train_whole, MODELS)


def _apart(one: Weights, other: Weights) -> float:
    """The largest difference of a weight, relative to the weight."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one if one[name].any())


@pytest.mark.parametrize(
    "case", [*SHOWN, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEPT)], ids=" ".join
)
def test_the_loop_trains_them_as_megatrons_own_layers_and_muon_in_one_process(case: tuple[str, str]) -> None:
    """As close as canzona's engine and Megatron's Muon in Megatron-LM's own loop (tests/library/test_pretrain.py)."""
    model, where = case
    whole = WHOLE[model]
    [found] = run_trainings([(*_resolve(model, *LAYOUTS[where]), STEPS)])
    assert all(not torch.equal(weight, whole.before[name]) for name, weight in whole.after.items())
    assert found.before.keys() == whole.before.keys()
    assert all(torch.equal(weight, whole.before[name]) for name, weight in found.before.items())
    assert not any(weight.any() for name, weight in whole.before.items() if name.endswith("bias"))
    np.testing.assert_allclose(found.losses, whole.losses, rtol=1e-6)
    np.testing.assert_allclose(found.grad_norms, whole.norms, rtol=3e-6)
    assert _apart(whole.after, found.after) < 5e-6


SAVED = {
    # Biases of grouped queries, keys and values, and of gates, which tensor parallelism divides in two ways.
    "parts of gpt2": (("model.biases=true", "model.layernorm=true", "model.positions=64"), LAYOUTS["tp2"]),
    "shared experts": ((*BESIDE_EXPERTS, "model.qk_norm=false"), LAYOUTS["tp2 ep2"]),
}
"""The settings of models, and the layout that saves each."""


@pytest.mark.parametrize("name", ["parts of gpt2", pytest.param("shared experts", marks=pytest.mark.sweep)])
def test_checkpoints_are_read_on_another_layout_and_back(name: str, tmp_path: Path) -> None:
    model, layout = SAVED[name]
    settings = (*model, "optimizer=muon", "train.ema=0.5", *layout)
    saved = Case(settings=settings, steps=2)
    there = Case(settings=(*model, "optimizer=muon", "train.ema=0.5", *LAYOUTS["pp2"]), start=saved)
    back = Case(settings=(*settings, "train.seed=99"), start=there, steps=1)
    straight = Case(settings=settings, start=saved, steps=1)
    runs = saving_runs(tmp_path, [saved, there, back, straight])
    config, layout_there = resolve_saved(*there.settings)
    values = units_of(runs[saved].checkpoint, config.model)
    biases = [key for key in values if key.endswith(".bias/master")]
    assert len(biases) == (2 * (7 + 4) + 1 if config.model.biases else 0), "of two layers and the final norm"
    for read, other in ((there, saved), (back, straight)):
        mine, theirs = (units_of(runs[case].checkpoint, config.model) for case in (read, other))
        assert mine.keys() == theirs.keys()
        assert all(np.array_equal(mine[key], theirs[key], equal_nan=True) for key in theirs)
        assert all(torch.equal(weight, runs[other].weights[key]) for key, weight in runs[read].weights.items())
    assert runs[back].losses == runs[straight].losses

    def load(_: str, world: World) -> Part:
        chunks = build_model(config.setup, world)
        model = Model(setup=config.setup, world=world, chunks=chunks, timer=PhaseTimer(world.device))
        load_weights(model, runs[saved].checkpoint, read_manifest(runs[saved].checkpoint))
        return part_of(chunks, world)

    loaded = assemble(on_ranks({"": (config, layout_there)}, load)[""], config.model)
    assert all(torch.equal(weight, runs[saved].weights[key]) for key, weight in loaded.items())
