"""Rows of Parquet files, by pyarrow, which is optional."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from canzona_cli.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_BATCH_ROWS = 128


class DamagedParquet(ValueError):
    """The error for a file that pyarrow says is no Parquet."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Texts of consecutive rows."""

    texts: list[bytes | None]
    """None where a row has none."""
    first: int
    """Number of the first row in the file, from 1."""
    share: float
    """The share of all rows of the file."""


def texts(path: Path, column: str, groups: tuple[int, int] | None = None) -> Iterator[Rows]:
    """The texts of a column, a few rows at a time.

    Args:
        groups: the first row group and the one after the last; None: all.

    Raises:
        ConfigError: it has no such column, or one of something else than text.
        DamagedParquet: it cannot be read.
    """
    from pyarrow import ArrowException, large_binary

    try:
        with _open(path) as file:
            _check_column(path, file, column)
            total, begin = max(1, file.metadata.num_rows), groups[0] if groups else 0
            chosen = range(begin, groups[1] if groups else file.num_row_groups)
            first = 1 + sum(file.metadata.row_group(group).num_rows for group in range(begin))
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[*chosen], columns=[column], use_threads=False):
                found = batch.column(column).cast(large_binary()).to_pylist()  # as bytes: it need not be valid UTF-8
                yield Rows(texts=found, first=first, share=batch.num_rows / total)
                first += batch.num_rows
    except ArrowException as error:
        raise DamagedParquet(str(error).partition("\n")[0]) from error


def cuts(path: Path, size: int, wanted: int) -> list[tuple[int, int]]:
    """Ranges of row groups that hold about `wanted` of the file's `size` bytes each.

    Raises:
        DamagedParquet: it cannot be read.
    """
    from pyarrow import ArrowException

    try:
        with _open(path) as file:
            rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    except ArrowException as error:
        raise DamagedParquet(str(error).partition("\n")[0]) from error
    found, begin, held = [], 0, 0.0
    for group, number in enumerate(rows, 1):
        held += size * number / max(1, sum(rows))
        if held >= wanted or group == len(rows):
            found.append((begin, group))
            begin, held = group, 0.0
    return found


def _open(path: Path) -> "ParquetFile":
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path, memory_map=True)


def _check_column(path: Path, file: "ParquetFile", column: str) -> None:
    from pyarrow import types

    schema = file.schema_arrow
    if column not in schema.names:
        reason, fix = f"has no column {column!r}", f"--text-key NAME, one of {', '.join(schema.names[:20])}"
    elif schema.names.count(column) > 1:
        reason, fix = f"has several columns {column!r}", "write it again with a name of its own for each column"
    elif not (types.is_string(kind := schema.field(column).type) or types.is_large_string(kind)):
        reason, fix = f"its column {column!r} holds {kind}, not text", "--text-key NAME of a column of text"
    else:
        return
    raise ConfigError(Problem(key="INPUT", value=str(path), reason=reason, fix=fix))
