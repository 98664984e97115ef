"""`canzona doctor`: what this machine can run, and how to fix what it cannot."""

import typer

from canzona_cli.commands.output import AsJson, show


def doctor(
    json: AsJson = False,
) -> None:
    """Check versions, GPUs, NCCL and gloo, memory, disks, ports, Slurm;
    exit code 3 when nothing can run here."""
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
