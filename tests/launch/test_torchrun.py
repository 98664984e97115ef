"""The torchrun command and environment: what is asked for, nothing of the user's overwritten, safe to paste."""

import ast
import inspect
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.distributed.run import get_args_parser

from canzona_cli.config.schema import RunConfig
from canzona_cli.core.costs.gpus import GpuInfo
from canzona_cli.launch import torchrun
from canzona_cli.launch.torchrun import LaunchCommand, build, worker_environment
from tests.faults.support import run_config

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_SOCKET_IFNAME")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MEMORY = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *ALLOCATOR, *MEMORY, "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def option(command: LaunchCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_ranks_on_processors_keep_the_memory_of_one_step_for_the_next() -> None:
    """Pages that the kernel has to clear while memory is taken and given back, as by forward and backward passes."""
    script = (
        "import resource\n"
        "for turn in range(21):\n"
        "    if turn == 1: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    held = [bytearray(2 << 20) for _ in range(8)]; del held\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )

    def faults(environment: Mapping[str, str]) -> int:
        return int(subprocess.check_output([sys.executable, "-c", script], env={**os.environ, **environment}))

    pages = 20 * 8 * (2 << 20) // resource.getpagesize()
    assert faults(worker_environment(run_config())) < pages / 20
    assert faults({}) > pages / 2, "nor would it without"


def test_one_machine(tmp_path: Path) -> None:
    command = build(run_config(), tmp_path)
    assert command.argv[:3] == (sys.executable, "-m", "canzona_cli.training.agent")
    assert command.argv[-3:] == ("-m", "canzona_cli.training.worker", str(tmp_path))
    assert option(command, "--nproc-per-node") == "2"
    assert option(command, "--max-restarts") == "0"
    assert option(command, "--redirects") == "3"
    assert Path(option(command, "--log-dir")).is_relative_to(tmp_path / "logs")
    assert option(command, "--rdzv-endpoint").startswith("127.0.0.1:")
    assert command.environment["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_several_machines_pass_their_settings_through(tmp_path: Path) -> None:
    config = run_config(gpus=16, nodes=2)
    cluster = replace(config.cluster, node_rank=1, rdzv_endpoint="head:29500")
    command = build(replace(config, cluster=cluster), tmp_path)
    names = ("--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-endpoint", "--rdzv-id")
    assert [option(command, name) for name in names] == ["2", "8", "1", "head:29500", tmp_path.name]
    assert option(command, "--rdzv-backend") == "static"
    interface = command.environment.get("GLOO_SOCKET_IFNAME", "")
    assert not interface.startswith("lo"), "machines must not look for each other on loopback"
    unset = build(run_config(gpus=16, nodes=2), tmp_path)
    assert option(unset, "--node-rank") == torchrun.NODE_RANK_PLACEHOLDER
    assert option(unset, "--rdzv-endpoint") == torchrun.ENDPOINT_PLACEHOLDER
    assert option(unset, "--log-dir").endswith(f"node-{torchrun.NODE_RANK_PLACEHOLDER}")


def on_cuda(**cluster: object) -> RunConfig:
    config = run_config(gpus=4, nodes=2) if cluster else run_config()
    return replace(config, cluster=replace(config.cluster, device="cuda", **cluster))  # type: ignore[arg-type]


def test_several_launchers_that_meet_on_loopback_stay_there_and_others_keep_off_it(tmp_path: Path) -> None:
    for host, endpoint in (("127.0.0.1",) * 2, ("localhost",) * 2, ("[::1]", "127.0.0.1")):
        command = build(on_cuda(node_rank=1, rdzv_endpoint=f"{host}:29500"), tmp_path)
        assert option(command, "--rdzv-backend") == torchrun.LOOPBACK_BACKEND
        assert option(command, "--rdzv-conf") == "rank=1"
        assert option(command, "--rdzv-endpoint") == f"{endpoint}:29500"
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        assert [command.environment[name][:2] for name in names] == ["lo", "lo"]
    command = build(on_cuda(node_rank=0, rdzv_endpoint="no-such-host.invalid:29500"), tmp_path)
    assert command.environment["NCCL_SOCKET_IFNAME"].startswith("^lo,docker,")


def test_the_printed_command_is_the_command_also_with_awkward_paths(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run's $(dir)"
    command = build(run_config(), run_dir)
    shown = command.shell()
    assert shlex.split(shown.replace("\\\n", ""))[-len(command.argv) :] == list(command.argv)
    # and a shell agrees: let it run a program that prints what it was given
    echo = LaunchCommand(
        argv=(sys.executable, "-c", "import os, sys; print(sys.argv[1:], os.environ['A'])", *command.argv[3:]),
        environment={"A": "b c"},
    )
    said = subprocess.run(["sh", "-c", echo.shell()], capture_output=True, text=True, check=True).stdout
    assert said == f"{list(command.argv[3:])} b c\n"


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "cores", lambda: 12)
    threads = {ranks: worker_environment(run_config(gpus=ranks))["OMP_NUM_THREADS"] for ranks in (1, 2, 5, 24)}
    assert threads == {1: "12", 2: "6", 5: "2", 24: "1"}


@pytest.mark.parametrize("capability", [None, 8.0, 9.0, 10.0, 12.1])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_gpus_have_the_hardware_queues_that_megatron_requires(
    capability: float | None, tp: int, cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron checks the layout and the GPU, and refuses other numbers of queues."""
    arguments = pytest.importorskip("megatron.training.arguments")
    seen = () if capability is None else (GpuInfo(name="", memory_bytes=0, compute_capability=capability),)
    monkeypatch.setattr(torchrun, "gpu_inventory", lambda: seen)
    config = on_cuda()
    found = worker_environment(replace(config, parallel=replace(config.parallel, tp=tp, cp=cp)))
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: int(capability or 9))
    needs_one = _megatron_refuses(arguments, tp, cp, "32", monkeypatch)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"] == ("1" if needs_one else "32")
    assert needs_one == ((capability or 9) < 10 and (tp, cp) != (1, 1))
    assert not _megatron_refuses(arguments, tp, cp, found["CUDA_DEVICE_MAX_CONNECTIONS"], monkeypatch)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert worker_environment(config)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "the user's own"


def _megatron_refuses(arguments: ModuleType, tp: int, cp: int, queues: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether the check of Megatron that names the variable refuses a number of queues: that statement of
    `validate_args` is run alone."""
    tree = ast.parse(inspect.getsource(arguments.validate_args))
    [check] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and "context_parallel_size > 1" in ast.unparse(node.test)
        and "get_device_arch_version() < 10" in ast.unparse(node.test)
    ]
    given = SimpleNamespace(
        tensor_model_parallel_size=tp, context_parallel_size=cp, rank=0,
        use_torch_fsdp2=False, use_megatron_fsdp=False, overlap_moe_expert_parallel_comm=False,
    )  # fmt: skip
    with monkeypatch.context() as environment:
        environment.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
        try:
            exec(compile(ast.Module([check], []), "validate_args", "exec"), {**vars(arguments), "args": given})
        except AssertionError:
            return True
    return False


def test_a_gpu_run_has_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = run_config(), on_cuda()
    found = worker_environment(cuda)
    assert found["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    wanted = found["PYTORCH_ALLOC_CONF"]
    assert "expandable_segments:True" in wanted
    torch._C._accelerator_setAllocatorSettings(wanted)  # refuses what this torch does not know
    # torch 2.11 and 2.12 have no such word in their list, and end with "Unrecognized key".
    for release, known in (("2.12.1+cu130", False), ("2.13.0+cu130", True)):
        monkeypatch.setattr(torchrun, "installed_version", lambda package, found=release: found)
        assert ("pinned_max_round_threshold_mb:64" in worker_environment(cuda)["PYTORCH_ALLOC_CONF"]) is known
    assert not {"CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"} & worker_environment(config).keys()
    # torch reads the older name first, but would mix both.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_ALLOC_CONF" not in worker_environment(cuda)


@pytest.mark.parametrize(
    ("nodes", "allowed", "numactl", "bound"),
    [
        (({0, 1}, {2, 3}), {1, 2}, True, True),
        (({0, 1}, {2, 3}), {1, 2}, False, False),
        # torchrun would start no rank of the second node's GPUs.
        (({0, 1}, {2, 3}), {0, 1}, True, False),
        # A node of memory alone, a GPU's own for example, binds nobody.
        (({0, 1}, set()), {0, 1}, True, False),
        (({0, 1},), {0, 1}, True, False),
    ],
)
def test_ranks_are_bound_beside_their_gpus_where_that_cannot_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: tuple[set[int], ...],
    allowed: set[int],
    numactl: bool,
    bound: bool,
) -> None:
    for number, cpus in enumerate(nodes):
        (tmp_path / f"node{number}").mkdir()
        for name in (*(f"cpu{cpu}" for cpu in cpus), "cpulist", "cpumap"):
            (tmp_path / f"node{number}" / name).touch()
    monkeypatch.setattr(torchrun, "_NUMA_NODES", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if numactl else None)
    config, cuda = run_config(), on_cuda()
    command = build(cuda, tmp_path)
    assert command.argv[1:3] == ("-m", "torch.distributed.run"), "CUDA does not survive a fork"
    assert ("--numa-binding" in command.argv) == bound
    if bound:
        assert option(command, "--numa-binding") == "node"
        # torchrun itself understands it.
        parsed = get_args_parser().parse_args(list(command.argv[3:]))
        assert (parsed.numa_binding, parsed.training_script) == ("node", "canzona_cli.training.worker")
    assert "--numa-binding" not in build(config, tmp_path).argv


def test_the_users_variables_stay_but_cpu_ranks_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15's NCCL backend does not group collectives, as the older one does: it is off unless asked for."""
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    config, cuda = run_config(), on_cuda()
    assert worker_environment(cuda)["TORCH_DIST_USE_NCCL2"] == "0"
    assert "TORCH_DIST_USE_NCCL2" not in worker_environment(config)
    for name, value in {"TORCH_DIST_USE_NCCL2": "1", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert worker_environment(cuda)["TORCH_DIST_USE_NCCL2"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(cuda)
    assert worker_environment(config)["CUDA_VISIBLE_DEVICES"] == ""
    assert worker_environment(config)["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] == "3"
