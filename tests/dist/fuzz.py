"""Random runs against one process: shapes, layouts, splittings, buffers, precisions and optimizers from a seed.

A case trains on one layout, is saved, goes on on another one, and is saved again. What both layouts and their plans may
not change is the model: the final masters are those of one rank that trains the same steps, within what rounding alone
comes to. How much that is controls measure: the same rank again, its gradients shaken by rounding. What the second
layout has read is, to the last bit, what the first one wrote, whoever of both shares matrices. In some cases a rank's
gradient is NaN in one step, which all of them skip.

Ranks are forked once for all cases of one number of ranks, and those of one mesh share its process groups.
"""

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from statistics import median

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from canzona_cli.checkpoint.manifest import step_name
from canzona_cli.checkpoint.restore import restore, verify_together
from canzona_cli.config.schema import RunConfig
from canzona_cli.core.errors import CanzonaError
from canzona_cli.core.megatron.model import Trainee
from canzona_cli.core.megatron.parallel import World, make_groups
from canzona_cli.core.planner.plan import Plan
from canzona_cli.core.setup import Layout
from canzona_cli.training.assemble import assemble, join
from canzona_cli.training.data import BatchStream
from canzona_cli.training.step import train_step
from tests.dist import jobs, whole
from tests.dist.ranks import run_ranks
from tests.dist.samples import samples_of
from tests.dist.saved import Units, save, units_of
from tests.dist.synthetic import finish_gathering
from tests.dist.whole import Part, part_of
from tests.waiting import PATIENCE_S

HALF = 2
"""Steps on each layout."""
SLACK = {"bf16": 4.0, "fp32": 30.0}
"""The allowed distance of a case over the distance of the control, by precision. Seen in 300 cases: 1.5, because the
control rounds no less than a run does; where a sum of a few terms stands for all, mostly 1 to 3, and once 21 (SOAP)."""
CONTROLS = {"soap": 6}
"""The number of times gradients are perturbed, by optimizer. SOAP's bases may turn at a rounding: of ten such controls
of seed 36, six were 3e-4 away from the unperturbed run and four 5e-2, which is, to two digits, as far as another
layout."""
FLOOR = 2e-6
"""The relative distance that any case may have, because masters are fp32."""
MESHES = [
    (tp, pp, cp, dp)
    for tp, pp, cp, dp in product((1, 2, 3, 4), (1, 2, 3), (1, 2), (1, 2, 3, 4))
    if 2 <= tp * pp * cp * dp <= 6
]
"""(tp, pp, cp, dp)."""
WIDTHS = {"bf16": 2.0**-8, "fp32": 2.0**-22}
"""The perturbation of gradients in the control, relative to their root mean square, by the coarsest precision in which
a case rounds gradients: twice the largest rounding of an element and, in fp32, of a sum of a few terms."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Overrides of a run."""

    seed: int
    shared: tuple[str, ...]
    """The settings that decide about the numbers, common to both halves and to the run on one rank."""
    halves: tuple[tuple[str, ...], tuple[str, ...]]
    """The layout and execution of each half of the steps."""
    noise: float
    """The perturbation of gradients in the control, relative to their root mean square."""
    broken: int | None
    """The step in which the last rank's first gradient is NaN."""

    def __str__(self) -> str:
        first, second = (" ".join(half) for half in self.halves)
        broken = "" if self.broken is None else f", step {self.broken} is skipped"
        return f"seed {self.seed}: {' '.join(self.shared)}{broken}\n  first:  {first}\n  second: {second}"


def draw(seed: int) -> Case:
    """The case of a seed; the same on every machine."""
    dice = random.Random(seed)
    groups, each, head = dice.choice((1, 2, 3, 4, 6)), dice.choice((1, 2, 3)), dice.choice((4, 8, 10, 16))
    layers, seq = dice.choice((1, 2, 2, 3, 4)), dice.choice((8, 16, 24))
    ffn, vocab = 12 * dice.choice((1, 2, 3, 5)), 12 * dice.choice((22, 25, 30))
    hidden = dice.choice((16, 20, 24, 36, 48))
    possible = [mesh for mesh in MESHES if groups % mesh[0] == 0 and layers % mesh[1] == 0 and seq % (2 * mesh[2]) == 0]
    # Most is to go wrong where there are tensor-parallel ranks, which few meshes have; many ranks are slow.
    weights = [(5 if mesh[0] > 1 else 1) / math.prod(mesh) ** 2 for mesh in possible]
    meshes = dice.choices(possible, weights, k=2)
    batch = math.lcm(*(mesh[3] for mesh in meshes)) * dice.choice((1, 2))
    bf16 = dice.random() < 0.25
    optimizer, settings = _optimizer(dice)
    # Megatron's own Muon, which runs under strategies sc and layerwise, splits no further than this.
    theirs = optimizer == "muon" and dice.random() < 0.3
    splitting = dice.choice(("fused", "qkv") if theirs else ("fused", "qkv", "split", "split", "per_head"))
    if "max_preconditioner_dim" in settings:  # with no side as short as that nothing would be a matrix
        sides = hidden, ffn, groups * each * head, {"per_head": head, "fused": ffn}.get(splitting, groups * head)
        settings["max_preconditioner_dim"] = max(int(settings["max_preconditioner_dim"]), min(sides))
    grad_dtype = "bf16" if bf16 and dice.random() < 0.3 else "fp32"
    exchanged = "bf16" if bf16 and dice.random() < 0.5 else "fp32"
    shared = (
        "recipe=qwen3-tiny",
        f"model.num_layers={layers}",
        f"model.hidden_size={hidden}",
        f"model.ffn_hidden_size={ffn}",
        f"model.num_attention_heads={groups * each}",
        f"model.num_query_groups={groups}",
        f"model.head_dim={head}",
        f"model.vocab_size={vocab}",
        f"model.tied_embeddings={_yes(dice)}",
        f"model.qk_norm={_yes(dice)}",
        f"train.seq_length={seq}",
        f"train.global_batch_size={batch}",
        f"train.steps={2 * HALF}",
        f"train.seed={seed + 1}",
        f"train.precision={'bf16' if bf16 else 'fp32'}",
        f"train.grad_reduce_dtype={grad_dtype}",
        f"engine.splitting={splitting}",
        "schedule.decay=constant",
        "schedule.warmup_steps=0",
        f"optimizer={optimizer}",
        f"optimizer.clip_grad={dice.choice((0, 0.1))}",
        f"optimizer.weight_decay={dice.choice((0, 0.1))}",
        *(f"optimizer.{key}={value}" for key, value in settings.items()),
    )
    # An exchange has to have room for the largest matrix.
    room = round(4 * hidden * max(2 * ffn, groups * (each + 2) * head) / 2**20 + 0.005, 3)
    halves = [_half(dice, mesh, layers, batch, optimizer, room, theirs=theirs, bf16=bf16) for mesh in meshes]
    if exchanged == "bf16":  # only a plan's exchange rounds
        plans = [not {"engine.strategy=sc", "engine.strategy=layerwise"} & {*half} for half in halves]
        halves = [(*half, *plan * ("engine.exchange_dtype=bf16",)) for half, plan in zip(halves, plans, strict=True)]
    # Dice of their own: what older seeds had drawn stays.
    dice = random.Random(f"{seed}, modes")
    broken = None
    if optimizer != "adamw" and not theirs:  # Megatron's own optimizers skip nothing, and have no form
        broken = dice.randrange(2 * HALF) if dice.random() < 0.2 else None
        form = f"optimizer.form={dice.choice(('gram', 'gram', 'gram', 'auto'))}"
        shared += ("train.non_finite=skip", *((form,) if optimizer == "muon" else ()))
        halves = [(*half, *_mode(dice, half)) for half in halves]
    noise = WIDTHS["bf16" if bf16 else "fp32"]
    return Case(seed=seed, shared=shared, halves=(halves[0], halves[1]), noise=noise, broken=broken)


def _optimizer(dice: random.Random) -> tuple[str, dict[str, str | float]]:
    """Returns an optimizer with settings that keep rounding from being amplified: see
    `tests.dist.trained.OPTIMIZERS`."""
    name = dice.choice(("muon", "muon", "soap", "shampoo", "adamw"))
    settings: dict[str, str | float] = {"lr": 0.01, "eps": 1e-4}
    if name == "muon":
        settings = {
            "lr": 0.02,
            "nesterov": _yes(dice),
            "ns_steps": dice.choice((2, 5)),
            "scale_mode": dice.choice(("spectral", "unit_rms_norm", "shape_scaling")),
            "stack": _yes(dice),
        }
    elif name in ("soap", "shampoo"):
        settings |= {
            "precondition_frequency": dice.choice((2, 3)),
            "max_preconditioner_dim": dice.choice((24, 64)),
            "stagger": _yes(dice),
        }
    return name, settings


def _half(
    dice: random.Random,
    mesh: tuple[int, int, int, int],
    layers: int,
    batch: int,
    optimizer: str,
    room: float,
    *,
    theirs: bool,
    bf16: bool,
) -> tuple[str, ...]:
    tp, pp, cp, dp = mesh
    micro = dice.choice([size for size in range(1, batch // dp + 1) if batch // dp % size == 0])
    if optimizer == "adamw":
        strategy = "canzona"
    elif theirs:
        strategy = dice.choice(("canzona", "sc", "layerwise") if bf16 else ("canzona", "sc"))
    else:
        strategy = dice.choice(
            ("canzona", "canzona", "paper", "asc", "sc") if optimizer != "muon" else ("canzona", "paper", "asc")
        )
    # Chunks of stages take turns over as many micro-batches as there are stages.
    may = strategy in ("canzona", "paper", "asc") and pp > 1 and layers % (2 * pp) == batch // (dp * micro) % pp == 0
    return (
        f"gpus={tp * pp * cp * dp}",
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.vpp={2 if may else 1}",
        f"parallel.cp={cp}",
        f"train.micro_batch_size={micro}",
        f"train.recompute={dice.choice(('none', 'selective', 'full'))}",
        f"parallel.overlap_grad_reduce={_yes(dice)}",
        f"parallel.overlap_param_gather={_yes(dice)}",
        f"parallel.bucket_elements={dice.choice((2000, 10000, 'null'))}",
        f"engine.strategy={strategy}",
        f"engine.alpha={dice.choice((0, 0.5, 1))}",
        f"engine.c_max_mib={dice.choice((room, 'null'))}",
        f"engine.reduction={dice.choice(('null', 'reduce', 'ring'))}",
    )


def _mode(dice: random.Random, half: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a mode where there is a TP group to share with; few of these matrices are cut evenly, and some optimizers
    cannot share."""
    if "parallel.tp=1" in half or "engine.strategy=canzona" not in half:
        return ()
    return (f"engine.mode={dice.choice(('hosted', 'shared', 'shared', 'auto'))}",)


def _yes(dice: random.Random) -> str:
    return dice.choice(("true", "false"))


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One run of a case on one mesh."""

    case: Case
    config: RunConfig
    layout: Layout
    plan: Plan | None
    store: Path
    """The folder it saves to."""
    steps: int
    start: Path | None
    """The checkpoint it continues from, which it first saves again to `store`/read."""
    shaken: int
    """The number of the control that it is; 0 for none."""

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.layout.tp, self.layout.pp, self.layout.vpp, self.layout.cp, self.layout.dp

    @property
    def done(self) -> int:
        """Steps before it."""
        return 0 if self.start is None else HALF

    @property
    def end(self) -> Path:
        """The checkpoint behind its last step."""
        return self.store / step_name(self.done + self.steps)

    @property
    def read(self) -> Path:
        """The one it began with, as it saves that itself."""
        return self.store / "read" / step_name(self.done)


def leg(case: Case, where: tuple[str, ...], steps: int, store: Path, *, start: Path | None, shaken: int = 0) -> Leg:
    """Resolved and planned here, where ranks forked from this process find it.

    Raises:
        AssertionError: canzona refuses the case.
    """
    try:
        config, layout = jobs.resolve(*case.shared, *where)
        plan = jobs.planned(config, layout)
    except CanzonaError as error:
        raise AssertionError(f"{case}\nis refused: {error}") from error
    (store / "read").mkdir(parents=True)
    return Leg(case=case, config=config, layout=layout, plan=plan, store=store, steps=steps, start=start, shaken=shaken)


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A rank's weights."""

    read: Part | None
    """The weights as they were restored from the checkpoint it continued from."""
    end: Part


def run_legs(legs: Sequence[Leg]) -> list[list[Weighed]]:
    """Each leg's ranks; legs of one number of ranks share processes, and of one mesh process groups.

    Raises:
        AssertionError: with the case that a rank failed in, and how.
    """
    found: dict[int, list[Weighed]] = {}
    for size, together in groupby(sorted(legs, key=lambda one: (one.layout.world_size, one.mesh)), key=_world_size):
        batch = list(together)
        ranks = run_ranks(size, partial(_rank, batch))
        found |= {id(one): list(of_one) for one, of_one in zip(batch, zip(*ranks, strict=True), strict=True)}
    return [found[id(one)] for one in legs]


def _world_size(one: Leg) -> int:
    return one.layout.world_size


def _rank(legs: Sequence[Leg]) -> list[Weighed]:
    logging.disable(logging.WARNING)
    found: list[Weighed] = []
    world: World | None = None
    mesh: tuple[int, ...] = ()
    for one in legs:
        try:
            if world is None:
                world = join(one.config, one.layout)
            elif mesh != one.mesh:
                parallel_state.destroy_model_parallel()
                groups = make_groups(one.layout, timeout=timedelta(seconds=PATIENCE_S), alive=lambda: None)
                model_parallel_cuda_manual_seed(one.config.train.seed)
                world = replace(world, groups=groups, owners=groups.dp_cp)
            mesh, world = one.mesh, replace(world, layout=one.layout)
            found.append(_go(one, world))
        except Exception as error:
            raise AssertionError(f"{one.case}\nfails on {one.mesh}: {error}") from error
    return found


def _go(one: Leg, world: World) -> Weighed:
    trainee = assemble(one.config, world, one.plan)
    read = None
    if one.start is not None:
        restore(trainee, one.start, verify_together(world, one.start))
        read = part_of(trainee.chunks, world)
        save(one.config, trainee, one.read.parent, one.done)
    if one.shaken:
        _shake(trainee, one.case.noise, one.shaken)
    samples = samples_of(one.config.setup, 2 * HALF * world.layout.global_batch_size)
    batches = BatchStream(samples, world, first_sample=one.done * world.layout.global_batch_size)
    for step in range(one.done, one.done + one.steps):
        with _broken(trainee) if step == one.case.broken else nullcontext():
            made = train_step(trainee, batches)
        assert made.skipped == (step == one.case.broken)
    finish_gathering(trainee)
    save(one.config, trainee, one.store, one.done + one.steps)
    return Weighed(read=read, end=part_of(trainee.chunks, world))


@contextmanager
def _broken(trainee: Trainee) -> Iterator[None]:
    """Makes a gradient NaN on the last rank."""
    if trainee.world.rank != trainee.world.world_size - 1:
        yield
        return
    handle = next(trainee.chunks[0].parameters()).register_hook(lambda gradient: gradient * math.nan)
    yield
    handle.remove()


def _shake(trainee: Trainee, noise: float, number: int) -> None:
    generator = torch.Generator().manual_seed(trainee.setup.train.seed + number)

    def shaken(gradient: torch.Tensor) -> torch.Tensor:
        exact = gradient.float()
        size = noise * exact.square().mean().sqrt() * (exact != 0)  # tokens that do not occur have no gradient anywhere
        return (exact + size * torch.randn(exact.shape, generator=generator)).to(gradient.dtype)

    for parameter in (parameter for chunk in trainee.chunks for parameter in chunk.parameters()):
        parameter.register_hook(shaken)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The result of a case."""

    case: Case
    wrong: tuple[str, ...]
    """The properties that do not hold, one per line."""
    apart: float
    """The largest distance of a master from that of one rank, over the distance that the control allows; up to 1 is
    fine."""
    control: float
    """The largest distance of the control over all masters, relative to their norm."""


def judge(cases: Sequence[Case], folder: Path) -> list[Judged]:
    """Run them all, in `folder`.

    Raises:
        AssertionError: a case is refused, or a rank fails; says which.
    """
    firsts, ones, controls = [], [], []
    for case in cases:
        home = folder / str(case.seed)
        axes = ("tp", "pp", "vpp", "cp")
        single = ("gpus=1", *(f"parallel.{axis}=1" for axis in axes), "engine.strategy=canzona")
        one = leg(case, single, 2 * HALF, home / "one", start=None)
        number = CONTROLS.get(one.config.optimizer.name, 1)
        controls.append(
            [
                leg(case, single, 2 * HALF, home / f"shaken-{shaken}", start=None, shaken=shaken)
                for shaken in range(1, 1 + number)
            ]
        )
        ones.append(one)
        firsts.append(leg(case, case.halves[0], HALF, home / "first", start=None))
    seconds = [leg(one.case, one.case.halves[1], HALF, one.store.parent / "second", start=one.end) for one in firsts]
    others = [*ones, *chain.from_iterable(controls)]
    weighed = run_legs([*others, *firsts])[len(others) :]
    return [_judged(*legs) for legs in zip(firsts, seconds, weighed, run_legs(seconds), ones, controls, strict=True)]


def _judged(
    first: Leg, second: Leg, began: list[Weighed], ended: list[Weighed], one: Leg, controls: Sequence[Leg]
) -> Judged:
    model, wrong = first.config.model, list[str]()
    before, after = units_of(first.end, model), units_of(second.read, model)
    wrong += [f"read differently: {name}" for name in before.keys() | after.keys() if not _same(before, after, name)]
    trained = whole.assemble([rank.end for rank in began], model)
    read = whole.assemble([rank.read for rank in ended if rank.read is not None], model)
    wrong += [f"another weight: {name}" for name, weight in trained.items() if not weight.equal(read[name])]
    whole.assemble([rank.end for rank in ended], model)  # asserts that ranks agree
    expected, found, *shaken = (_masters(units_of(run.end, model)) for run in (one, second, *controls))
    if expected.keys() != found.keys():
        return Judged(case=first.case, wrong=(*wrong, "other masters"), apart=math.inf, control=math.inf)
    shaking = {name: max(_distance(each[name], value) for each in shaken) for name, value in expected.items()}
    # SOAP amplifies rounding in whichever matrix has a factor full of it; with the others all masters fare alike.
    usual = max(shaking.values()) if first.config.optimizer.name == "soap" else median(shaking.values())
    slack, worst = SLACK[first.config.train.precision], 0.0
    for name, value in expected.items():
        allowed = slack * max(shaking[name], usual) + FLOOR
        apart = _distance(found[name], value) / allowed
        worst = max(worst, apart)
        if not apart <= 1:
            wrong.append(f"{name}: {apart:.3g} times as far from one rank's as rounding explains")
    return Judged(case=first.case, wrong=tuple(wrong), apart=worst, control=max(shaking.values()))


def _same(one: Units, other: Units, name: str) -> bool:
    return name in one and name in other and np.array_equal(one[name], other[name])


def _masters(units: Units) -> Units:
    return {name: value for name, value in units.items() if name.endswith("/master")}


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
