"""Training's use of CUDA, on a stand-in for it."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.utils.data import Dataset

from canzona_cli.checkpoint.huggingface import generating
from canzona_cli.checkpoint.snapshot import random_states, set_random_states
from canzona_cli.core.megatron import cpu_backend, parallel
from canzona_cli.core.megatron.parallel import World
from canzona_cli.core.megatron.timers import PhaseTimer
from canzona_cli.core.setup import Device
from canzona_cli.records.files import RunFiles
from canzona_cli.training import probe
from canzona_cli.training.data import Batch, BatchStream
from canzona_cli.training.measure import StepProfiler, _peak_memory
from tests.cuda_stand_in import DEVICE, cuda_stand_in
from tests.dist.ranks import run_ranks
from tests.sizes import layout


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's message to the others."""

    number: int


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
    assert met == [("nccl", ["rank", "timeout", "world_size"])]


def test_records_are_gathered_through_the_device_over_nccl() -> None:
    def rank() -> tuple[list[int], list[str]]:
        torch.distributed.init_process_group("gloo")
        with pytest.MonkeyPatch.context() as patched, cuda_stand_in() as record:
            patched.setattr("torch.distributed.get_backend", lambda group: "nccl")
            devices = []
            empty = torch.empty

            def noted(*sizes: int, **options: object) -> torch.Tensor:
                devices.append(str(options["device"]))
                return empty(*sizes, **options)  # type: ignore[call-overload,no-any-return]

            patched.setattr(torch, "empty", noted)
            found = parallel.gather(Place(number=torch.distributed.get_rank()), Place)
            assert record.races == []
        return [place.number for place in found], devices

    for numbers, devices in run_ranks(2, rank):
        assert numbers == [0, 1]
        assert devices == ["cuda", "cuda"], "sizes and contents"


@pytest.mark.parametrize(("requested", "device"), [(None, "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_text_is_generated_on_a_gpu(requested: Device | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert generating._device(requested) == torch.device(device)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")
def test_batches_of_loader_processes_are_those_of_a_cpu() -> None:
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    samples = cast(Dataset[Batch], [{key: torch.full((4,), float(n)) for key in keys} for n in range(6)])

    def loaded(device: torch.device) -> list[Batch]:
        world = SimpleNamespace(device=device, layout=layout(micro=2), dp_rank=0)
        return list(BatchStream(samples, cast(World, world), first_sample=2))

    on_cpu = loaded(torch.device("cpu"))
    with cuda_stand_in() as record:
        on_gpu = loaded(DEVICE)
    assert record.host_waits == []
    assert {"item at training/data.py:__init__"} >= set(record.host_reads), "the loader's seed, which is on the host"
    assert len(on_gpu) == len(on_cpu) == 2
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in ours)


def test_a_devices_random_state_is_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.tensor([7, 1], dtype=torch.uint8)
    found: list[torch.Tensor] = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: state)
    monkeypatch.setattr("torch.cuda.set_rng_state", found.append)
    set_random_states(random_states())
    assert found == [state]


def test_the_doctor_hears_of_gpu_and_nccl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probe, "_gloo_error", lambda: None)
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
    StepProfiler(RunFiles(tmp_path), world, PhaseTimer(torch.device("cpu")), (1, 1)).before_step(1)
    assert asked == [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
