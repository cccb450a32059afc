"""What a SQLite journal has beside its records, looked at: the rows of its streams, tables that only spare work, rows of no stream.

Asked by readers, who go on in spite of it, and by whoever is about to write, who is refused; both over a connection that can't write.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from refold.journal.beside import DamageBeside, worst_first
from refold.journal.record import EMPTY_HEAD, follows, restored
from refold.journal.stores.rows import Judged, judge, stream_row
from refold.journal.stores.sparing_tables import SPARING, damage_of_missing
from refold.journal.stores.sqlite_marks import marks_of
from refold.journal.stores.strangers import STRANGERS_SQL, Strangers, damage_of

Fetch = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]

RECORD_SQL = """
SELECT r.position, r.engine_epoch, r.schema_version, r.time_ns,
    CASE typeof(r.body) WHEN 'text' THEN CAST(r.body AS BLOB) END,
    CASE typeof(r.content) WHEN 'text' THEN CAST(r.content AS BLOB) WHEN 'null' THEN NULL ELSE x'00' END,
    CASE typeof(r.content_hash) WHEN 'blob' THEN r.content_hash WHEN 'null' THEN NULL ELSE x'00' END,
    CASE typeof(r.hash) WHEN 'blob' THEN r.hash END
FROM journal_records AS r """
_FIRST_SQL = RECORD_SQL + "WHERE r.stream_id = ? AND r.position = 0"
# A stream's row and its last record, as of one moment: one more seek. What is before position 0 is no record of it.
_ROWS_SQL = """
SELECT s.stream_id, s.name, s.head_position, s.head_hash, s.engine_epoch, r.position, r.hash, r.engine_epoch
FROM journal_streams AS s LEFT JOIN journal_records AS r ON r.stream_id = s.stream_id AND r.position = (
    SELECT max(x.position) FROM journal_records AS x WHERE x.stream_id = s.stream_id AND x.position >= 0
)"""
_TABLES_SQL = "SELECT name FROM sqlite_master WHERE type = 'table' AND name IN (?, ?)"


def judged_rows(fetch: Fetch, path: Path, stream: str | None = None) -> dict[tuple[int, str], Judged]:
    """What the row of each stream, or of one, is worth; by number and name, in the order of names.

    Marks are asked only where a row and its last record differ, and after both were read.
    """
    where = (f"{_ROWS_SQL} ORDER BY s.name", ()) if stream is None else (f"{_ROWS_SQL} WHERE s.name = ?", (stream,))
    found, marks = {}, None
    for stream_id, name, *rest in fetch(*where):
        row = stream_row(name, (rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5]))
        mark = None
        if row.tail is not None and row.head[:2] != row.tail[:2]:
            marks = marks_of(path) if marks is None else marks
            mark = marks.get(stream_id)
        found[stream_id, name] = judge(row, mark)
    return found


def missing_tables(fetch: Fetch) -> frozenset[str]:
    """Which tables are gone that records are read without. The schema has been read by whoever opened the connection."""
    return SPARING - {name for (name,) in fetch(_TABLES_SQL, tuple(sorted(SPARING)))}


def strangers(fetch: Fetch, path: Path) -> list[DamageBeside]:
    """The damage of rows that are in no stream."""
    found = [Strangers(*row) for row in fetch(STRANGERS_SQL, ())]
    marks = marks_of(path) if found else {}
    return [damage_of(each, is_stream=each.stream_id in marks or _begins(fetch, each)) for each in found]


def beside(fetch: Fetch, path: Path) -> list[DamageBeside]:
    """All of it; what concerns records comes first."""
    judged = (each.damage for each in judged_rows(fetch, path).values())
    missing = damage_of_missing(str(path), missing_tables(fetch))
    return worst_first([*strangers(fetch, path), *missing, *(damage for damage in judged if damage is not None)])


def _begins(fetch: Fetch, each: Strangers) -> bool:
    """Whether there is a record that a stream begins with."""
    return any(follows(EMPTY_HEAD, restored(row)) for row in fetch(_FIRST_SQL, (each.stream_id,)))
