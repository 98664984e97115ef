"""The short form of a plan's content in files, in which similar experts of a layer share an entry.

    {"name": "layers.3.experts.*.gate", ..., "count": 4, "each": {"name": {"from": 0, "by": 1}, "owner": [0,
    4, 2, 6]}}

represents four entries. `each` has the fields in which the entries differ, with a list of values, or with the
first value and the step to the next. In text fields, such as `name`, the values replace the `*`. All other
fields are equal in the four entries. Names in a bucket are shortened to
`["decoder.layers.3.mlp.experts.linear_fc1.weight*", [0, 1, 2, 3]]`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

_FEWEST = 4
"""The smallest number of entries that are merged."""
_NUMBERED = re.compile(r"(.*\.(?:experts\.|weight))(\d+)(.*)")
"""The pattern of a name with the number of an expert."""
_TEXTS = ("name", "parameter")

Entry = Mapping[str, object]


def merge_families(content: Mapping[str, object]) -> dict[str, object]:
    """Returns a plan's content (`Plan.content`) in its short form."""
    return {
        **content,
        "matrices": _merge_entries(_entries(content["matrices"])),
        "buckets": [
            {**bucket, "parameters": _shorten_names(bucket["parameters"])} for bucket in _entries(content["buckets"])
        ],
    }


def expand_families(content: Mapping[str, object]) -> dict[str, object]:
    """Returns the full form of content that was read from a file: one entry for each matrix and each name.

    Raises:
        ValueError: an entry has `each` without `count`, or without `count` values for every field.
    """
    matrices, buckets = content.get("matrices"), content.get("buckets")
    full = dict(content)
    if isinstance(matrices, list) and any(isinstance(entry, dict) and "each" in entry for entry in matrices):
        full["matrices"] = sorted((each for entry in matrices for each in _expand_entry(entry)), key=_index)
    if isinstance(buckets, list):
        full["buckets"] = [_expand_names(bucket) for bucket in buckets]
    return full


def _entries(part: object) -> Sequence[Entry]:
    assert isinstance(part, list)
    return part


def _merge_entries(entries: Iterable[Entry]) -> list[dict[str, object]]:
    """Merges the entries of each family, in the place of its first entry. Entries of a family differ only in
    the expert's number, index, unit, expert-parallel rank, owner and host."""
    families: dict[object, list[Entry]] = {}
    for entry in entries:
        families.setdefault(_family(entry), []).append(entry)
    merged: list[dict[str, object]] = []
    for members in families.values():
        merged += [dict(entry) for entry in members] if len(members) < _FEWEST else [_merge_family(members)]
    return merged


def _family(entry: Entry) -> object:
    """Returns a key that is equal for all entries of a family; entries without an expert index have unique
    keys."""
    patterns = tuple(_pattern_of(f"{entry[field]}") for field in _TEXTS)
    if None in patterns:
        return entry["index"]
    alike = ("kind", "layer", "rows", "cols", "shard_dim", "home", "seconds", "execution")
    return patterns, tuple(entry.get(field) for field in alike), f"{entry.get('fragment')}"


def _merge_family(members: Sequence[Entry]) -> dict[str, object]:
    """Merges the entries of one family into a single entry."""
    family, each = dict[str, object](), dict[str, object]()
    for field in members[0]:
        values = [entry[field] for entry in members]
        if field in _TEXTS:
            family[field], numbers = _pattern([f"{value}" for value in values])
            each[field] = _as_steps(numbers) or numbers
        elif all(value == values[0] for value in values):
            family[field] = values[0]
        else:
            each[field] = _as_steps(values) or values
    return {**family, "count": len(members), "each": each}


def _as_steps(values: Sequence[object]) -> dict[str, int] | None:
    """Returns the first value and the step between values, if all are integers at equal distances; otherwise
    None."""
    numbers = [value for value in values if isinstance(value, int)]
    if len(numbers) < len(values) or len({after - before for before, after in pairwise(numbers)}) != 1:
        return None
    return {"from": numbers[0], "by": numbers[1] - numbers[0]}


def _pattern(names: Sequence[str]) -> tuple[str, list[int]]:
    """Returns the pattern that names of a family share, and the number in each name."""
    matches = [match for match in map(_NUMBERED.fullmatch, names) if match]
    return f"{matches[0][1]}*{matches[0][3]}", [int(match[2]) for match in matches]


def _expand_entry(entry: object) -> Iterator[dict[str, object]]:
    """Yields the entries that a merged entry represents; an entry that is not merged is yielded unchanged."""
    if not isinstance(entry, dict) or "each" not in entry:
        yield entry  # type: ignore[misc]  # an entry of another type is refused when the plan is made from it
        return
    each, count = entry["each"], entry.get("count")
    if not isinstance(each, dict) or not isinstance(count, int):
        raise ValueError("an entry has `each` without `count`")
    columns = {field: _column(field, values, count) for field, values in each.items()}
    common = {field: value for field, value in entry.items() if field not in ("each", "count", *columns)}
    for row in range(count):
        yield {**common, **{field: _fill_in(entry.get(field), values[row]) for field, values in columns.items()}}


def _column(field: str, values: object, count: int) -> Sequence[object]:
    """Returns the `count` values of a field of `each`."""
    match values:
        case {"from": int(first), "by": int(by)}:
            return [first + row * by for row in range(count)]
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"an entry does not have {count} values for {field}")
    return values


def _fill_in(pattern: object, value: object) -> object:
    """Returns the pattern with the value in the place of `*`, or the value if the field is not a text."""
    return pattern.replace("*", f"{value}") if isinstance(pattern, str) else value


def _index(entry: object) -> int:
    index = entry.get("index") if isinstance(entry, dict) else None
    return index if isinstance(index, int) else -1


def _shorten_names(names: object) -> list[object]:
    """Shortens runs of names that share a pattern to `[pattern, numbers]`."""
    assert isinstance(names, list | tuple)
    short: list[object] = []
    for pattern, names_of_run in groupby(names, _pattern_of):
        run = list(names_of_run)
        short += run if pattern is None or len(run) < _FEWEST else [[*_pattern(run)]]
    return short


def _pattern_of(name: str) -> tuple[str, str] | None:
    """Returns the parts of a name before and after the number of an expert; None without such a number."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else (match[1], match[3])


def _expand_names(bucket: object) -> object:
    """Returns a bucket's entry with all its names; the inverse of `_shorten_names`."""
    if not isinstance(bucket, dict) or not isinstance(bucket.get("parameters"), list):
        return bucket
    names: list[object] = []
    for item in bucket["parameters"]:
        if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], list):
            names += [_fill_in(item[0], number) for number in item[1]]
        else:
            names.append(item)
    return {**bucket, "parameters": names}
