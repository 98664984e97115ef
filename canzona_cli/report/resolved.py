"""A resolved run for programs: the part that `validate --json` and `train --dry-run --json` have in common."""

from dataclasses import asdict

from canzona_cli.config.schema import Layout, RunConfig
from canzona_cli.config.secrets import redacted, shown_value
from canzona_cli.errors import CanzonaError
from canzona_cli.model.routing import routing
from canzona_cli.planner.measures import balance
from canzona_cli.planner.plan_file import Obtained

VERSION = 1


def resolved_json(config: RunConfig, layout: Layout, plan: Obtained | None) -> dict[str, object]:
    """The stable form: additions keep `version`, anything else raises it.

    Args:
        plan: what the run executes; None for a run that executes none.
    """
    return {
        "version": VERSION,
        "recipe": config.name,
        "layout": {**asdict(layout), "world_size": layout.world_size},
        "tokens_per_step": layout.global_batch_size * config.train.seq_length,
        "plan": None if plan is None else _plan(plan),
        "routing": asdict(routing(config)),
        "settings": asdict(config),
    }


def refused_json(error: CanzonaError) -> dict[str, object]:
    """What `canzona validate --json` prints of a run that cannot be."""
    problems = [
        {
            "key": problem.key,
            "value": None if problem.value is None else redacted(str(shown_value(problem.key, problem.value))),
            "reason": redacted(problem.reason),
            "fix": redacted(problem.fix),
        }
        for problem in error.problems
    ]
    return {"version": VERSION, "ok": False, "exit_code": int(error.exit_code), "problems": problems}


def _plan(obtained: Obtained) -> dict[str, object]:
    found = balance(obtained.plan)
    return {
        "hash": obtained.plan.hash,
        "file": None if obtained.path is None else str(obtained.path),
        "load_balance": found.grid,
        "lower_bound": found.lower_bound,
        "slowest_update_s": found.slowest_s,
    }
