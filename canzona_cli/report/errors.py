"""How an error reads at the terminal: what, where, why, and what to do, for every problem at once."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from canzona_cli.config.redaction import redacted, shown_value
from canzona_cli.errors import CanzonaError, Problem
from canzona_cli.report.text import wrapped
from canzona_cli.run.words import clean, plural

_LONGEST_VALUE = 200


def render_error(error: CanzonaError) -> RenderableType:
    """A renderable of the error: a headline, then per problem `key = value`, the reason and the fix behind an arrow.

    Wraps to the console's width with hanging indents; text from users is shown literally, never read as markup.
    """
    return _ErrorView(error=error)


@dataclass(frozen=True, kw_only=True)
class _ErrorView:
    error: CanzonaError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        problems = self.error.problems
        headline = Text(self.error.headline, style="bold red")
        if len(problems) > 1:
            headline.append(f": {plural(len(problems), 'problem')}")
        yield from wrapped(headline, console, options)
        for problem in problems:
            yield Text()
            yield from _problem(problem, console, options)


def _problem(problem: Problem, console: Console, options: ConsoleOptions) -> RenderResult:
    place = Text(clean(redacted(problem.key)), style="bold")
    if problem.value is not None:
        shown = shown_value(problem.key, problem.value)
        value = clean(str(shown).lower() if isinstance(shown, bool) else shown)
        if len(value) > _LONGEST_VALUE:
            value = value[: _LONGEST_VALUE - 3] + "..."
        # An empty string would read as a forgotten value.
        place.append(f" = {value}" if value else " = ''")
    yield from wrapped(place, console, options, first="  ", rest="      ")
    yield from wrapped(
        Text(clean(redacted(problem.reason), newlines=True)), console, options, first="    ", rest="    "
    )
    if problem.fix:
        arrow = "-> " if options.ascii_only else "→ "
        fix = Text(clean(redacted(problem.fix), newlines=True), style="green")
        yield from wrapped(fix, console, options, first=f"    {arrow}", rest=" " * (4 + len(arrow)))
