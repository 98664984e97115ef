"""The plan a run executes: the file it names, the one `canzona plan` left for it, or a new one. All three are equal."""

from dataclasses import dataclass, replace
from pathlib import Path

from canzona_cli.config.execution import Execution, execution_of
from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.errors import ConfigError, Problem
from canzona_cli.planner.plan import Plan
from canzona_cli.planner.plan_file import FOLDER, find_plan, load_plan
from canzona_cli.planner.planner import make_plan


@dataclass(frozen=True, kw_only=True)
class Obtained:
    """A plan and where it was found; `path` is None for a new one."""

    plan: Plan
    path: Path | None


def obtain_plan(config: RunConfig, layout: Layout, folder: Path = FOLDER) -> Obtained | None:
    """The plan of a resolved run; None where it executes none.

    Raises:
        ConfigError: `engine.plan` cannot be read or is for another run; or as `make_plan`.
        DoesNotFit: as `make_plan`.
    """
    if execution_of(config) is not Execution.PLANNED:
        return None
    if config.engine.plan is not None:
        path = Path(config.engine.plan).expanduser()
        try:
            return Obtained(plan=load_plan(path, config, layout), path=path)
        except ConfigError as error:
            raise ConfigError(*(_of_setting(problem) for problem in error.problems)) from None
    found = find_plan(config, layout, folder)
    if found is not None:
        return Obtained(plan=load_plan(found, config, layout), path=found)
    return Obtained(plan=make_plan(config, layout), path=None)


def _of_setting(problem: Problem) -> Problem:
    return replace(problem, key="engine.plan", fix=f"{problem.fix}, or leave engine.plan out")
