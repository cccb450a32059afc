"""An append to a SQLite journal as one statement.

The driver lets go of the interpreter for every statement, and where an engine is busy it takes up to milliseconds to get it back.
BEGIN, moving the head, inserting and COMMIT were four of them, and a first token waited for all. So the statements are in a trigger,
of this connection's own and in memory (TEMP): an insert into its view moves the head from exactly where the writer knows it, or
ends the transaction, and inserts the record. One insert of several rows is one transaction, committed when it returns.
"""

import sqlite3
from collections.abc import Sequence
from itertools import chain
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
    SELECT RAISE(ROLLBACK, '{_HAS_MOVED}') WHERE changes() = 0;
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
    hashes = [before, *(record.hash for record in records)]
    rows = [(stream_id, *record_to_row(record), previous) for record, previous in zip(records, hashes, strict=False)]
    try:
        if len(rows) <= _MOST_ROWS:
            sqlite_engine.patiently(driver, *_insert(rows), patience_s)
        else:
            _in_one_transaction(driver, rows, patience_s)
    except sqlite3.IntegrityError as error:
        if str(error) != _HAS_MOVED:
            raise
        return False
    return True


def _in_one_transaction(driver: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], patience_s: float) -> None:
    sqlite_engine.begin_immediate(driver, patience_s)
    for at in range(0, len(rows), _MOST_ROWS):
        driver.execute(*_insert(rows[at : at + _MOST_ROWS]))
    driver.commit()


def _insert(rows: Sequence[tuple[Any, ...]]) -> tuple[str, list[Any]]:
    return _STATEMENTS[len(rows)], list(chain.from_iterable(rows))
