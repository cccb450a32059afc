"""An append to a PostgreSQL journal: one statement, and for one record prepared once in each session and executed by libpq itself.

A cursor of the driver's looks up how each value is sent, and which statement was prepared, and waits in steps: half of the CPU of
a lone append. Here all of that is known: a record's values are numbers, texts and hashes, in the server's binary formats.
The call waits with the interpreter given away. It can't be interrupted before the server has answered, or the session is lost; how
long that takes is bounded as for any other (`lock_timeout`, and probes of a silent connection).

Source: PostgreSQL's documentation, "Command Execution Functions" (`PQexecPrepared`) and its binary formats.
"""

import struct
import weakref
from collections.abc import Sequence
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
_GUARD = """
FROM journal_streams AS s WHERE s.stream_id = %(stream_id)s AND s.engine_epoch = %(epoch)s AND (
    (s.head_position = %(before)s AND s.head_hash = %(previous)b)
    OR EXISTS (SELECT FROM journal_records WHERE stream_id = %(stream_id)s AND position = %(before)s - 1 AND hash = %(previous)b)
) FOR NO KEY UPDATE
"""
_INTO = f"INSERT INTO journal_records (stream_id, {_COLUMNS})"
_VALUES = ", ".join(f"${number}::{kind}" for number, kind in enumerate(_TYPES.values(), 5))
_ARRAYS = ", ".join(f"%({name})b::{kind}[]" for name, kind in _TYPES.items())
_MANY = f"""
WITH fence AS (SELECT s.stream_id {_GUARD})
{_INTO} SELECT fence.stream_id, rows.* FROM fence CROSS JOIN unnest({_ARRAYS}) AS rows
"""
_ONE = (
    f"{_INTO} SELECT s.stream_id, {_VALUES} {_GUARD}".replace("%(stream_id)s", "$1::integer")
    .replace("%(epoch)s", "$2::bigint")
    .replace("%(before)s", "$3::bigint")
    .replace("%(previous)b", "$4::bytea")
)
_INT4, _INT8 = struct.Struct(">i").pack, struct.Struct(">q").pack
_STATEMENT = b"refold_append"
_ALL_BINARY = [1] * (4 + len(RECORD_COLUMNS))

_prepared: "weakref.WeakSet[psycopg.Connection[Any]]" = weakref.WeakSet()


def append(driver: "psycopg.Connection[Any]", stream_id: int, before: Head, records: Sequence[Record]) -> bool:
    """Add records behind the head, which must be `before`; whether it was. On disk when this returns.

    Raises:
        sqlalchemy.exc.DBAPIError: as SQLAlchemy would have told it.
    """
    import psycopg  # noqa: PLC0415

    try:
        if len(records) == 1:
            num_in = _one(driver, psycopg, _binary(stream_id, before, records[0]))
        else:
            num_in = _many(driver, stream_id, before, records)
    except psycopg.Error as error:
        raise sa.exc.DBAPIError(_ONE, None, error, connection_invalidated=driver.closed) from error
    except struct.error as error:
        too_large = psycopg.errors.NumericValueOutOfRange(f"record {records[0].position}: {error}")
        raise sa.exc.DBAPIError(_ONE, None, too_large) from error
    assert num_in in {0, len(records)}, f"{num_in} of {len(records)} records went in"
    return num_in > 0


def _many(driver: "psycopg.Connection[Any]", stream_id: int, before: Head, records: Sequence[Record]) -> int:
    columns = zip(*map(record_to_row, records), strict=True)
    values: dict[str, Any] = dict(zip(RECORD_COLUMNS, map(list, columns), strict=True))
    values |= {
        "stream_id": stream_id,
        "epoch": before.engine_epoch,
        "before": before.position,
        "previous": before.hash,
    }
    return driver.execute(_MANY, values).rowcount


def _one(driver: "psycopg.Connection[Any]", psycopg: Any, values: Any) -> int:
    if driver not in _prepared:
        done = driver.pgconn.prepare(_STATEMENT, _ONE.encode())
        if done.status != psycopg.pq.ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(done)
        _prepared.add(driver)
    done = driver.pgconn.exec_prepared(_STATEMENT, values, _ALL_BINARY)
    if done.status != psycopg.pq.ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(done)
    return done.command_tuples or 0


def _binary(stream_id: int, before: Head, record: Record) -> list[bytes | None]:
    """The values of `_ONE`, as the server has them.

    Raises:
        struct.error: a number is none of the server's.
    """
    content, content_hash = content_to_store(record)
    return [
        _INT4(stream_id),
        _INT8(before.engine_epoch),
        _INT8(before.position),
        before.hash,
        _INT8(record.position),
        _INT8(record.engine_epoch),
        _INT4(record.schema_version),
        _INT8(record.time_ns),
        record.body,
        content,
        content_hash,
        record.hash,
    ]
