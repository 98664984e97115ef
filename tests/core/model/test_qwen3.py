"""Parameter and FLOP counts against what is published and what can be counted by hand."""

import pytest

from canzona_cli.config.compose import compose_run
from canzona_cli.core.model.families import family_of, flops_per_token, parameter_count
from tests.sizes import Size, model

CHECKPOINT_ELEMENTS: dict[Size, int] = {
    # Elements in the published safetensors; the two smallest store the tied output layer a second time.
    "0.6b": 751_632_384 - 151_936 * 1024,
    "1.7b": 2_031_739_904 - 151_936 * 2048,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
    "14b": 14_768_307_200,
    "32b": 32_762_123_264,
}


@pytest.mark.parametrize(("size", "elements"), CHECKPOINT_ELEMENTS.items())
def test_total_equals_the_published_checkpoint(size: Size, elements: int) -> None:
    config = compose_run([f"recipe={size}"]).config
    assert config.name == f"qwen3-{size}"
    assert parameter_count(config.model).total == parameter_count(model(size)).total == elements


@pytest.mark.parametrize(
    ("size", "total", "non_embedding"),
    [
        ("0.6b", "0.6", "0.44"),
        ("1.7b", "1.7", "1.4"),
        ("4b", "4.0", "3.6"),
        ("8b", "8.2", "6.95"),
        ("14b", "14.8", "13.2"),
        ("32b", "32.8", "31.2"),
    ],
)
def test_counts_agree_with_every_digit_of_the_model_card(size: Size, total: str, non_embedding: str) -> None:
    count = parameter_count(model(size))
    for ours, published in ((count.total, total), (count.non_embedding, non_embedding)):
        assert f"{ours / 1e9:.{len(published.partition('.')[2])}f}" == published


LLAMA_ELEMENTS = {"8b": 8_030_261_248, "70b": 70_553_706_496, "405b": 405_853_388_800}


@pytest.mark.parametrize(("size", "elements"), LLAMA_ELEMENTS.items())
def test_a_llama_has_the_published_number_of_elements(size: str, elements: int) -> None:
    shape = compose_run([f"recipe=llama3-{size}"]).config.model
    family, total = family_of(shape), parameter_count(shape).total
    assert (family.name, total) == ("llama", elements)


def test_only_untied_models_have_an_output_weight() -> None:
    assert parameter_count(model("4b")).output == 0
    assert parameter_count(model("8b")).output == 151_936 * 4096


def test_flops_of_a_token_counted_by_hand() -> None:
    shape = model("tiny")
    # A layer: q 256x256, k and v 128x256, proj 256x256, gate, up, down 768x256; the output layer 384x256.
    weights = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256) + 384 * 256
    # q k^T and scores * v: each 2 * 256 FLOPs for each of the 1000 / 2 keys seen on average, in 4 layers.
    attention = 4 * 2 * (2 * 256) * 500
    assert flops_per_token(shape, 1000) == pytest.approx(3 * (2 * weights + attention))


def test_flops_approach_six_per_parameter_for_short_sequences() -> None:
    shape = model("32b")
    count = parameter_count(shape)
    assert flops_per_token(shape, 1) == pytest.approx(6 * (count.layer_matrices + count.output), rel=1e-4)
