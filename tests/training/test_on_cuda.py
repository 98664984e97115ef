"""What training asks of CUDA alone, on a stand-in for it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from canzona_cli.checkpoint.snapshot import random_states, set_random_states
from canzona_cli.megatron import cpu_backend, parallel
from canzona_cli.megatron.parallel import World
from canzona_cli.megatron.timers import PhaseTimer
from canzona_cli.run.files import RunFiles
from canzona_cli.training import probe
from canzona_cli.training.measure import StepProfiler, _peak_memory
from tests.cuda_stand_in import DEVICE, cuda_stand_in
from tests.dist.ranks import run_ranks
from tests.sizes import layout


def test_ranks_meet_over_nccl_on_the_device_of_their_place() -> None:
    """And no communicator is made before it is used: none is given a device in advance."""

    def rank() -> tuple[torch.device, list[object], list[tuple[str, list[str]]]]:
        chosen: list[object] = []
        met: list[tuple[str, list[str]]] = []
        meet = torch.distributed.init_process_group

        def over_gloo(backend: str, **options: object) -> None:
            met.append((backend, sorted(options)))
            meet("gloo")

        with pytest.MonkeyPatch.context() as patched:
            cpu_backend.install()
            patched.setattr("torch.cuda.set_device", chosen.append)
            patched.setattr("torch.distributed.init_process_group", over_gloo)
            world = parallel.initialize(layout(), "cuda", seed=1)
        return world.device, chosen, met

    [(device, chosen, met)] = run_ranks(1, rank)
    assert device == DEVICE
    assert chosen == [DEVICE]
    assert met == [("nccl", ["timeout"])]


def test_a_devices_random_state_is_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.tensor([7, 1], dtype=torch.uint8)
    found: list[torch.Tensor] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: state)
    monkeypatch.setattr("torch.cuda.set_rng_state", found.append)
    set_random_states(random_states())
    assert found == [state]


def test_the_doctor_hears_of_gpu_and_nccl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probe, "_meet", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 7))
    probe.main()
    found = json.loads(capsys.readouterr().out)
    assert (found["cuda_available"], found["nccl"]) == (True, "2.30.7")


def test_memory_is_the_devices_not_the_hosts() -> None:
    world = cast(World, SimpleNamespace(device=DEVICE))
    with cuda_stand_in():
        assert _peak_memory(world) == torch.cuda.max_memory_allocated(DEVICE)


def test_kernels_are_profiled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Profile:
        def __init__(self, activities: list[object]) -> None:
            asked.extend(activities)

        def start(self) -> None: ...

    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    world = cast(World, SimpleNamespace(device=DEVICE, rank=0, world_size=1))
    StepProfiler(RunFiles(tmp_path), world, PhaseTimer(torch.device("cpu")), (1, 1)).before(1)
    assert asked == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
