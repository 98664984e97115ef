"""Bytes that a step's all-to-alls really carry over gloo, against the plan's account of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.planner.make import make_plan
from canzona_cli.core.planner.measures import exchange_sent
from canzona_cli.training.assemble import assemble
from tests.dist.engine_support import SMALL_GROUPS, engine_of, resolve
from tests.dist.jobs import on_ranks
from tests.dist.synthetic import fill_gradients, noise


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
