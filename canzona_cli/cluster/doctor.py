"""Everything `canzona doctor` looks at, in one pass of a few seconds."""

import os
from pathlib import Path

from canzona_cli.cluster import check_machine, check_software
from canzona_cli.cluster.findings import Diagnosis, Finding
from canzona_cli.cluster.machine import gpu_inventory, installed_gpus


def diagnose(*, run_root: Path = Path("runs")) -> Diagnosis:
    """Look at this machine as a run would find it; changes nothing on it.

    Args:
        run_root: where run directories would go.
    """
    probe = check_software.TorchProbe()
    try:
        software = list(check_software.python())
        visible, installed = gpu_inventory(), len(installed_gpus())
        machine = [*check_machine.machine(), *check_machine.limits(gpus=len(visible))]
        cache = Path(os.environ.get("CANZONA_CACHE") or "~/.cache/canzona").expanduser()
        storage = list(check_machine.storage(run_root=run_root, cache=cache, gpus=len(visible)))
        network = list(check_machine.network())
        slurm = list(check_software.slurm())
        environment = list(check_machine.environment())
        found = probe.result()
    finally:
        probe.close()
    findings: list[Finding] = [
        *software,
        *check_software.torch_backends(found),
        *check_software.gpus(found, visible, installed),
        *machine,
        *storage,
        *network,
        *slurm,
        *environment,
    ]
    usable = not isinstance(found, str) and found.get("cuda_available") is True
    return Diagnosis(
        findings=tuple(findings),
        gpus=len(visible) if usable else 0,
        slurm=any(finding.name == "Slurm" and finding.status == "ok" for finding in slurm),
    )
