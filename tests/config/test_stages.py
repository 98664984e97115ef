"""The layers of a stage and a chunk: as published models were cut, and as Megatron-core builds them."""

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from canzona_cli.core.setup import Mesh
from canzona_cli.core.setup.stages import (
    chunk_layers,
    count_parts_as_layers,
    most_layers,
    possible_pp,
    possible_vpp,
    stage_layers,
)


def mesh(pp: int, vpp: int = 1) -> Mesh:
    return Mesh(tp=1, pp=pp, vpp=vpp, cp=1, dp=1)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "stages"),
    [
        (126, 8, 8, (15, *[16] * 6, 15)),  # Llama-3.1 405B
        (126, 16, 1, (7, *[8] * 14, 7)),
        (94, 8, 4, (11, *[12] * 6, 11)),  # Qwen3-235B-A22B
        (5, 2, 1, (3, 2)),
        (7, 3, 1, (2, 3, 2)),
        (64, 2, 3, (32, 32)),
        (36, 4, 3, (9, 9, 9, 9)),
    ],
)
def test_stages_of_known_layouts(layers: int, pp: int, vpp: int, stages: tuple[int, ...]) -> None:
    cut = mesh(pp, vpp)
    assert tuple(stage_layers(layers, cut, stage) for stage in range(pp)) == stages
    assert most_layers(layers, cut) == max(stages)


@pytest.mark.parametrize("layers", [1, 4, 5, 30, 62, 126])
def test_every_layer_is_where_megatron_builds_it(layers: int) -> None:
    """Every possible cut is checked; each stage holds as many layers in any number of chunks."""
    for pp in possible_pp(layers):
        in_stages = set()
        for vpp in possible_vpp(layers, pp):
            way, cut = count_parts_as_layers(layers, pp * vpp), mesh(pp, vpp)
            assert way is not None
            theirs = TransformerConfig(
                num_layers=layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                pipeline_dtype="bf16",
                account_for_embedding_in_pipeline_split=way.embedding,
                account_for_loss_in_pipeline_split=way.loss,
            )
            for stage in range(pp):
                for chunk in range(vpp):
                    virtual = chunk if vpp > 1 else None
                    first = get_transformer_layer_offset(theirs, virtual, stage) if pp > 1 else 0
                    count = get_num_layers_to_build(theirs, virtual, stage)
                    assert chunk_layers(layers, cut, stage, chunk) == range(first, first + count)
                    assert count > 0
            in_stages.add(tuple(stage_layers(layers, cut, stage) for stage in range(pp)))
        assert len(in_stages) == 1


def test_what_cannot_be_cut_is_not_among_the_possible() -> None:
    assert possible_pp(36) == (1, 2, 3, 4, 6, 9, 12, 18, 19, 36)
    assert count_parts_as_layers(36, 8) is None
    assert count_parts_as_layers(4, 6) is None, "the first and the last stage would have no layer"
    assert possible_vpp(126, 8) == (1, 2, 4, 8)
    assert possible_vpp(126, 1) == (1,)
