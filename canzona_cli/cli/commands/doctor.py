"""`canzona doctor`: reports which runs are possible on this machine, and how to fix problems."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import AsJson, show


def doctor(
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show every package and the meaning of every finding.")
    ] = False,
    json: AsJson = False,
    gpu_check: Annotated[
        Path | None,
        Option(
            metavar="FILE.json",
            help="Instead, test the GPUs here for ten minutes, compare measured with simulated times, and write FILE.",
        ),
    ] = None,
) -> None:
    """Check versions, GPUs, NCCL and gloo, memory, disks, ports and Slurm.

    The exit code is 3 if no run is possible here.
    """
    if gpu_check is not None:
        from canzona_cli.config.recipes import installed_file

        script = installed_file("scripts", "gpu_check.py")
        command = [sys.executable, "-W", "ignore", str(script), "--out", str(gpu_check)]
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    from rich.console import Console

    from canzona_cli.launch.doctor import diagnose

    # The status goes to standard error, so that it does not mix with --json, and disappears at the end.
    with Console(stderr=True).status("checking this machine (a few seconds) ..."):
        diagnosis = diagnose()
    if json:
        show(diagnosis.as_json())
    else:
        from canzona_cli.cli.views.machines import DiagnosisView

        show(DiagnosisView(diagnosis=diagnosis, verbose=verbose))
    raise typer.Exit(int(diagnosis.exit_code))
