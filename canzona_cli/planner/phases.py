"""The phases of a training step: the words that plans, measurements and breakdowns share."""

from typing import Literal, get_args

Phase = Literal[
    "data",
    "forward",
    "backward",
    "pipeline",
    "grad_reduce",
    "norm_clip",
    "exchange",
    "matrix_update",
    "adamw_update",
    "param_gather",
    "other",
]
"""Every moment of a step belongs to one of these; of communication, what the step waits for."""
TotalPhase = Literal["grad_reduce_total", "exchange_total", "param_gather_total"]
"""Communication in flight, hidden under other work or not."""

IN_STEP: tuple[Phase, ...] = get_args(Phase)
"""In the order of the breakdown; they add up to the step."""
