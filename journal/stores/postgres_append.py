"""An append to a PostgreSQL journal: one statement, and for one record prepared once in each session and executed by libpq itself.

A cursor of the driver's looks up how each value is sent, and which statement was prepared, and waits in steps: half of the CPU of
a lone append. Here all of that is known: a record's values are numbers, texts and hashes, in the server's binary formats.
The call waits with the interpreter given away. It can't be interrupted before the server has answered, or the session is lost; how
long that takes is bounded as for any other (`lock_timeout`, and probes of a silent connection).

Source: PostgreSQL's documentation, "Command Execution Functions" (`PQexecPrepared`) and its binary formats.
"""

import re
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from refold.journal.record import Head, Record, content_to_store
from refold.journal.stores.columns import RECORD_COLUMNS, record_to_row
from refold.journal.stores.tables import journal_records

if TYPE_CHECKING:
    import psycopg

# ruff: noqa: S608 - what is put into SQL are names of columns

_TYPES = {name: journal_records.c[name].type.compile(dialect=postgresql.dialect()) for name in RECORD_COLUMNS}  # type: ignore[no-untyped-call]
_COLUMNS = ", ".join(RECORD_COLUMNS)
_APPEND = """
WITH {rows}fence AS (
    SELECT stream_id, head_position, head_hash FROM journal_streams
    WHERE stream_id = %(stream_id)s AND engine_epoch = %(epoch)s FOR NO KEY UPDATE
)
INSERT INTO journal_records (stream_id, {columns}) SELECT fence.stream_id, {values} FROM fence{source}
WHERE (head_position = %(before)s AND head_hash = %(previous)b)
    OR EXISTS (SELECT FROM journal_records WHERE stream_id = %(stream_id)s AND position = %(before)s - 1 AND hash = %(previous)b)
"""
_ONE = _APPEND.format(rows="", columns=_COLUMNS, source="", values=", ".join(f"%({name})b" for name in _TYPES))
_ARRAYS = ", ".join(f"%({name})b::{kind}[]" for name, kind in _TYPES.items())
_MANY = _APPEND.format(
    rows=f"rows ({_COLUMNS}) AS (SELECT * FROM unnest({_ARRAYS})), ",
    columns=_COLUMNS,
    source=" CROSS JOIN rows",
    values="rows.*",
)
_PARAMETER = re.compile(r"%\((\w+)\)[sb]")
_NAMES = list(dict.fromkeys(_PARAMETER.findall(_ONE)))
_KINDS = _TYPES | {"stream_id": "INTEGER", "epoch": "BIGINT", "before": "BIGINT", "previous": "BYTEA"}
_NUMBERED = _PARAMETER.sub(lambda found: f"${_NAMES.index(found[1]) + 1}::{_KINDS[found[1]]}", _ONE)
_BINARY: dict[str, Callable[[Any], bytes]] = {"INTEGER": struct.Struct(">i").pack, "BIGINT": struct.Struct(">q").pack}
_FORMS = [_BINARY.get(_KINDS[name]) for name in _NAMES]
_STATEMENT = b"refold_append"

_prepared: "weakref.WeakSet[psycopg.Connection[Any]]" = weakref.WeakSet()


def append(driver: "psycopg.Connection[Any]", stream_id: int, before: Head, records: Sequence[Record]) -> bool:
    """Add records behind the head, which must be `before`; whether it was. On disk when this returns.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would have told it.
    """
    import psycopg  # noqa: PLC0415

    guard = {"stream_id": stream_id, "epoch": before.engine_epoch, "before": before.position, "previous": before.hash}
    try:
        num_in = _one(driver, guard, records[0]) if len(records) == 1 else _many(driver, guard, records)
    except psycopg.Error as error:
        raise sa.exc.DBAPIError(_NUMBERED, None, error, connection_invalidated=driver.closed) from error
    assert num_in in {0, len(records)}, f"{num_in} of {len(records)} records went in"
    return num_in > 0


def _many(driver: "psycopg.Connection[Any]", guard: dict[str, Any], records: Sequence[Record]) -> int:
    columns = zip(*map(record_to_row, records), strict=True)
    return driver.execute(_MANY, guard | dict(zip(RECORD_COLUMNS, map(list, columns), strict=True))).rowcount


def _one(driver: "psycopg.Connection[Any]", guard: dict[str, Any], record: Record) -> int:
    from psycopg import pq  # noqa: PLC0415
    from psycopg.errors import error_from_result  # noqa: PLC0415

    values: Any = _binary(guard, record)  # None for NULL is allowed; the driver's types don't say so
    if driver not in _prepared:
        done = driver.pgconn.prepare(_STATEMENT, _NUMBERED.encode())
        if done.status != pq.ExecStatus.COMMAND_OK:
            raise error_from_result(done)
        _prepared.add(driver)
    done = driver.pgconn.exec_prepared(_STATEMENT, values, [pq.Format.BINARY] * len(values))
    if done.status != pq.ExecStatus.COMMAND_OK:
        raise error_from_result(done)
    return done.command_tuples or 0


def _binary(guard: dict[str, Any], record: Record) -> list[bytes | None]:
    """The values of `_NUMBERED`, as the server has them."""
    from psycopg.errors import NumericValueOutOfRange  # noqa: PLC0415

    content, content_hash = content_to_store(record)
    values = guard | record._asdict() | {"content": content, "content_hash": content_hash}
    try:
        return [form(values[name]) if form else values[name] for name, form in zip(_NAMES, _FORMS, strict=True)]
    except struct.error as error:
        raise NumericValueOutOfRange(f"record {record.position}: {error}") from error
