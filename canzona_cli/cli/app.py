"""The `canzona` command: parses arguments, calls a command, maps errors to exit codes.

A command is imported only when it runs.
"""

import atexit
import gc
import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command, get_group

from canzona_cli import __version__
from canzona_cli.core.errors import BadUsage, ExitCode, Problem

COMMANDS = {
    "plan": "Plan which rank updates which matrix; simulate a step.",
    "train": "Train a recipe, on a laptop CPU or a GPU cluster.",
    "resume": "Resume a run, here or on another machine or layout.",
    "bench": "Measure strategies side by side, next to their predictions.",
    "slurm": "Submit a run to Slurm, or print its sbatch script.",
    "recipes": "List, show and copy recipes.",
    "clusters": "List, show and copy hardware profiles.",
    "data": "Prepare text for training; show prepared data.",
    "checkpoint": "List, verify, import and export checkpoints.",
    "generate": "Generate text from a checkpoint with transformers.",
    "eval": "Compute the loss of a checkpoint on any prepared data.",
    "report": "Show how a run went and where its step time goes.",
    "calibrate": "Measure this machine; write a cluster profile.",
    "doctor": "Check what this machine has and lacks for training.",
}


# In help, an argument is only its name: Typer would add a Python type, such as `<list[str]>`.
TyperArgument.display_type_rich = lambda self, ctx: ""  # type: ignore[method-assign]
_ARGUMENTS = "canzona.words"
"""The key in click's `meta` under which the arguments after the command's name are stored."""


class LazyCommands(TyperGroup):
    """A group that lists commands without importing them, and imports the command that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.commands[args[0]] = _load(args[0])
        else:
            from canzona_cli.cli.commands.instead import other_command

            raise BadUsage(other_command(args, COMMANDS))
        if args[0] == "plan" and "--" in args:
            from canzona_cli.cli.commands.plan import one_value

            args = [args[0], *one_value(args[1:])]
        ctx.meta[_ARGUMENTS] = args[1:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("Interrupted", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except Exception as error:
            if problems := _usage_problems(ctx, error):
                raise BadUsage(*problems) from None
            raise


def _usage_problems(ctx: Any, error: Any) -> list[Problem]:
    """Returns what to write instead of a command line that the parser refuses; empty for other errors.

    A common mistake is to type a setting as an option: `--steps 10` instead of `train.steps=10`.
    """
    if type(error).__name__ == "NoArgsIsHelpError" or not hasattr(error, "format_message"):
        return []  # a request for help, or no usage error; Typer does not export the classes of usage errors
    from canzona_cli.cli.commands.instead import bad_usage, other_options

    context, option = getattr(error, "ctx", None), getattr(error, "option_name", "")
    if context is None:  # the option is the last word, but needs a value
        fix = f"see canzona {ctx.invoked_subcommand} --help"
        return [Problem(key=option, reason="needs a value", fix=fix)]
    if not hasattr(error, "possibilities"):
        return [bad_usage(context, error, ctx.meta[_ARGUMENTS])]
    return other_options(context, ctx.meta[_ARGUMENTS], option)


def _load(name: str) -> Any:
    module = import_module(f"canzona_cli.cli.commands.{'train' if name == 'resume' else name}")
    if hasattr(module, "app"):
        module.app.rich_markup_mode = None
        group = get_group(module.app)
        group.name, group.help = name, COMMANDS[name]
        return group
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(getattr(module, name))
    return get_command(single)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's panels would triple the time that help takes to appear
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _help in COMMANDS.items():  # placeholders for the list of commands in the help
    app.command(_name, help=_help)(lambda: None)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"canzona {__version__}")
        raise typer.Exit


@app.callback()
def canzona(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Pre-train Qwen3 and Llama-like models with matrix-based optimizers inside Megatron-core.

    Start with: canzona train recipe=qwen3-tiny
    """


def main() -> None:
    """Runs the command line and exits with one of `canzona_cli.core.errors.ExitCode`."""
    from canzona_cli.config.completion import COMPLETE_VARIABLE, bash_words, prepare_completion_options
    from canzona_cli.records.protection import guard, lost_output_error

    if {"--install-completion", "--show-completion"} & set(sys.argv):
        prepare_completion_options(sys.argv)
    # Planning creates many long-lived objects and few cycles. Frequent garbage collection would take a tenth
    # of the planning time, and the final collection at exit another tenth: collect rarely, and freeze before
    # exit.
    gc.set_threshold(5_000_000)
    atexit.register(gc.freeze)
    os.umask(os.umask(0o077) | 0o002)  # files of canzona and its child processes are not world-writable
    guard()
    try:
        with bash_words():
            app(prog_name="canzona", complete_var=COMPLETE_VARIABLE)
    except SystemExit as end:
        if end.code or (lost := lost_output_error()) is None:
            raise
        from canzona_cli.cli.views.errors import show_failure

        sys.exit(show_failure(lost))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:
        from canzona_cli.cli.views.errors import show_failure

        sys.exit(show_failure(error))


if __name__ == "__main__":
    main()
