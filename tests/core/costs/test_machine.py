"""The description of this machine, the GPUs that CUDA shows, and whether a profile was measured here."""

from dataclasses import replace
from pathlib import Path

import pytest

from canzona_cli.config.profiles import profile_warnings
from canzona_cli.core.costs.gpus import GpuInfo, installed_gpus, read_proc, read_smi, select
from canzona_cli.core.costs.machine import machine_facts, profile_mismatches
from canzona_cli.core.host import cores
from canzona_cli.core.setup import ClusterConfig
from tests.sizes import CPU, H100


def here(**changed: str | int) -> ClusterConfig:
    return replace(CPU, measured_on={**machine_facts("cpu"), "base": "cpu", **changed})


def test_a_profile_of_this_machine_and_one_by_hand_are_silent() -> None:
    assert profile_mismatches(here()) == profile_mismatches(CPU) == ()


def test_how_torch_was_built_makes_no_other_machine() -> None:
    assert profile_mismatches(here(torch=f"{machine_facts('cpu')['torch']}".partition("+")[0] + "+other")) == ()


def test_each_difference_is_named() -> None:
    [said] = profile_mismatches(here(processor="Abacus", cores=99, torch="0.1"))
    for part in ("processor Abacus there", f"cores 99 there, {cores()} here", "torch 0.1 there", "canzona calibrate"):
        assert part in said


def test_a_gpus_profile_is_about_the_gpu() -> None:
    gpu = replace(H100, measured_on={"gpu": "NVIDIA Abacus", "processor": "Abacus", "cores": 99})
    [said] = profile_mismatches(gpu)
    assert "gpu NVIDIA Abacus there" in said
    assert "processor" not in said


def test_a_calibration_that_was_cut_off_says_what_it_lacks() -> None:
    [said] = profile_warnings(
        replace(here(), measured_on={**here().measured_on, "not_measured": "model updates"}), training=False
    )
    assert "model, updates come from profile cpu" in said
    assert not profile_warnings(here(), training=False)


UUIDS = ("GPU-aaaa1111-0000", "GPU-aaaa2222-0000", "GPU-bbbb3333-0000", "GPU-cccc4444-0000")
GPUS = tuple(GpuInfo(name="H100", memory_bytes=80 << 30, uuid=uuid) for uuid in UUIDS)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("-1", ()),
        ("0", (0,)),
        ("2,0", (2, 0)),
        (" 1 , 3 ", (1, 3)),
        ("0,9,1", (0,)),
        ("0,-1,1", (0,)),
        ("NoDevFiles", ()),
        ("0,0", ()),
        ("GPU-bbbb3333-0000,0", (2, 0)),
        ("GPU-b", (2,)),
        ("GPU-aaaa", ()),
        ("GPU-dddd", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, expected: tuple[int, ...]) -> None:
    assert select(GPUS, visible) == tuple(GPUS[index] for index in expected)


def test_mig_devices_count_one_each_and_belong_to_their_gpu() -> None:
    named = select(GPUS, f"MIG-{UUIDS[1]}/1/0,MIG-{UUIDS[1]}/2/0")
    assert named == (GPUS[1], GPUS[1])
    assert len(select(GPUS, "MIG-1f2e3d4c,MIG-5b6a7988")) == 2
    assert select((), "MIG-1f2e3d4c") == ()


def test_proc_files(tmp_path: Path) -> None:
    for address, uuid in (("0000:0f:00.0", "GPU-2"), ("0000:01:00.0", "GPU-1")):
        folder = tmp_path / address
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t NVIDIA L4\nIRQ:   \t\t 31\nGPU UUID: \t {uuid}\n")
    assert [gpu.uuid for gpu in read_proc(tmp_path)] == ["GPU-1", "GPU-2"]
    assert read_proc(tmp_path)[0].name == "NVIDIA L4"


def test_the_listing_of_nvidia_smi() -> None:
    listing = "NVIDIA H100 80GB HBM3, 81559, GPU-1, 580.65.06, 9.0\nNVIDIA GB10, [N/A], GPU-2, 580.65.06, [N/A]\n"
    driver = "580.65.06"
    assert read_smi(listing) == (
        GpuInfo(
            name="NVIDIA H100 80GB HBM3", memory_bytes=81559 << 20, uuid="GPU-1", driver=driver, compute_capability=9.0
        ),
        GpuInfo(name="NVIDIA GB10", memory_bytes=0, uuid="GPU-2", driver=driver),
    )
    assert read_smi("No devices were found\n") == ()
    assert read_smi(None) is None, "then the kernel is asked"


def test_this_machine_agrees_with_its_driver() -> None:
    """The probes agree with the driver if there is one; without one they find nothing and raise nothing."""
    expected = len(list(Path("/proc/driver/nvidia/gpus").glob("*/information")))
    assert len(installed_gpus()) == expected
