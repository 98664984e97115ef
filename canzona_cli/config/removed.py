"""Lists the removed settings, values and options with their replacements, and updates stored configurations
that have them.

To remove a setting, add an entry here. Anyone who uses the setting gets a message with the replacement. Older
run directories still work, and so do recipe files outside of folders named `recipe`: they lose the setting, or
get the value that replaces theirs.
"""

from collections.abc import Mapping

REMOVED_SETTINGS: Mapping[str, str] = {
    "optimizer.highest_lr": "leave it out: canzona warns if a learning rate is too high",
    "checkpoint.failure_hours": (
        "use checkpoint.every_minutes; a good value is sqrt(2 x seconds a save stalls x hours between failures)"
    ),
    "train.eval_batches": "use train.eval_sequences: the number of sequences, whatever the batch",
    "run.trace_steps": "use run.profile_steps: torch's profiler writes a Chrome trace of each rank",
    "engine.layout": "leave it out: engine=paper keeps Megatron's order of buckets, engine=canzona sorts them by owner",
    "engine.grouping": "leave it out: engine=paper has the paper's micro-groups",
    "cluster.symmetric_factor": "leave it out: symmetric matmuls take as long as general ones of their size",
    "run.log_interval": "leave it out: metrics.jsonl has a line for every step",
}
"""The fix for each removed setting, by dotted key. None of these settings affected training."""

_BY_OWNER_OR_RING = "use engine.reduction=reduce or ring, or leave it out to use the faster one for each bucket"

REMOVED_VALUES: Mapping[tuple[str, str], tuple[str, str | None]] = {
    ("engine.mode", "rows"): ("use engine.mode=shared, the new name of rows", "shared"),
    ("engine.reduction", "all_to_all"): (_BY_OWNER_OR_RING, None),
    ("engine.reduction", "padded"): (_BY_OWNER_OR_RING, None),
    ("engine.reduction", "even"): (_BY_OWNER_OR_RING, None),
}
"""The fix for each removed value, and the value with the same loss curve that replaces it in stored
configurations; by dotted key and value."""


def bring_up_to_date(tree: dict[str, object]) -> None:
    """Updates a stored configuration in place: drops removed settings, and replaces removed values.

    Args:
        tree: sections and settings, changed in place.
    """
    train, _ = _section_of(tree, "train.eval_batches")
    batches, batch = train.get("eval_batches"), train.get("global_batch_size")
    if isinstance(batches, int) and isinstance(batch, int):
        train.setdefault("eval_sequences", batches * batch)
    for key in REMOVED_SETTINGS:
        section, name = _section_of(tree, key)
        section.pop(name, None)
    for (key, value), (_, replacement) in REMOVED_VALUES.items():
        section, name = _section_of(tree, key)
        if section.get(name) == value:
            section[name] = replacement


def _section_of(tree: dict[str, object], key: str) -> tuple[dict[str, object], str]:
    """Returns the section of a setting (an empty mapping if the tree lacks the section), and the setting's bare
    name."""
    section, _, name = key.partition(".")
    values = tree.get(section)
    return (values if isinstance(values, dict) else {}), name
