"""`canzona doctor` examines this very machine: real torch, real gloo ranks, real broken installations."""

import json
import socket
import subprocess
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from canzona_cli.cli.views.machines import DiagnosisView
from canzona_cli.core.costs import machine
from canzona_cli.core.costs.gpus import GpuInfo
from canzona_cli.core.costs.machine import admits
from canzona_cli.launch import doctor as checks
from canzona_cli.launch.doctor import Diagnosis, Finding, package, packages
from tests.cli.commands.support import canzona_process
from tests.cli.views.terminal import printed
from tests.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[3]
STATUSES = {"ok", "info", "warn", "fail"}


def doctor(variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return canzona_process("doctor", "--json", environment={"COLUMNS": "80", **variables})


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {f"{f['group']}/{f['name']}": f for f in json.loads(done.stdout)["findings"]}


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    in_the_way = tmp_path_factory.mktemp("cache") / "file"
    in_the_way.write_text("")
    odd = {"RANK": "3", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "nosuch0"}
    return doctor(odd | {"CANZONA_CACHE": str(in_the_way / "cache")})


def test_json_has_the_stable_schema_says_that_cpu_runs_are_possible_and_names_what_is_odd_here(
    examined: subprocess.CompletedProcess[str],
) -> None:
    done = examined
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"version", "ok", "exit_code", "can", "gpus", "findings"}
    assert report["version"] == 1
    assert report["can"]["cpu"] is True
    found = findings(done)
    assert len(found) == len(report["findings"]), "each has a name of its own"
    for finding in found.values():
        assert set(finding) == {"group", "name", "status", "value", "meaning", "fix"}
        assert finding["status"] in STATUSES
        assert finding["value"]
        assert finding["meaning"]
        assert finding["fix"] or finding["status"] in {"ok", "info"}, f"no fix for {finding}"
    for name in (
        *("python/Python", "python/torch", "python/megatron-core", "torch/build", "torch/gloo", "torch/NCCL"),
        *("gpu/GPUs", "machine/memory", "machine/CPU cores", "storage/runs", "storage/cache", "network/loopback"),
        *("network/host name", "slurm/Slurm", "environment/NCCL_DEBUG"),
    ):
        assert name in found
    assert found["torch/gloo"]["status"] == "ok"
    assert found["environment/left over"]["fix"] == "unset RANK"
    assert found["environment/NCCL_SOCKET_IFNAME"]["status"] == "warn"
    assert found["storage/cache"]["status"] == "warn"
    assert "CANZONA_CACHE=" in found["storage/cache"]["fix"]


def test_text_fits_the_terminal_and_ends_with_a_verdict(examined: subprocess.CompletedProcess[str]) -> None:
    """The findings are the same; the command's own printing is covered by the test of ranks that cannot meet."""
    report = json.loads(examined.stdout)
    found = tuple(Finding(**finding) for finding in report["findings"])
    texts = []
    sound = tuple(finding for finding in found if not finding.fix)
    for shown, verbose in ((found, False), (found, True), (sound, False)):
        diagnosis = Diagnosis(findings=shown, gpus=report["gpus"], slurm=report["can"]["slurm"], torch_checked=True)
        texts.append(printed(DiagnosisView(diagnosis=diagnosis, verbose=verbose)))
        assert max(map(len, texts[-1].splitlines())) <= 80
        assert "runs are possible here" in texts[-1]
        assert "\x1b" not in texts[-1]
        for finding in shown:
            assert not finding.fix or finding.fix.split()[0] in texts[-1], "whatever needs a fix has it on both"
    assert len(texts[2].splitlines()) <= 25
    assert "omegaconf" in texts[1]
    assert "omegaconf" not in texts[0], "packages that fit are a line together"


def test_a_torch_that_cannot_be_imported_is_exit_code_3_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libfancy.so.9: no such file')\n")
    done = doctor({"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3, done.stdout + done.stderr
    finding = findings(done)["torch/import"]
    assert finding["status"] == "fail"
    assert "libfancy.so.9: no such file" in finding["value"]
    assert finding["fix"]


@pytest.fixture
def slow_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose import outlasts the check's patience."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checks, "_PROBE_TIMEOUT_S", 0.2)


@pytest.mark.usefixtures("slow_torch")
@pytest.mark.parametrize("visible", [(), (GpuInfo(name="NVIDIA H200", memory_bytes=0),)])
def test_a_slow_torch_is_not_called_broken(visible: tuple[GpuInfo, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the verdict claim what was not seen, on CPU or GPU."""
    monkeypatch.setattr(checks, "gpu_inventory", lambda: visible)
    monkeypatch.setattr(checks, "installed_gpus", lambda: visible)
    diagnosis = checks.diagnose()
    (finding,) = (each for each in diagnosis.findings if each.group == "torch")
    assert finding.status == "warn"
    assert "took longer than" in finding.value
    assert "reinstall" not in finding.fix
    assert (diagnosis.exit_code, diagnosis.gpus) == (0, 0)
    assert diagnosis.as_json()["can"] == {"cpu": False, "cuda": False, "slurm": diagnosis.slurm}
    (gpus,) = (each for each in diagnosis.findings if each.name == "GPUs")
    assert "cannot" not in gpus.meaning
    assert "install" not in gpus.fix
    shown = " ".join(printed(DiagnosisView(diagnosis=diagnosis)).split())
    assert "torch took too long to say whether runs are possible here" in shown
    assert "runs are possible here;" not in shown.replace("whether runs are possible here", "")


def test_a_resolver_without_an_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver answers when the check has ended."""
    ended, known = threading.Event(), socket.getaddrinfo("127.0.0.1", None)
    monkeypatch.setattr(machine, "loopback_problem", lambda ranks: None)
    monkeypatch.setattr(checks, "_RESOLVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments: ended.wait(PATIENCE_S) and known)
    try:
        found = {finding.name: finding for finding in checks.network()}
    finally:
        ended.set()
    assert found["host name"].status == "warn"
    assert "does not resolve" in found["host name"].value


def test_every_requirement_is_checked_and_pyproject_has_it() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {Requirement(text).name: Requirement(text) for text in project["dependencies"]}
    checked = {finding.name: finding for finding in packages()}
    assert checked["Python"].status == "ok"
    # A checkout may be newer than what was installed from it.
    assert set(declared) - set(checked) <= {"jinja2"}
    assert "(>=0.19.2,<0.20)" in checked["megatron-core"].meaning
    assert all(finding.status == "info" for name, finding in checked.items() if name not in {*declared, "Python"})


def test_a_missing_package_is_named_with_the_way_to_install_it() -> None:
    finding = package(Requirement("no-such-package>=1.2,<2"))
    assert (finding.status, finding.value) == ("fail", "not installed")
    assert "pip install 'no-such-package>=1.2,<2'" in finding.fix


@pytest.mark.parametrize(
    ("version", "admitted"),
    [
        *(("0.19.2", True), ("0.19.10", True), ("0.19.2+local", True), ("0.19.3rc1", True), ("0.19.2a0+cu130", True)),
        *(("0.19.1", False), ("0.20.0", False), ("0.20", False), ("0.20.0rc1", False), ("1.0", False)),
    ],
)
def test_a_requirement_admits_its_range(version: str, admitted: bool) -> None:
    assert admits(Requirement("megatron-core>=0.19.2,<0.20"), version) is admitted
