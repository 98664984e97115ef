"""`canzona doctor`: reports which runs are possible on this machine, and how to fix problems."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from canzona_cli.cli.commands.output import AsJson, RecipesDirs, key_values, show, tell
from canzona_cli.core.errors import Problem, refuse


def doctor(
    overrides: Annotated[
        list[str] | None, key_values("With --links: the run, as for `canzona train` (recipe=qwen3-32b gpus=256 ...).")
    ] = None,
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
    links: Annotated[
        bool,
        Option(
            "--links",
            help="Instead, time all-reduces over all machines of a run, and compare them with its cluster profile. "
            "Start it on each machine, like the run.",
        ),
    ] = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Check versions, GPUs, NCCL and gloo, memory, disks, ports and Slurm.

    The exit code is 3 if no run is possible here, or if links are slow.
    """
    if overrides and not links:
        fix = "add --links; without it, `canzona doctor` checks this machine for any run"
        refuse([Problem(key=overrides[0], reason="the settings of a run are only for --links", fix=fix)])
    if links:
        _check_links(overrides or [], recipes_dir or [], as_json=json)
        return
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


def _check_links(overrides: list[str], recipes_dirs: list[Path], *, as_json: bool) -> None:
    """Checks the links of a run's machines. Machine 0 shows the result; all exit with the same code."""
    from rich.console import Console

    from canzona_cli.bench.links import check_links
    from canzona_cli.cli.views.calibrate import Progress
    from canzona_cli.cli.views.machines import LinksView
    from canzona_cli.config.compose import compose_run
    from canzona_cli.launch.slurm import current_step, fill_in_step

    composed = compose_run(overrides, recipes_dirs=recipes_dirs, training=False)
    config, _ = fill_in_step(composed.config, current_step())
    check = check_links(config, Progress(Console(stderr=True, highlight=False)), say=tell)
    if not config.cluster.node_rank:
        show(check.as_json() if as_json else LinksView(check=check))
    raise typer.Exit(int(check.exit_code))
