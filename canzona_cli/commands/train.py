"""`canzona train`: its options. `train_run` does the work, and is imported only then."""

from typing import Annotated

import typer

from canzona_cli.commands.output import RecipesDirs, overrides_argument, tell
from canzona_cli.errors import Clash, Problem, clashes, refuse
from canzona_cli.run.streams import unattended

CLASHES = (
    Clash(
        option="--prepare-only",
        beside="--dry-run",
        reason="writes the run directory, and a dry run writes nothing",
        fix="leave out one of the two",
    ),
    Clash(
        option="--json",
        without="a dry run",
        reason="a run is shown while it is going on",
        fix="add --dry-run; of a run: canzona report --json",
    ),
    Clash(option="--json", beside="--sweep", reason="shows one run", fix="leave out --json, or --sweep"),
)


def train(
    overrides: Annotated[
        list[str] | None, overrides_argument("recipe=qwen3-tiny gpus=4 parallel.tp=2 train.steps=100 ...")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the run comes to and its torchrun command; start nothing.")
    ] = False,
    prepare_only: Annotated[
        bool,
        typer.Option("--prepare-only", help="Write the run directory, print the torchrun command; start nothing."),
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--config", help="With --dry-run or --prepare-only: print the resolved configuration too.")
    ] = False,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="One run after another for settings with several values (optimizer.lr=1e-3,3e-3)."
        ),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FIRST-LAST", help="Write a Chrome trace of these steps (run.trace_steps)."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile", metavar="FIRST-LAST", help="Run torch's profiler on these steps (run.profile_steps)."
        ),
    ] = None,
    weights_from: Annotated[
        str | None,
        typer.Option(
            "--weights-from",
            metavar="RUN|CHECKPOINT|DIR",
            help="Begin with the weights of another run or of a Hugging Face folder (init=, checkpoint.weights_from).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run or --prepare-only: print JSON.")] = False,
    recipes_dir: RecipesDirs = None,
) -> None:
    """Train a model, or continue the run in run.dir. Ctrl-C saves after the current step;
    twice stops at once."""
    from canzona_cli.launch.stop import Preempted, Requests, before_workers, handled

    printed = dry_run or prepare_only
    typed = {"--prepare-only": prepare_only, "--json": as_json, "--dry-run": dry_run, "--sweep": sweep}
    problems = [*clashes({**typed, "a dry run": printed}, CLASHES)]
    if show_config and not printed:
        files = [text for text in overrides or () if "=" not in text]
        fix = f"write recipe={files[0]}" if files else "add --dry-run"
        problems.append(Problem(key="--config", reason="shows the configuration of a dry run", fix=fix))
    refuse(problems)
    if not printed:
        unattended()
    how = {"dry_run": dry_run, "prepare_only": prepare_only, "show_config": show_config}
    requests = Requests(raising=True)
    with handled(requests.add, to_the_end=True):
        try:
            arguments = [*(overrides or []), *_recorded_steps(trace=trace, profile=profile), *_weights(weights_from)]
            # Both take a while to import, in which signals may come.
            if sweep:
                from canzona_cli.commands.train_sweep import sweep as train_swept

                train_swept(arguments, recipes_dir or [], requests, **how)
            else:
                from canzona_cli.commands.train_run import run

                run(arguments, recipes_dir or [], requests, as_json=as_json, **how)
        except Preempted as asked:
            outcome = before_workers(None, asked)
            tell(outcome.message)
            raise typer.Exit(outcome.exit_code) from None


def _weights(where: str | None) -> list[str]:
    """Returns the weights as an override."""
    from canzona_cli.config.overrides import text_value

    return [] if where is None else [f"checkpoint.weights_from={text_value(where)}"]


def _recorded_steps(**options: str | None) -> list[str]:
    """`--trace 5-7` as the override run.trace_steps=[5,7]; `--trace 5` is one step.

    Raises:
        ConfigError: with every option that names no steps.
    """
    overrides, problems = [], []
    for name, text in options.items():
        if text is None:
            continue
        steps = [part.strip() for part in text.split("-")]
        if len(steps) <= 2 and all(part.isdecimal() for part in steps):
            overrides.append(f"run.{name}_steps=[{int(steps[0])},{int(steps[-1])}]")
        else:
            reason, fix = "is not the first and the last step to record", f"for example --{name} 5-7"
            problems.append(Problem(key=f"--{name}", value=text, reason=reason, fix=fix))
    refuse(problems)
    return overrides
