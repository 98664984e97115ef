"""Counting GPUs: what the driver says, and what CUDA_VISIBLE_DEVICES leaves of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from canzona_cli.cluster.detect import GpuInfo, installed_gpus, parse_nvidia_smi, read_proc, select

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


def test_nvidia_smi_output() -> None:
    output = "GPU-1, NVIDIA H100 80GB HBM3, 81559\nGPU-2, NVIDIA GB10, [N/A]\n\n"
    assert parse_nvidia_smi(output) == (
        GpuInfo(uuid="GPU-1", name="NVIDIA H100 80GB HBM3", memory_bytes=81559 << 20),
        GpuInfo(uuid="GPU-2", name="NVIDIA GB10", memory_bytes=0),
    )


def test_proc_files(tmp_path: Path) -> None:
    for address, uuid in (("0000:0f:00.0", "GPU-2"), ("0000:01:00.0", "GPU-1")):
        folder = tmp_path / address
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t NVIDIA L4\nIRQ:   \t\t 31\nGPU UUID: \t {uuid}\n")
    assert [gpu.uuid for gpu in read_proc(tmp_path)] == ["GPU-1", "GPU-2"]
    assert read_proc(tmp_path)[0].name == "NVIDIA L4"


def test_this_machine_agrees_with_its_driver() -> None:
    """Where there is a driver the probes agree with it; where there is none nothing is found and nothing is raised."""
    expected = len(list(Path("/proc/driver/nvidia/gpus").glob("*/information")))
    assert len(installed_gpus()) == expected


def test_counting_does_not_import_torch() -> None:
    code = "import sys, canzona_cli.cluster.detect as detect; detect.visible_gpus(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
