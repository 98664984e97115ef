"""Bytes that a step's all-to-alls really carry over gloo, against the plan's account of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from canzona_cli.core.engine.hosted import HostedGroup
from canzona_cli.core.engine.wire import AllToAll, Fragments, Messages, SideStream, Wiring
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.megatron.timers import PhaseTimer, watcher_for
from canzona_cli.core.model.matrices import Matrix
from canzona_cli.core.planner.exchange import from_hosts, group_traffic, to_hosts
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.measures import exchange_sent
from canzona_cli.training.assemble import assemble
from tests import sizes
from tests.dist.engine_support import SMALL_GROUPS, engine_of, resolve
from tests.dist.jobs import on_ranks
from tests.dist.ranks import run_ranks
from tests.dist.synthetic import fill_gradients, noise

CPU = torch.device("cpu")


@contextmanager
def counted(group: torch.distributed.ProcessGroup | None) -> Iterator[list[int]]:
    """Bytes this rank sends to others, by all-to-all and all-gather over `group`."""
    sent: list[int] = []
    real: Callable[..., object] = torch.distributed.all_to_all_single
    gather: Callable[..., object] = torch.distributed.all_gather_into_tensor

    def counting(output: torch.Tensor, given: torch.Tensor, *splits: list[int], **options: object) -> object:
        if options["group"] is group:
            rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
            own = splits[1][rank] if splits else given.numel() // ranks
            sent.append((given.numel() - own) * given.element_size())
            assert not splits or sum(splits[1]) == given.numel()
        return real(output, given, *splits, **options)

    def gathering(output: torch.Tensor, given: torch.Tensor, **options: object) -> object:
        if options["group"] is group:
            sent.append((output.numel() - given.numel()) * given.element_size())
        return gather(output, given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.distributed, "all_to_all_single", counting)
        patched.setattr(torch.distributed, "all_gather_into_tensor", gathering)
        yield sent


SETTINGS: tuple[tuple[str, ...], ...] = (
    ("engine.splitting=split",),
    ("engine.splitting=per_head",),
    ("optimizer.form=gram", "engine.mode=shared", "engine.exchange_dtype=bf16", "engine.c_max_mib=0.03"),
)


def test_a_step_sends_what_its_plan_says() -> None:
    where = ("gpus=4", "parallel.tp=2", "parallel.pp=1", *SMALL_GROUPS)
    made = {settings: resolve(*where, *settings) for settings in SETTINGS}
    plans = {settings: make_plan(config.setup, layout) for settings, (config, layout) in made.items()}

    def work(settings: tuple[str, ...], world: World) -> int:
        trainee = assemble(made[settings][0], world, plans[settings])
        fill_gradients(trainee, 0, noise)
        with counted(trainee.world.groups.tp) as sent:
            engine_of(trainee).step()
        return sum(sent)

    for settings, sent in on_ranks(made, work).items():
        config, layout = made[settings]
        assert len(plans[settings].groups) > layout.dp or config.engine.mode == "shared"
        assert sent == exchange_sent(config.setup, plans[settings]), settings
        assert min(sent) > 0


def test_replicated_matrices_and_those_at_home_are_counted_too() -> None:
    """One micro-group of every kind of storage on three ranks, sent and received by the engine."""
    tp = 3
    cut = Matrix(
        index=0, name="layers.0.cut", kind="other", layer=0, stage=0, rows=6, cols=9,
        shard_dim=0, parameter="cut", unit=0,
    )  # fmt: skip
    members = [
        cut,
        replace(cut, index=1, name="layers.0.columns", shard_dim=1, parameter="columns", rows=5),
        replace(cut, index=2, name="layers.0.replicated", shard_dim=None, parameter="replicated", rows=7),
        replace(cut, index=3, name="layers.0.home", shard_dim=None, home=2, parameter="home", rows=4),
    ]
    hosts = [1, 0, 1, 0]
    widths = {torch.float32: 4, torch.bfloat16: 2}

    def whole(matrix: Matrix) -> torch.Tensor:
        return torch.arange(matrix.elements, dtype=torch.float32).view(matrix.rows, matrix.cols)

    def rank() -> tuple[list[int], list[bool]]:
        torch.distributed.init_process_group("gloo")
        own = torch.distributed.get_rank()
        parameters: dict[str, torch.nn.Parameter] = {}
        empty = Fragments(sizes.model("tiny"), tp, own, {})
        for matrix in members:
            if own in matrix.holders(tp):
                # Weights start at zero; gradients are the numbers of `whole`.
                gradient = empty.view_in_whole(matrix, whole(matrix), own).clone()
                parameter = torch.nn.Parameter(torch.zeros_like(gradient, dtype=torch.bfloat16))
                parameter.main_grad = gradient  # type: ignore[attr-defined]
                parameters[matrix.parameter] = parameter
        hosted = tuple(m for m, host in zip(members, hosts, strict=True) if host == own)
        wiring = Wiring(
            fragments=Fragments(sizes.model("tiny"), tp, own, parameters),
            rank=own,
            tp_group=torch.distributed.group.WORLD,
            timer=PhaseTimer(CPU),
            watcher=watcher_for(CPU),
            side_stream=SideStream(CPU),
            device=CPU,
            masters={m.index: torch.nn.Parameter(torch.zeros(m.rows, m.cols)) for m in hosted},
            make_optimizer=lambda _, masters: torch.optim.SGD(masters, lr=1.0),
        )
        out, back = to_hosts(members, hosts, rank=own, tp=tp), from_hosts(members, hosts, rank=own, tp=tp)
        group = HostedGroup(
            wiring,
            hosted,
            AllToAll(out, Messages([out], torch.float32, CPU), 0, wiring),
            AllToAll(back, Messages([back], torch.bfloat16, CPU), 0, wiring),
            torch.empty(sum(m.elements for m in hosted)),
            torch.ones(len(hosted)),
        )
        with counted(wiring.tp_group) as sent:
            group.send_gradients()
            group.receive_gradients(1.0)
            group.step()
            group.send_weights()
            group.receive_weights()
        # A step of SGD from zero: every rank has its part of minus the gradient.
        wanted = {m.parameter: empty.view_in_whole(m, -whole(m), own) for m in members if m.parameter in parameters}
        return sent, [torch.equal(parameters[name].float(), part) for name, part in wanted.items()]

    moved = group_traffic(members, hosts, tp)
    found = run_ranks(tp, rank)
    gradient, weight = widths[torch.float32], widths[torch.bfloat16]
    assert [sent for sent, _ in found] == [
        [out * gradient, back * weight] for out, back in zip(moved.gradients.sent, moved.weights.sent, strict=True)
    ]
    assert all(all(right) for _, right in found)
