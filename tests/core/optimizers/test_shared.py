"""A matrix in fragments is updated as the whole is, in the same form, however it is cut."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from threading import Barrier
from typing import Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from canzona_cli.core.costs.sharing import Exchange, shared_exchanges, shared_works
from canzona_cli.core.optimizers import shared_rows
from canzona_cli.core.optimizers.facts import known_optimizers
from canzona_cli.core.optimizers.matrix_optimizer import matmul_precision
from canzona_cli.core.optimizers.muon_facts import CoefficientSet
from canzona_cli.core.optimizers.newton_schulz import coefficients
from canzona_cli.core.optimizers.shared_muon import SharedMuon
from canzona_cli.core.optimizers.shared_rows import FragmentGroup, Shape, Turns, Wait

LR = 0.05
SHAPES: tuple[Shape, ...] = ((48, 256), (256, 48), (64, 80), (64, 64))
"""A quarter of each of the last two is narrower than the short side."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Fragments of one matrix, each with an optimizer of its own, as ranks have."""

    whole: Shape
    optimizers: Sequence[SharedMuon]
    fragments: Sequence[torch.nn.Parameter]

    @property
    def axis(self) -> int:
        return 1 if self.fragments[0].size(0) == self.whole[0] else 0

    def gathered(self) -> torch.Tensor:
        return torch.cat([p.detach() for p in self.fragments], dim=self.axis)

    def step_alone(self) -> None:
        def one(rank: int, ranks: FragmentGroup) -> None:
            self.optimizers[rank].update_alone(
                self.fragments[rank], whole=self.whole, total=lambda part: ranks.total(part)()
            )

        self._at_once(one)

    def step(self, gradient: torch.Tensor) -> list[bool]:
        """Tells whether each fragment was updated."""
        for p, part in zip(self.fragments, gradient.chunk(len(self.fragments), dim=self.axis), strict=True):
            p.grad = part
        return self._at_once(
            lambda rank, ranks: alone(
                self.optimizers[rank].update_together(self.fragments[rank], whole=self.whole, ranks=ranks)
            )
        )

    def _at_once[Done](self, one: Callable[[int, FragmentGroup], Done]) -> list[Done]:
        """Runs all fragments at a time, as they wait for one another. Collectives read as late as they may, and
        overwrite as early."""
        count = len(self.fragments)
        barrier, given = Barrier(count), [torch.empty(0)] * count

        def everyones(rank: int, part: torch.Tensor) -> torch.Tensor:
            given[rank] = part.clone()
            barrier.wait(60)
            found = torch.stack(given)
            barrier.wait(60)
            return found

        def fragment(rank: int) -> Done:
            def swap(out: torch.Tensor, square: torch.Tensor) -> Wait:
                out.fill_(math.nan)
                return lambda: out.copy_(everyones(rank, square)[:, ranks.rows(square.size(0))])

            def gather(out: torch.Tensor, rows: torch.Tensor) -> Wait:
                own = rows.clone()
                out.fill_(math.nan)
                rows.copy_(own)  # where it lies there
                return lambda: out.copy_(everyones(rank, rows).flatten(0, 1))

            ranks = FragmentGroup(
                index=rank,
                count=count,
                total=lambda part: lambda: part.copy_(everyones(rank, part).sum(0)),
                swap=swap,
                gather=gather,
            )
            with torch.no_grad():
                return one(rank, ranks)

        # Each thread puts back what it found, which may be what another one set: have all find the same.
        with matmul_precision("fp32"), ThreadPoolExecutor(count) as pool:
            return list(pool.map(fragment, range(count)))


def alone[Result](running: Turns[Result]) -> Result:
    """Runs all turns where nobody else has one."""
    while True:
        try:
            waits = next(running)
        except StopIteration as end:
            result: Result = end.value
            return result
        for wait in waits:
            wait()


Precision = Literal["fp32", "bf16"]


def muon(p: torch.nn.Parameter, precision: Precision, ns: CoefficientSet = "quintic", steps: int = 5) -> SharedMuon:
    return SharedMuon([p], LR, precision=precision, form="gram", coefficients=ns, ns_steps=steps)


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.clone(), requires_grad=False)


def cut(weight: torch.Tensor, parts: int, precision: Precision, ns: CoefficientSet = "quintic", steps: int = 5) -> Cut:
    whole = (weight.size(0), weight.size(1))
    fragments = [parameter(part.contiguous()) for part in weight.chunk(parts, dim=1 if whole[0] < whole[1] else 0)]
    return Cut(whole=whole, optimizers=[muon(p, precision, ns, steps) for p in fragments], fragments=fragments)


def gaussian(whole: Shape, seed: int) -> torch.Tensor:
    return torch.randn(whole, generator=torch.Generator().manual_seed(seed))


def apart(found: torch.Tensor, wanted: torch.Tensor, start: torch.Tensor) -> float:
    """Difference over how far it has come, Frobenius norms."""
    return float((found - wanted).norm() / (wanted - start).norm())


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("whole", SHAPES)
def test_fragments_come_out_as_the_whole(whole: Shape, parts: int) -> None:
    """Results in fp32 differ by the order of sums: 5 steps amplify 6e-8 by at most their slopes, 477. The gradients'
    scale grows by 10 from step to step, from 1e-10."""
    start = gaussian(whole, 0)
    split, p = cut(start, parts, "fp32"), parameter(start)
    alone = muon(p, "fp32")
    for step in range(3):
        p.grad = gaussian(whole, step + 1) * 10.0 ** (step - 10)
        alone.step()
        assert split.step(p.grad) == [True] * parts
    assert apart(split.gathered(), p, start) < 477 * 6e-8


@pytest.mark.parametrize(("ns", "steps"), [("simple", 1), ("polar_express", 4), ("quintic", 3), ("deepseekv4", 10)])
def test_any_number_of_steps(ns: CoefficientSet, steps: int) -> None:
    """The difference is within 20 times of what rounding does to the whole itself, which is in the same form."""
    whole, start = (40, 96), gaussian((40, 96), 0)
    split, p, exact = cut(start, 2, "fp32", ns, steps), parameter(start), parameter(start)
    p.grad = exact.grad = gaussian(whole, 1)
    assert split.step(p.grad) == [True, True]
    muon(p, "fp32", ns, steps).step()
    y = (p.grad * 0.05).double()  # (1 - momentum) G, and the look ahead: a multiple of G
    y /= y.norm()
    for a, b, c in coefficients(ns, steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    exact.mul_(1 - LR * 0.1).add_(y.float(), alpha=-LR * 0.2 * math.sqrt(96))
    assert apart(split.gathered(), exact, start) < max(20 * apart(p, exact, start), 1e-5)


@pytest.mark.parametrize("whole", SHAPES)
def test_in_bf16_it_loses_little_more_than_the_whole(whole: Shape) -> None:
    """Twice: Gram matrices are rounded once more, and so are fragments when their norm becomes the whole's."""
    start, gradient = gaussian(whole, 0), gaussian(whole, 1)
    exact, p = parameter(start), parameter(start)
    exact.grad = p.grad = gradient
    muon(exact, "fp32").step()
    muon(p, "bf16").step()
    split = cut(start, 4, "bf16")
    assert split.step(gradient) == [True] * 4
    assert apart(split.gathered(), exact, start) < 2 * apart(p, exact, start)


def test_scale_and_uneven_fragments_are_of_no_account() -> None:
    """One fragment of zeros, one 1e12 times another, all of it at 1e-30 and at 1e30."""
    whole, start = (32, 128), gaussian((32, 128), 0)
    gradient = gaussian(whole, 1)
    gradient[:, :32] = 0
    gradient[:, 32:64] *= 1e-12
    found = []
    for size in (1e-30, 1.0, 1e30):
        split = cut(start, 4, "fp32")
        assert split.step(gradient * size) == [True] * 4
        found.append(split.gathered())
    p = parameter(start)
    p.grad = gradient
    muon(p, "fp32").step()
    for one in found:
        assert apart(one, p, start) < 477 * 6e-8
    still = cut(start, 4, "bf16")
    assert still.step(torch.zeros(whole)) == [True] * 4
    torch.testing.assert_close(still.gathered(), start * (1 - LR * 0.1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_fragment_moves_none(bad: float) -> None:
    start, gradient = gaussian((32, 96), 0), gaussian((32, 96), 1)
    gradient[3, 90] = bad
    split = cut(start, 2, "bf16")
    assert split.step(gradient) == [False] * 2
    torch.testing.assert_close(split.gathered(), start, rtol=0, atol=0)


def test_a_result_that_is_too_large_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its singular values are near 1, their root mean square too: no estimated error shows one that is far above."""
    start, gradient = gaussian((48, 256), 0), gaussian((48, 256), 1)
    for limit, trusted in ((1.1, True), (0.9, False)):
        monkeypatch.setattr(shared_rows, "largest_rms", lambda steps, limit=limit: limit)
        split = cut(start, 4, "fp32")
        assert split.step(gradient) == [trusted] * 4
        assert torch.equal(split.gathered(), start) != trusted


@pytest.mark.parametrize(("side", "parts"), [(64, 4), (63, 3)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_doubt_needs_no_more_memory(precision: Precision, side: int, parts: int) -> None:
    start, gradient = gaussian((side, 2 * side), 0), gaussian((side, 2 * side), 1)
    split = cut(start, parts, precision)
    assert split.step(gradient) == [True] * parts
    before = [optimizer.workspace.nbytes for optimizer in split.optimizers]
    split.step_alone()
    assert [optimizer.workspace.nbytes for optimizer in split.optimizers] == before


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10])
def test_products_and_exchanges_are_those_the_planner_prices(steps: int) -> None:
    """Part by part; what `mean_square_part` multiplies of some rows is left out there, and is no `addmm` here."""
    whole, sent, landed = (40, 96), list[tuple[Exchange, int]](), dict[int, int]()
    multiplied: list[int] = []

    def begin(kind: Exchange, move: Callable[..., object]) -> Callable[..., Wait]:
        def collective(*tensors: torch.Tensor) -> Wait:
            number = len(sent)
            sent.append((kind, len(multiplied)))

            def wait() -> None:
                move(*tensors)
                landed[number] = len(multiplied)

            return wait

        return collective

    ranks = FragmentGroup(
        index=0,
        count=1,
        total=begin("all_reduce", lambda part: None),
        swap=begin("all_to_all", lambda out, square: out.copy_(square.view_as(out))),
        gather=begin("all_gather", lambda out, rows: out.copy_(rows)),
    )
    p = parameter(gaussian(whole, 0))
    p.grad = gaussian(whole, 1)
    running = muon(p, "fp32", "deepseekv4", steps).update_together(p, whole=whole, ranks=ranks)
    waits: Sequence[Wait] | None = ()
    while waits is not None:
        for wait in waits:
            wait()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            waits = next(running, None)
        multiplied.append(counter.get_flop_counts().get("Global", {}).get(torch.ops.aten.addmm, 0))
    assert multiplied == [work.matmul_flops for work in shared_works(steps, *whole, 1, width=4)]
    planned = [
        ((kind, part), part + 1 + behind.overlapped_parts)
        for part, behind in enumerate(shared_exchanges(steps))
        for kind in behind.exchanges
    ]
    assert [(one, landed[number]) for number, one in enumerate(sent)] == planned


def test_what_plans_may_share_is_what_the_engine_can_update_in_fragments() -> None:
    for facts in known_optimizers().values():
        if facts.update is not None:
            module, _, name = facts.update.partition(":")
            kind = getattr(import_module(f"canzona_cli.core.optimizers.{module}"), name)
            assert facts.rule.shared == issubclass(kind, SharedMuon), facts.name
