"""The matrices of a model: complete, in canonical order, the same for every tensor-parallel size."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canzona_cli.core.errors import ConfigError
from canzona_cli.core.model import shapes as shapes_file
from canzona_cli.core.model.families import parameter_count
from canzona_cli.core.model.matrices import layer_shapes, matrices, stage_matrices
from canzona_cli.core.model.shapes import load_shapes
from canzona_cli.core.setup import ModelConfig, Splitting
from canzona_cli.core.setup.layout_rules import possible_tp
from tests.refusals import refused
from tests.sizes import SHAPES, Size, layout, model

SPLITTINGS: tuple[Splitting, ...] = get_args(Splitting)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Small shapes with sizes of no particular kind, primes among them."""
    groups = draw(st.integers(1, 4))
    return replace(
        model("tiny"),
        num_layers=draw(st.sampled_from([1, 2, 3, 4, 6])),
        hidden_size=draw(st.integers(1, 97)),
        ffn_hidden_size=draw(st.integers(1, 97)) * 4,
        num_query_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([2, 6, 8, 14])),
        vocab_size=384,
    )


@pytest.mark.parametrize("splitting", SPLITTINGS)
@pytest.mark.parametrize("size", SHAPES)
def test_they_hold_every_layer_weight_once(size: Size, splitting: Splitting) -> None:
    found = matrices(model(size), layout(), splitting)
    assert sum(m.elements for m in found) == parameter_count(model(size)).layer_matrices
    assert len({m.name for m in found}) == len(found)


@given(models())
def test_split_and_fused_cover_the_same_elements_of_each_parameter(shape: ModelConfig) -> None:
    def by_parameter(splitting: Splitting) -> dict[str, int]:
        sums: dict[str, int] = {}
        for m in matrices(shape, layout(), splitting):
            sums[m.parameter] = sums.get(m.parameter, 0) + m.elements
        return sums

    # The same keys in the same order: parameters come as Megatron registers them however they are split.
    fused = list(by_parameter("fused").items())
    assert all(list(by_parameter(splitting).items()) == fused for splitting in SPLITTINGS)


@given(models(), st.sampled_from(SPLITTINGS))
def test_tensor_parallelism_changes_only_where_a_matrix_lives(shape: ModelConfig, splitting: Splitting) -> None:
    whole = matrices(shape, layout(), splitting)
    for tp in possible_tp(shape):
        found = matrices(shape, layout(tp=tp), splitting)
        assert [replace(m, home=None, shard_dim=None) for m in found] == [replace(m, shard_dim=None) for m in whole]
        for parameter in {m.parameter for m in found}:
            pieces = [m for m in found if m.parameter == parameter]
            for rank in range(tp):
                stored = [m.elements // (1 if m.home is not None else tp) for m in pieces if m.home in (None, rank)]
                assert sum(stored) * tp == sum(m.elements for m in pieces)


@pytest.mark.parametrize("size", SHAPES)
def test_a_layer_is_registered_in_megatrons_order(size: Size) -> None:
    names = [m.name for m in matrices(model(size), layout(), "split")]
    layer = ["proj", "q", "k", "v", "gate", "up", "down"]
    assert names == [f"layers.{number}.{name}" for number in range(SHAPES[size][0]) for name in layer]
    parameters = list(dict.fromkeys(m.parameter for m in matrices(model(size), layout(), "split")))[:4]
    assert [name.split(".")[-2] for name in parameters] == ["linear_proj", "linear_qkv", "linear_fc1", "linear_fc2"]


def test_q_k_and_v_keep_together_while_gate_and_up_may_part() -> None:
    units = {m.name.split(".")[-1]: m.unit for m in matrices(model("tiny"), layout(), "split") if m.layer == 1}
    assert units["q"] == units["k"] == units["v"]
    assert len(set(units.values())) == 5
    later = {m.unit for m in matrices(model("tiny"), layout(), "split") if m.layer == 2}
    assert later.isdisjoint(units.values())


def test_qkv_splitting_is_what_megatrons_muon_updates() -> None:
    found = {m.kind: m for m in matrices(model("tiny"), layout(tp=2), "qkv") if m.layer == 1}
    assert list(found) == ["proj", "q", "k", "v", "fc1", "down"]
    assert found["q"].unit == found["k"].unit == found["v"].unit
    assert len({m.unit for m in found.values()}) == 4
    assert (found["fc1"].rows, found["fc1"].cols, found["fc1"].shard_dim) == (2 * 768, 256, 0)
    later = {m.unit for m in matrices(model("tiny"), layout(), "qkv") if m.layer == 2}
    assert later.isdisjoint({m.unit for m in found.values()})


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_layers_have_the_shapes_of_their_matrices(splitting: Splitting) -> None:
    whole = matrices(model("tiny"), layout(), splitting)
    assert layer_shapes(model("tiny"), splitting) == tuple((m.rows, m.cols) for m in whole if m.layer == 3)


def test_heads_live_whole_on_the_rank_that_computes_their_query_group() -> None:
    shape = model("tiny")  # 8 heads in 4 groups
    found = {m.name: m for m in matrices(shape, layout(tp=2), "per_head") if m.layer == 0}
    assert [found[f"layers.0.q.{head}"].home for head in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [found[f"layers.0.k.{group}"].home for group in range(4)] == [0, 0, 1, 1]
    assert found["layers.0.proj"].home is None
    assert (found["layers.0.q.0"].rows, found["layers.0.q.0"].cols) == (32, 256)


def test_stages_take_consecutive_layers() -> None:
    found = matrices(model("tiny"), layout(pp=2), "split")
    assert [m.stage for m in found] == [0] * 14 + [1] * 14
    assert [m.index for m in found] == list(range(28))
    assert stage_matrices(found, 1) == found[14:]


def test_model_chunks_of_a_stage_take_turns_with_those_of_others() -> None:
    found = matrices(model("tiny"), layout(pp=2, vpp=2), "split")
    assert [(m.layer, m.stage, m.chunk) for m in found[::7]] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert [m.layer for m in stage_matrices(found, 1)] == [1] * 7 + [3] * 7


@pytest.mark.parametrize(("tp", "splitting"), [(3, "split"), (16, "split"), (8, "per_head")])
def test_what_tensor_parallelism_does_not_divide_is_named(tp: int, splitting: Splitting) -> None:
    shape = replace(model("tiny"), ffn_hidden_size=776)  # 8 x 97
    with pytest.raises(ConfigError, match="equal parts") as caught:
        matrices(shape, layout(tp=tp), splitting)
    assert {problem.key for problem in caught.value.problems} == {"parallel.tp"}


def test_the_first_and_the_last_of_uneven_stages_take_a_layer_less() -> None:
    found = matrices(model("tiny"), layout(pp=3), "split")
    assert [(m.layer, m.stage) for m in found[::7]] == [(0, 0), (1, 1), (2, 1), (3, 2)]


def test_layers_that_stages_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp: cannot split 4 layers into 5"):
        matrices(model("tiny"), layout(pp=5), "split")


OWN = """
name: own
hidden_size: 256
embedding: 98304
layers: 4
other: 576
heads: 8
kv_heads: 4
head_dim: 32
matrices:
  - {name: proj, rows: 256, cols: 256, shard: cols, parameter: self_attention.linear_proj.weight}
  - {name: q, rows: 256, cols: 256, shard: rows, unit: qkv, parameter: self_attention.linear_qkv.weight}
  - {name: k, rows: 128, cols: 256, shard: rows, unit: qkv, parameter: self_attention.linear_qkv.weight}
  - {name: v, rows: 128, cols: 256, shard: rows, unit: qkv, parameter: self_attention.linear_qkv.weight}
  - {name: gate, rows: 768, cols: 256, shard: rows, parameter: mlp.linear_fc1.weight}
  - {name: up, rows: 768, cols: 256, shard: rows, parameter: mlp.linear_fc1.weight}
  - {name: down, rows: 256, cols: 768, shard: cols, parameter: mlp.linear_fc2.weight}
"""
COPY = "{name: up.1, rows: 8, cols: 8, shard: none}"


def written(folder: Path, text: str) -> Path:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_model_described_in_yaml_has_the_matrices_of_the_built_in_one(tmp_path: Path, tp: int) -> None:
    shapes = load_shapes(written(tmp_path, OWN))
    assert shapes.matrices(layout(tp=tp, pp=2)) == matrices(model("tiny"), layout(tp=tp, pp=2), "split")
    stand_in = shapes.stand_in(model("0.6b"))
    assert replace(stand_in, name="", qk_norm=True) == replace(model("tiny"), name="")
    assert shapes.layer_matrices == parameter_count(model("tiny")).layer_matrices


def test_only_a_change_of_shapes_changes_the_digest(tmp_path: Path) -> None:
    digest = load_shapes(written(tmp_path, OWN)).digest
    assert load_shapes(written(tmp_path, "# a comment\n" + OWN.replace("name: own", "name: other"))).digest == digest
    assert load_shapes(written(tmp_path, OWN.replace("rows: 768", "rows: 772"))).digest != digest


def test_blocks_of_different_layers_and_counted_experts(tmp_path: Path) -> None:
    text = """
name: mixture
hidden_size: 64
embedding: 8192
blocks:
  - layers: 1
    matrices: [{name: up, rows: 127, cols: 64, shard: none}]
  - layers: 2
    other: 8
    matrices:
      - {name: up, rows: 32, cols: 64, shard: rows, count: 3}
      - {name: router, rows: 1, cols: 64, shard: none}
"""
    shapes = load_shapes(written(tmp_path, text))
    found = shapes.matrices(layout(tp=2))
    assert [m.name for m in found if m.layer == 1] == [f"layers.1.up.{e}" for e in range(3)] + ["layers.1.router"]
    assert [m.layer for m in found] == [0, *[1] * 4, *[2] * 4]
    assert len({m.unit for m in found}) == 9
    assert found[0].fragment_elements(2) == 127 * 64
    assert found[1].fragment_elements(2) == 32 * 32
    assert shapes.others == (0, 8)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("hidden_size: 256", "hidden_size: wide"), "hidden_size: is not a whole number"),
        (("embedding: 98304", "embedings: 98304"), "embedding: has no value"),
        (("embedding: 98304", "embedings: 98304"), "embedings: is not one of"),
        (("layers: 4", "layers: 0"), "layers: must be at least 1"),
        (("layers: 4", "layers: 1000000000"), "layers: must be at most 2,048"),
        (("hidden_size: 256", "hidden_size: 10000000000000"), "hidden_size: must be at most"),
        (("shard: cols", "shard: cols, count: 1000000000"), "count: must be at most 2,048"),
        (("layers: 4", "layers: 2048"), "must be at most 1,000 in all layers"),
        (("shard: cols", "shard: columns"), "matrices.0.shard: must be rows, cols or none"),
        (("rows: 128", "rows: -1"), "matrices.2.rows: must be at least 1"),
        (("name: up", "name: gate"), "matrices.5.name: is the name of two matrices"),
        (("- {name: up,", f"- {COPY}\n  - {{count: 2, name: up,"), "matrices.6.name: is the name of two matrices"),
        (("matrices:", "matrices: []\nunused:"), "matrices: is empty"),
        (("matrices:", "matrices: [gate]\nunused:"), "matrices.0: is not a mapping of names to values"),
        (("name: up", "name: ''"), "matrices.5.name: is empty"),
        ((OWN, "- a\n- b"), "is not a mapping"),
        ((OWN, "a: [b"), "is not valid YAML"),
    ],
)
def test_mistakes_in_a_file_of_shapes_are_named_by_their_place(
    tmp_path: Path, change: tuple[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes_file, "_MOST_MATRICES", 1_000)
    with pytest.raises(ConfigError) as caught:
        load_shapes(written(tmp_path, OWN.replace(*change)))
    assert problem in str(caught.value)


def test_every_mistake_in_a_file_is_reported_at_once(tmp_path: Path) -> None:
    problems = refused(
        load_shapes, written(tmp_path, OWN.replace("layers: 4", "layers: x").replace("shard: cols", "shard: both"))
    )
    assert len(problems) == 3


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_shapes(tmp_path / "none.yaml")
