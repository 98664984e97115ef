"""`canzona doctor`: what this machine can run, and how to fix what it cannot."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from canzona_cli.commands.output import AsJson, show


def doctor(
    json: AsJson = False,
    gpu_check: Annotated[
        Path | None,
        typer.Option(
            "--gpu-check",
            metavar="FILE.json",
            help="Instead, run a check of ten minutes on the GPUs here: what works, and measured beside simulated.",
        ),
    ] = None,
) -> None:
    """Check versions, GPUs, NCCL and gloo, memory, disks, ports, Slurm;
    exit code 3 when nothing can run here."""
    if gpu_check is not None:
        from canzona_cli.launch.slurm_job import shipped

        command = [sys.executable, "-W", "ignore", str(shipped("gpu_check.py")), "--out", str(gpu_check)]
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    from rich.console import Console

    from canzona_cli.cluster.doctor import diagnose

    # To standard error, so that --json stays clean; gone by the time the findings are printed.
    with Console(stderr=True).status("looking at this machine, a few seconds ..."):
        diagnosis = diagnose()
    if json:
        show(diagnosis.as_json())
    else:
        from canzona_cli.report.machines import DiagnosisView

        show(DiagnosisView(diagnosis=diagnosis))
    raise typer.Exit(int(diagnosis.exit_code))
