"""The whole model, put together from the fragments on all ranks.

Written from what Megatron-core and Hugging Face document about their weights, not from our own code: which dimension a
fragment is cut along is asked of Megatron, and every matrix comes out under Hugging Face's name in its row order.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.setup import ModelConfig

EXPERT_PARALLEL = (
    parallel_state.get_expert_model_parallel_world_size,
    parallel_state.get_expert_model_parallel_rank,
)
Weights = dict[str, torch.Tensor]
"""Whole matrices and vectors, fp32, by Hugging Face name."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """One parameter of one rank."""

    values: np.ndarray
    """fp32; an array, because a tensor could not outlive the process that made it."""
    cut: int | None
    """The dimension cut over tp ranks; None where every tp rank has all of it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Every parameter of one rank, by Megatron's name with the layer's number in the whole model."""

    tp_rank: int
    pp_rank: int
    owner: int
    """Among data- and context-parallel ranks, which all hold the same."""
    fragments: Mapping[str, Fragment]


def part_of(chunks: Iterable[torch.nn.Module], world: World) -> Part:
    """This rank's fragments, copied."""
    return Part(
        tp_rank=world.tp_rank,
        pp_rank=world.pp_rank,
        owner=world.owner,
        fragments={
            name: Fragment(values=param.detach().float().numpy().copy(), cut=cut_of(name, param))
            for name, param in named_parameters(chunks)
        },
    )


def cut_of(name: str, param: torch.nn.Parameter) -> int | None:
    """Experts have tensor parallelism of their own."""
    if ".experts." in name and parallel_state.get_expert_tensor_parallel_world_size() == 1:
        return None
    return getattr(param, "partition_dim", None) if getattr(param, "tensor_model_parallel", False) else None


def named_parameters(chunks: Iterable[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters by Megatron's name, without wrappers, under the layer number of the whole model."""
    return [named for chunk in chunks for named in _named_parameters(chunk)]


def _named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    named = []
    for name, module in model.named_modules():
        for key, param in module.named_parameters(recurse=False):
            path = f"{name}.{key}".split(".")
            if "layers" in path:
                at = path.index("layers") + 2
                layer: object = model.get_submodule(".".join(path[:at]))
                assert isinstance(layer, TransformerLayer)
                # Megatron numbers layers from 1, over all pipeline stages.
                path[at - 1] = str(layer.layer_number - 1)
                if "experts" in path:
                    # An expert's number counts this rank's experts, of which each expert-parallel rank has as many.
                    kind, number, _ = re.split(r"(\d+)", path[-1])
                    ranks, rank = (ask() for ask in EXPERT_PARALLEL)
                    path[-1] = f"{kind}{int(number) + rank * layer.config.num_moe_experts // ranks}"
            named.append((".".join(part for part in path if part != "module"), param))
    return named


def assemble(parts: Sequence[Part], shape: ModelConfig) -> Weights:
    """The whole model.

    Raises:
        AssertionError: ranks that should hold the same values do not, or a fragment is missing.
    """
    whole: Weights = {}
    for name in dict.fromkeys(name for part in parts for name in part.fragments):
        for owner in sorted({part.owner for part in parts}):
            holders = [part for part in parts if name in part.fragments and part.owner == owner]
            for pp_rank in sorted({part.pp_rank for part in holders}):
                pieces = sorted((p for p in holders if p.pp_rank == pp_rank), key=lambda p: p.tp_rank)
                for key, value in _canonical(name, [p.fragments[name] for p in pieces], shape).items():
                    known = whole.setdefault(key, value)
                    assert torch.equal(known, value), f"{key} differs between ranks (owner {owner}, pp {pp_rank})"
    return whole


def _canonical(name: str, fragments: Sequence[Fragment], shape: ModelConfig) -> Weights:
    """One Megatron parameter, whole, as the one to three Hugging Face weights it stands for; learned positions and most
    biases under Megatron's name."""
    pieces = [torch.from_numpy(fragment.values) for fragment in fragments]
    cut = fragments[0].cut
    key = _hugging_face_name(name, shape)
    if cut is None:
        assert all(torch.equal(pieces[0], piece) for piece in pieces), f"{name} differs between tp ranks"
        pieces, cut = pieces[:1], 0
    if re.search(r"linear_fc1\.(weight|bias)", name) and shape.gated:
        # Each rank holds [gate_r; up_r].
        gates, ups = zip(*(piece.chunk(2) for piece in pieces), strict=True)
        return {key: torch.cat(gates), key.replace("gate", "up"): torch.cat(ups)}
    whole = torch.cat(pieces, dim=cut)
    if name.endswith("linear_qkv.weight"):
        # Rows go group by group: the queries of a group, its key, its value.
        groups, head = shape.num_query_groups, shape.head_dim
        queries = shape.num_attention_heads // groups
        by_group = whole.view(groups, (queries + 2) * head, shape.hidden_size)
        q, k, v = torch.split(by_group, [queries * head, head, head], dim=1)
        return {key.replace("q_proj", f"{x}_proj"): w.flatten(0, 1) for x, w in (("q", q), ("k", k), ("v", v))}
    return {key: whole}


def _hugging_face_name(name: str, shape: ModelConfig) -> str:
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.weight": "self_attn.q_proj.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.linear_fc1.weight": "mlp.gate_proj.weight",
        "mlp.linear_fc1.bias": "mlp.gate_proj.bias",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.shared_experts.linear_fc1.weight": "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    }
    if not name.startswith("decoder.layers."):
        return names.get(name, name)
    _, _, layer, rest = name.split(".", 3)
    if expert := re.fullmatch(r"mlp\.experts\.linear_fc([12])\.weight(\d+)", rest):
        return f"model.layers.{layer}.mlp.experts.{expert[2]}.{'gate' if expert[1] == '1' else 'down'}_proj.weight"
    return f"model.layers.{layer}.{names.get(rest, rest)}"
