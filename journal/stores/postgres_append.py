"""An append to a PostgreSQL journal: one statement, and for one record prepared once in each session and executed by libpq itself.

A cursor of the driver's looks up how each value is sent, and which statement was prepared, and waits in steps: half of the CPU of
a lone append. Here all of that is known: a record's values are numbers, texts and hashes, in the server's binary formats.
The call waits with the interpreter given away. It can't be interrupted before the server has answered, or the session is lost; how
long that takes is bounded as for any other (`lock_timeout`, and probes of a silent connection).

Source: PostgreSQL's documentation, "Command Execution Functions" (`PQexecPrepared`) and its binary formats.
"""

import struct
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


class Appends:
    """The appends of one session."""

    __slots__ = ("_driver", "_is_prepared", "_psycopg")

    def __init__(self, driver: "psycopg.Connection[Any]") -> None:
        import psycopg  # noqa: PLC0415

        self._driver = driver
        self._psycopg = psycopg
        self._is_prepared = False

    def append(self, stream_id: int, before: Head, records: Sequence[Record]) -> bool:
        """Add records behind the head, which must be `before`; whether it was. On disk when this returns.

        Raises:
            sqlalchemy.exc.DBAPIError: as SQLAlchemy would have told it.
        """
        try:
            if len(records) == 1:
                num_in = self._one(_binary(stream_id, before, records[0]))
            else:
                num_in = self._many(stream_id, before, records)
        except self._psycopg.Error as error:
            raise sa.exc.DBAPIError(_ONE, None, error, connection_invalidated=self._driver.closed) from error
        except struct.error as error:
            too_large = self._psycopg.errors.NumericValueOutOfRange(f"record {records[0].position}: {error}")
            raise sa.exc.DBAPIError(_ONE, None, too_large) from error
        assert num_in in {0, len(records)}, f"{num_in} of {len(records)} records went in"
        return num_in > 0

    def _many(self, stream_id: int, before: Head, records: Sequence[Record]) -> int:
        columns = zip(*map(record_to_row, records), strict=True)
        values: dict[str, Any] = dict(zip(RECORD_COLUMNS, map(list, columns), strict=True))
        values |= {
            "stream_id": stream_id,
            "epoch": before.engine_epoch,
            "before": before.position,
            "previous": before.hash,
        }
        return self._driver.execute(_MANY, values).rowcount

    def _one(self, values: Any) -> int:  # the driver's types don't know null
        session = self._driver.pgconn
        if not self._is_prepared:
            self._check(session.prepare(_STATEMENT, _ONE.encode()))
            self._is_prepared = True
        done = session.exec_prepared(_STATEMENT, values, _ALL_BINARY)
        self._check(done)
        return done.command_tuples or 0

    def _check(self, done: "psycopg.pq.abc.PGresult") -> None:
        if done.status != self._psycopg.pq.ExecStatus.COMMAND_OK:
            raise self._psycopg.errors.error_from_result(done)


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
