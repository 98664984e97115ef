"""Names of the folders in a store of checkpoints: visible ones are whole, hidden ones are on their way in or out."""

import re
from pathlib import Path

_STEP = re.compile(r"step-(\d{8,15})")
_HIDDEN = re.compile(r"\.(step-\d{8,15})\.(partial|replaced|removed)")


def step_name(step: int) -> str:
    """`step-00000030`; sorts by step below a hundred million."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None for any other name."""
    match = _STEP.fullmatch(name)
    if match is None or step_name(step := int(match[1])) != name:
        return None
    return step


def hidden_name(name: str) -> tuple[str, str] | None:
    """The checkpoint and the state (`partial`, `replaced`, `removed`) of a hidden folder; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return None if match is None or step_of(match[1]) is None else (match[1], match[2])


def partial_path(store_root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is being written."""
    return store_root / f".{step_name(step)}.partial"


def replaced_path(checkpoint: Path) -> Path:
    """Where a checkpoint waits while another of its step takes its name; readers find it there if it never does."""
    return checkpoint.with_name(f".{checkpoint.name}.replaced")


def removed_path(checkpoint: Path) -> Path:
    """Where a checkpoint is taken to pieces, so that none is ever seen half removed."""
    return checkpoint.with_name(f".{checkpoint.name}.removed")
