"""Archive files as Parquet: one row a record, so that DuckDB, Polars or Spark read an archive without us.

    SELECT time_ns, body FROM 'archive/*.parquet' WHERE body LIKE '%RequestPreempted%'

Needs the package pyarrow (`refold[analytics]`). Bodies and contents are text, everything is compressed with Zstandard. Where a content
or its hash is null, it follows from the rest, as in a SQL store. The chain is in the rows, and is verified as anywhere.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from refold.journal.errors import JournalCorrupt, JournalError, Rejected
from refold.journal.record import Head, Record, head_after
from refold.journal.stores.columns import RECORD_COLUMNS, record_to_row, row_to_record

_LEVEL = 10


def write_rows(path: Path, groups: Iterable[list[Record]]) -> tuple[int, Head]:
    """Write groups of records to a new file; the first position, and the head that they lead to. Not synced.

    Raises:
        Rejected: pyarrow isn't installed: another form can be had.
        OSError: the file can't be written.
    """
    try:
        arrow, parquet = _pyarrow()
    except JournalError as error:
        raise Rejected(str(error)) from error
    binary, integer = arrow.binary(), arrow.int64()
    kinds = [integer, integer, arrow.int32(), integer, arrow.string(), arrow.string(), binary, binary]
    schema = arrow.schema(list(zip(RECORD_COLUMNS, kinds, strict=True)))
    start, head = -1, None
    with parquet.ParquetWriter(path, schema, compression="zstd", compression_level=_LEVEL) as writer:
        for group in groups:
            start = group[0].position if start < 0 else start
            head = head_after(group[-1])
            columns = zip(*map(record_to_row, group), strict=True)
            arrays = [arrow.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
            writer.write_table(arrow.table(arrays, schema=schema))
    assert head is not None, "an archive holds at least one record"
    return start, head


def read_rows(path: Path, start: int, stop: int | None) -> Iterator[Record]:
    """Records start <= p < stop of a file.

    Raises:
        JournalCorrupt: it's damaged.
        JournalError: it can't be read, or pyarrow isn't installed.
    """
    arrow, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                bounds = file.metadata.row_group(number).column(0).statistics
                if bounds is not None and (bounds.max < start or (stop is not None and bounds.min >= stop)):
                    continue
                columns = file.read_row_group(number, columns=list(RECORD_COLUMNS)).to_pydict()
                for row in zip(*columns.values(), strict=True):
                    if start <= row[0] and (stop is None or row[0] < stop):
                        yield row_to_record(row)
    except (arrow.ArrowException, KeyError, UnicodeDecodeError) as error:
        raise JournalCorrupt(
            f"{path} is damaged ({str(error)[:100]}): restore it from a backup", position=start, kind="edited"
        ) from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise JournalError("Parquet needs the package pyarrow: pip install 'refold[analytics]'") from error
