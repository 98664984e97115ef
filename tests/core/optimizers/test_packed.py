"""Symmetric factors kept by half are the factors."""

import pytest
import torch

from canzona_cli.core.optimizers.kronecker import average_gram, pack, unpack
from canzona_cli.core.optimizers.shampoo_facts import packed_elements

from . import reference as reference

SIDES = [1, 5, 16, 17, 64, 100]


@pytest.mark.parametrize("side", SIDES)
def test_what_is_packed_comes_back(side: int) -> None:
    square = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    square = square + square.mT
    packed = pack(square.clone(), torch.empty(packed_elements(side)))
    assert torch.equal(unpack(packed, torch.full_like(square, float("nan"))), square)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tall", [False, True])
def test_averages_are_those_of_whole_products(side: int, tall: bool) -> None:
    """A CPU multiplies by strips, other devices whole: each entry within the rounding of its sum."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(40, side, generator=drawn).mT if tall else torch.randn(side, 40, generator=drawn)
    before = torch.randn(side, 60, generator=drawn)
    before = before @ before.mT
    exact = torch.lerp(before.double(), x.double() @ x.double().mT, 0.3)
    scale = 0.7 * before.double().abs() + 0.3 * x.double().abs() @ x.double().abs().mT
    packed = pack(before.clone(), torch.empty(packed_elements(side)))
    average_gram(packed, x, 0.3, torch.full((side, side), float("nan")))
    found = unpack(packed, torch.empty(side, side))
    assert bool(((found - exact).abs() <= 50 * 2.0**-24 * scale).all())


@pytest.mark.parametrize("side", [512, 1024, 4096, 5120, 12288])
def test_of_the_sides_of_real_models_at_most_55_hundredths_are_kept(side: int) -> None:
    assert packed_elements(side) <= 0.55 * side**2
