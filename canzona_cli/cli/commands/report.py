"""`canzona report RUN_DIR`: shows the results of a run from the files in its directory, or compares runs."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from canzona_cli.cli.commands.output import AsJson, HtmlFile, page_problems, progress, show, write_page
from canzona_cli.core.errors import ConfigError, Problem, refuse
from canzona_cli.records.files import RunFiles


def report(
    run_dirs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN_DIR",
            help="The run directory that `canzona train` printed. "
            "[default: this directory if it is a run, else the newest run in ./runs]",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Compare runs; the directory of a sweep stands for its runs.")
    ] = False,
    html: HtmlFile = None,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show the time of each phase, and the load of the ranks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show status, loss, validation and step-time breakdown of a run.

    Works for failed and unfinished runs too.
    """
    _check_usage(run_dirs or [], compare=compare, html=html)
    run_dirs = run_dirs or _newest_run()
    if compare:
        _compare(run_dirs, html=html, verbose=verbose, as_json=as_json)
        return
    from canzona_cli.cli.views.run import RunView
    from canzona_cli.records.summary import load_summary

    summary = load_summary(run_dirs[0])
    if html is not None:
        from canzona_cli.cli.views.run_page import run_page

        write_page(html, run_page(summary))
    show(summary.as_json() if as_json else RunView(summary=summary, verbose=verbose))


def _compare(run_dirs: list[Path], *, html: Path | None, verbose: bool, as_json: bool) -> None:
    """Shows two runs in detail, or the ranking of three or more runs.

    Raises:
        ConfigError: there is only one run.
    """
    from canzona_cli.cli.views.compare import RunPairView
    from canzona_cli.cli.views.ranking import RankingView, comparison_page
    from canzona_cli.records.compare import compare_two, load_runs
    from canzona_cli.records.groups import rank

    comparison = load_runs(run_dirs)
    if len(comparison.runs) == 1:
        so_far = f" ({comparison.progress})" if comparison.not_begun else ""
        raise ConfigError(_usage_problem(run_dirs, f"there is one run, but --compare needs two or more{so_far}"))
    ranking = rank(comparison)
    for path in comparison.skipped:
        progress(f"note: {path} is skipped, because it contains no run")
    if html is not None:
        write_page(html, comparison_page(ranking))
    if len(comparison.runs) == 2 and not comparison.not_begun:
        pair = compare_two(comparison)
        show(pair.as_json() if as_json else RunPairView(compared=pair))
    else:
        show(ranking.as_json() if as_json else RankingView(ranking=ranking, verbose=verbose))


def _newest_run() -> list[Path]:
    """Returns a list with the working directory if it is a run directory, else with the newest run in ./runs.

    Raises:
        ConfigError: there is no run.
    """
    from canzona_cli.records.summary import newest_run

    newest = Path() if RunFiles(Path()).config.exists() else newest_run(Path("runs"))
    if newest is None:
        reason = "there is no run in ./runs"
        raise ConfigError(Problem(key="RUN_DIR", reason=reason, fix="canzona report RUN_DIR"))
    return [newest]


def _check_usage(run_dirs: list[Path], *, compare: bool, html: Path | None) -> None:
    """Checks that options and the number of run directories match.

    Raises:
        ConfigError: they do not match, or the page cannot be written.
    """
    problems = [*page_problems(html)]
    if html is not None and html.is_dir():
        fix = f"write {shlex.quote(str(html))} --html {shlex.quote(html.name)}.html"
        problems = [Problem("--html", "is a directory, not the file of the page", fix, html)]
    if not compare and len(run_dirs) > 1:
        reason = f"there are {len(run_dirs)} run directories, but only --compare takes several"
        problems.append(_usage_problem(run_dirs, reason))
    refuse(problems)


def _usage_problem(run_dirs: list[Path], reason: str) -> Problem:
    fix = "canzona report --compare RUN_A RUN_B ..."
    return Problem(key="RUN_DIR", value=" ".join(map(str, run_dirs)), reason=reason, fix=fix)
