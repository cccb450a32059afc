"""An append to a SQLite journal as one statement.

The driver lets go of the interpreter for every statement, and where an engine is busy it takes up to milliseconds to get it back.
BEGIN, moving the head, inserting and COMMIT were four of them, and a first token waited for all. So the statements are in a trigger,
of this connection's own and in memory (TEMP): an insert into its view moves the head from exactly where the writer knows it, or
fails as a whole, and inserts the record. One insert of several rows is one transaction, committed when it returns. More rows than
one insert takes, and an erasure, need a transaction around: a failed insert leaves it open, for whoever began it to give up.
"""

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from refold.journal.record import Record
from refold.journal.stores import sqlite_engine
from refold.journal.stores.columns import RECORD_COLUMNS, record_to_row

# ruff: noqa: S608 - what is put into SQL are names of columns

_MOST_ROWS = 16
_HAS_MOVED = "the head has moved"
_COLUMNS = ", ".join(RECORD_COLUMNS)
_VIEW = f"CREATE TEMP VIEW IF NOT EXISTS appends AS SELECT stream_id, {_COLUMNS}, hash AS previous FROM journal_records"
_TRIGGER = f"""
CREATE TEMP TRIGGER IF NOT EXISTS append_record INSTEAD OF INSERT ON appends BEGIN
    UPDATE journal_streams SET head_position = NEW.position + 1, head_hash = NEW.hash
    WHERE stream_id = NEW.stream_id AND engine_epoch = NEW.engine_epoch
        AND head_position = NEW.position AND head_hash = NEW.previous;
    SELECT RAISE(ABORT, '{_HAS_MOVED}') WHERE changes() = 0;
    INSERT INTO journal_records (stream_id, {_COLUMNS})
    VALUES (NEW.stream_id, {", ".join(f"NEW.{column}" for column in RECORD_COLUMNS)});
END
"""
_ROW = f"(?{', ?' * (len(RECORD_COLUMNS) + 1)})"
_STATEMENTS = [f"INSERT INTO appends VALUES {', '.join([_ROW] * num_rows)}" for num_rows in range(_MOST_ROWS + 1)]


def prepare(driver: sqlite3.Connection) -> None:
    """Make the view and its trigger, for a connection that appends. Nothing is written to the file."""
    driver.execute(_VIEW)
    driver.execute(_TRIGGER)


def append(
    driver: sqlite3.Connection, stream_id: int, before: bytes, records: Sequence[Record], patience_s: float
) -> bool:
    """Add records behind the head, whose hash is `before`; whether it was there. On disk when this returns.

    Raises:
        sqlite3.Error: it isn't known whether they are in.
    """
    if len(records) <= _MOST_ROWS:
        return _is_in(partial(sqlite_engine.patiently, driver, patience_s=patience_s), stream_id, before, records)
    sqlite_engine.begin_immediate(driver, patience_s)
    with driver:  # an exception rolls back
        is_in = append_within(driver, stream_id, before, records)
        if not is_in:
            driver.rollback()
        return is_in


def append_within(driver: sqlite3.Connection, stream_id: int, before: bytes, records: Sequence[Record]) -> bool:
    """`append`, in a transaction of the caller's, who gives it up if the head wasn't there.

    Raises:
        sqlite3.Error: the caller has to give it up, too.
    """
    for at in range(0, len(records), _MOST_ROWS):
        if not _is_in(driver.execute, stream_id, before, some := records[at : at + _MOST_ROWS]):
            return False
        before = some[-1].hash
    return True


def _is_in(
    execute: Callable[[str, list[Any]], object], stream_id: int, before: bytes, records: Sequence[Record]
) -> bool:
    """One insert of at most `_MOST_ROWS` records; False if the head wasn't at `before`."""
    values: list[Any] = []
    for record in records:
        values += (stream_id, *record_to_row(record), before)
        before = record.hash
    try:
        execute(_STATEMENTS[len(records)], values)
    except sqlite3.IntegrityError as error:
        if str(error) != _HAS_MOVED:
            raise
        return False
    return True
