"""For how long a doubt about the Gram form keeps a matrix in standard form, and what its state has of that. Without
torch: checkpoints are judged by it."""

from collections.abc import MutableMapping

DISTRUSTED = "distrusted"
"""In the state of a matrix, so that checkpoints remember it: how many of its next updates are in standard form. Older
checkpoints have True."""
STANDARD_STEPS = 100
"""That many behind a doubt. A momentum of 0.95 then has 0.6% left of what was doubted; and where the Gram form is
doubted again and again, to have tried it costs 1% of what updates take."""
LOST = f"the Gram form lost too much in rounding; it is updated in standard form for {STANDARD_STEPS} steps"

State = MutableMapping[str, object]
"""Of one matrix."""


def distrust(state: State) -> None:
    """An update was not to be trusted."""
    state[DISTRUSTED] = STANDARD_STEPS


def steps_left(state: State) -> int:
    """How many of the next updates are in standard form."""
    found = state.get(DISTRUSTED, 0)
    assert isinstance(found, int)
    return STANDARD_STEPS if found is True else found


def count_down(state: State) -> None:
    """Of those that are left, one is made."""
    if (after := steps_left(state) - 1) > 0:
        state[DISTRUSTED] = after
    else:
        del state[DISTRUSTED]
