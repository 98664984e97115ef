"""Seconds of forward and backward of the recipe's own model, shortened to a few layers."""

import time

import torch

from canzona_cli.calibrate.effort import Effort
from canzona_cli.calibrate.measurement import Measurement, Recorder
from canzona_cli.calibrate.team import LEAST, Team, wait
from canzona_cli.config.schema import RunConfig
from canzona_cli.megatron import model, optimizer
from canzona_cli.megatron.parallel import World

_BUDGET = 12
"""Of items: what the profile scales every forward and backward by deserves more than one product."""


def measure_model(team: Team, config: RunConfig, world: World, effort: Effort, recorder: Recorder) -> None:
    """One micro-batch of random tokens, gradients added to Megatron's buffers, nothing sent. Collective.

    Args:
        config: the shortened model's, AdamW its optimizer.
    """
    wrapped = optimizer.wrap_data_parallel(model.build_model(config, world), config, world)
    if not team.member:
        return
    shape = (world.layout.micro_batch_size, config.train.seq_length)
    tokens, labels = (torch.randint(config.model.vocab_size, shape, device=world.device) for _ in range(2))
    positions = torch.arange(config.train.seq_length, device=world.device).expand(shape)

    def step() -> tuple[float, float]:
        wait(world.device)
        begin = time.perf_counter()
        loss = wrapped(tokens, positions, None, labels=labels).float().mean()
        wait(world.device)
        between = time.perf_counter()
        loss.backward()
        wait(world.device)
        return between - begin, time.perf_counter() - between

    with wrapped.no_sync():
        step()
        team.meet()
        samples: list[tuple[float, float]] = []
        begin = time.perf_counter()
        while len(samples) < LEAST or time.perf_counter() - begin < _BUDGET * effort.item_s:
            samples.append(step())
    everybody = [sample for own in team.gather(samples) for sample in own]
    recorder.add(Measurement.of("forward", [forward for forward, _ in everybody]))
    recorder.add(Measurement.of("backward", [backward for _, backward in everybody]))
