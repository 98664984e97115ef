"""Figures as PNG files."""

from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.errors import EnvironmentProblem, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG.

    Raises:
        EnvironmentProblem: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise EnvironmentProblem(
            Problem(
                key="--plot",
                value=path,
                reason=f"cannot be written: {error.strerror or error}",
                fix="name another place with --plot FILE.png",
            )
        ) from None
