"""The needs of ranks on GPUs besides GPUs, on a machine whose driver and network interfaces are stand-ins."""

import ctypes
import importlib.util
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from canzona_cli.config.compose import compose_run
from canzona_cli.config.profiles import profile_warnings
from canzona_cli.config.resolve import resolve
from canzona_cli.core.costs import gpus, machine
from canzona_cli.core.costs.gpus import GpuInfo
from canzona_cli.core.costs.machine import (
    backend_problem,
    driver_cuda,
    driver_problem,
    fused_layers_problem,
    installed_version,
    interface_problem,
    matching_interfaces,
    missing_torch_features,
    torch_cuda,
)
from canzona_cli.core.errors import EnvironmentProblem, Problem
from canzona_cli.launch import doctor, preflight
from tests.faults.support import LAYOUT, run_config

Driver = Callable[[int], None]
"""Makes the machine one whose driver runs this release of CUDA, as it says it: 13020."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    def install(release: int) -> None:
        def version(place: object) -> int:
            place._obj.value = release  # type: ignore[attr-defined]
            return 0

        monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDriverGetVersion=version))

    return install


def test_the_installed_torch_says_what_it_is_built_for() -> None:
    told = torch_cuda()
    assert told is not None
    assert torch.version.cuda == (f"{told[0]}.{told[1]}" if told > (0, 0) else None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cuda: Optional[str] = '12.8'\n", (12, 8)),
        ("cuda = '13.0'\nhip = None\n", (13, 0)),
        ("cuda: Optional[str] = None\n", (0, 0)),
        ("debug = False\n", None),
    ],
)
def test_a_build_is_read_from_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: tuple[int, int] | None
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert torch_cuda() == told


@pytest.mark.parametrize(
    ("release", "built", "words"),
    [
        (12080, (13, 2), ("CUDA 12.8", "too old", "CUDA 13.2", "580 or later")),
        (11040, (12, 1), ("CUDA 11.4", "525 or later")),
        (13000, (13, 2), None),  # minor releases run on the driver of the first
        (13020, (12, 6), None),
        (13020, (0, 0), ("without CUDA",)),
        (13020, None, None),
    ],
)
def test_a_driver_must_run_the_major_release_that_torch_is_built_for(
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
    release: int,
    built: tuple[int, int] | None,
    words: tuple[str, ...] | None,
) -> None:
    driver(release)
    monkeypatch.setattr(machine, "torch_cuda", lambda: built)
    problem = driver_problem()
    assert (problem is None) == (words is None)
    if problem is not None and words is not None:
        assert all(word in f"{problem.value} {problem.reason} {problem.fix}" for word in words)
        assert "pytorch.org" in problem.fix


def test_without_a_driver_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert driver_cuda() is None
    assert driver_problem() is None


@pytest.mark.parametrize(
    ("chosen", "taken"),
    [
        ("eth", {"eth0", "eth1"}),
        ("=eth", set()),
        ("=eth1", {"eth1"}),
        ("ib0,eth1", {"ib0", "eth1"}),
        ("eth0:3,nothing", {"eth0"}),
        ("^lo,docker", {"eth0", "eth1", "ib0"}),
        ("^=eth0", {"eth1", "ib0", "lo", "docker0"}),
        ("^e,i,l,d", set()),
    ],
)
def test_interfaces_are_chosen_as_nccl_chooses_them(chosen: str, taken: set[str]) -> None:
    assert matching_interfaces(chosen, {"lo", "eth0", "eth1", "ib0", "docker0"}) == taken


def test_a_list_that_leaves_no_interface_is_named_with_those_there_are() -> None:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    problem = interface_problem("no-such-interface", alone=True)
    assert problem is not None
    assert problem.value == "no-such-interface"
    assert any(name in problem.fix for name in up)
    assert interface_problem("lo", alone=True) is None
    leading_nowhere = interface_problem("lo", alone=False)
    assert leading_nowhere is not None
    assert "other machines" in leading_nowhere.reason
    assert interface_problem(None, alone=False) is None


def test_a_backend_that_may_not_wait_for_reductions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for torch_here, refused in (("2.14.1", True), ("2.15.0+cu130", False)):
        monkeypatch.setattr(machine, "installed_version", lambda package, found=torch_here: found)
        assert (backend_problem("1") is not None) is refused
        assert backend_problem("0") is None is backend_problem(None)


def test_the_doctor_knows_what_an_older_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the version, and imports nothing."""
    monkeypatch.setattr(machine, "installed_version", lambda package: "2.11.0+cu130")
    assert ["nccl2" in text for text in missing_torch_features()] == [True]
    monkeypatch.setattr(machine, "installed_version", lambda package: "2.15.0")
    assert missing_torch_features() == []


@pytest.mark.parametrize(
    ("installed", "named"),
    [(None, "not installed"), ("2.8.0", ">=2.9"), ("2.9.0+cu13", None), ("2.20.2", None), ("2.21.0", "<2.21")],
)
def test_a_transformer_engine_is_one_that_megatron_was_written_for(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, named: str | None
) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    [asked] = map(Requirement, project["optional-dependencies"]["te"])
    monkeypatch.setattr(machine, "requirement", lambda package: asked)
    monkeypatch.setattr(machine, "installed_version", lambda package: installed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed and object())
    problem = fused_layers_problem()
    assert (problem is None) is (named is None)
    if problem is not None and named is not None:
        assert named in problem.reason
        assert "cluster.transformer_engine=false" in problem.fix
        # As NVIDIA says to install it: its extension is source that an isolated build finds no torch for.
        assert "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]>=2.9,<2.21'" in problem.fix


def test_layers_come_from_what_a_machine_with_gpus_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a plan for GPUs assumes Transformer Engine; what is typed stays, and is refused where it is missing."""
    for count, installed, fused in ((0, False, True), (8, False, False), (8, True, True)):
        monkeypatch.setattr(gpus, "visible_gpus", lambda count=count: count)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, installed=installed: installed or None)
        planned = ["recipe=0.6b", "gpus=8", "parallel.tp=2"]
        composed = compose_run(planned)
        config, layout = resolve(composed.config)
        assert config.cluster.transformer_engine is fused
        assert layout.sequence_parallel is fused
        [*warnings] = profile_warnings(composed.config.cluster, training=False)
        assert [text.startswith("Transformer Engine is not installed") for text in warnings] == [True] * (not fused)
        assert all("--no-build-isolation" in text for text in warnings)
        typed, _ = resolve(compose_run([*planned, "cluster.transformer_engine=true"]).config)
        assert typed.cluster.transformer_engine is True
    on_cpu, _ = resolve(compose_run(["recipe=qwen3-tiny", "gpus=2"]).config)
    assert on_cpu.cluster.transformer_engine is False


def test_a_run_is_refused_with_all_that_is_missing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(12080)
    monkeypatch.setattr(machine, "torch_cuda", lambda: (13, 2))
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 8)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no-such-interface")
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "1")
    versions = {"torch": "2.14.1"}
    monkeypatch.setattr(machine, "installed_version", lambda name: versions.get(name) or installed_version(name))
    config = run_config(gpus=2)
    cuda = replace(config, cluster=replace(config.cluster, device="cuda", transformer_engine=True))
    with pytest.raises(EnvironmentProblem) as raised:
        preflight.check_machine(cuda, LAYOUT)
    assert raised.value.exit_code == 3
    keys = [problem.key for problem in raised.value.problems]
    if importlib.util.find_spec("transformer_engine") is None:
        assert keys.pop() == "cluster.transformer_engine"
        assert "cluster.transformer_engine=false" in raised.value.problems[-1].fix
    assert keys == ["NVIDIA driver", "NCCL_SOCKET_IFNAME", "TORCH_DIST_USE_NCCL2"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2")
    driver(13000)
    preflight.check_machine(replace(cuda, cluster=replace(cuda.cluster, transformer_engine=False)), LAYOUT)


def test_the_doctor_says_the_same(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    visible = (GpuInfo(name="H100", memory_bytes=80 << 30, driver="570.86.15"),)
    monkeypatch.setattr(machine, "torch_cuda", lambda: (13, 2))
    monkeypatch.setattr(machine, "installed_version", lambda package: None)
    monkeypatch.setattr(machine, "fused_layers_problem", lambda: Problem(key="", reason="", fix="without"))
    for release, status in ((12080, "warn"), (13000, "ok")):
        driver(release)
        found = {finding.name: finding for finding in doctor.gpus(True, visible, 1)}
        assert (found["driver"].status, found["driver"].value) == (status, "570.86.15")
        assert ("580 or later" in found["driver"].fix) == (status == "warn")
        assert (found["Transformer Engine"].status, found["Transformer Engine"].fix) == ("warn", "without")


@pytest.mark.parametrize(("ep", "told"), [(1, False), (2, True)])
def test_deepep_is_needed_where_it_sends_tokens(ep: int, told: bool) -> None:
    config = compose_run(["recipe=qwen3-30b-a3b", "gpus=2", "parallel.dispatcher=flex", f"parallel.ep={ep}"]).config
    problems = preflight.machine_problems(config, replace(LAYOUT, ep=ep))
    assert ("parallel.dispatcher" in [problem.key for problem in problems]) is told
