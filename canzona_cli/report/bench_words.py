"""What the reports of `canzona bench` share: short names of phases, and measured next to predicted numbers."""

from collections.abc import Callable, Mapping, Sequence

from rich.text import Text

from canzona_cli.bench.results import BenchResult, Measured
from canzona_cli.run.phases import COMMUNICATION, PHASES, STRATEGIES
from canzona_cli.run.statistics import Quartiles, Speedup
from canzona_cli.run.words import MISSING, milliseconds, number, real

MIB = 1 << 20
TOLERANCE = 0.20
"""A prediction further off than this is highlighted."""
NOT_DISTINCT = "not significant"
"""Instead of a speed-up; `OVERLAP` below the table says why."""
OVERLAP = "not significant: the intervals overlap"


def phase_name(phase: str) -> str:
    """`gradient reduction`, or for a total `  with overlap`, to be read below its phase."""
    return "  with overlap" if phase.endswith("_total") else PHASES[phase].name if phase in PHASES else phase


def order(result: BenchResult) -> tuple[str, ...]:
    """The strategies of a result as they are shown."""
    return tuple(name for name in STRATEGIES if name in result.strategies)


def error_text(measured: float | None, predicted: float | None) -> Text:
    """`+12%`: how much longer the prediction is; one that is far off is highlighted."""
    found, planned = real(measured), real(predicted)
    if not found or not planned:  # the two numbers say all there is to say
        return Text("")
    error = planned / found - 1
    shown = "0%" if abs(error) < 0.005 else f"{100 * error:+.0f}%" if error < 9.995 else ">+999%"
    return Text(shown, style="yellow" if abs(error) > TOLERANCE else "dim")


def ms(seconds: float | None) -> str:
    """As `milliseconds`; nothing is a plain 0."""
    return "0" if seconds == 0 else milliseconds(seconds)


def with_error(
    measured: float | None, predicted: float | None, show: Callable[[float | None], str] = ms
) -> tuple[Text, Text, Text]:
    """Measured, predicted, error."""
    return Text(show(measured)), Text(show(predicted)), error_text(measured, predicted)


def quartiles(values: Sequence[float], show: Callable[[float], str] = milliseconds) -> str:
    """`41.2 [40.8, 43.0]`; without brackets where one round was measured."""
    spread = Quartiles.of(values)
    if len(values) < 2:
        return show(spread.median)
    return f"{show(spread.median)} [{show(spread.low)}, {show(spread.high)}]"


def times(speedup: Speedup) -> str:
    """`4.16x [2.92, 5.28]`; no number where the difference is not significant."""
    if not speedup.distinct:
        return NOT_DISTINCT
    ratio = speedup.ratio
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:+.1f}%"


def ratio(value: float | None) -> str:
    return number(value, ".2f")


def mib(amount: float | None) -> str:
    if amount is None:
        return MISSING
    return f"{amount / MIB:,.0f}" if amount >= 100 * MIB else f"{amount / MIB:.1f}"


def exposed(phases: Mapping[str, float]) -> float:
    """Seconds a step waits for data of other ranks."""
    return sum(phases.get(name, 0.0) for name in COMMUNICATION)


def measured_phase(measured: Measured, phase: str) -> float | None:
    """Mean over ranks, seconds; None for a phase that this strategy does not have."""
    found = measured.phases.get(phase)
    return None if found is None else found.mean_s
