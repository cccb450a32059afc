"""What a PostgreSQL journal has beside its records, looked at: the rows of its streams, tables that only spare work, rows of no stream.

A stream's row lags behind its records by design (`postgres.py`): it names one of them, or the end. One that names a record that isn't
there in that form is damage, as is one of an impossible engine epoch. All is asked in three queries, each a few seeks for each stream.
"""

from collections.abc import Collection

import sqlalchemy as sa

from refold.journal.beside import DamageBeside, worst_first
from refold.journal.record import EMPTY_HEAD, follows
from refold.journal.stores.columns import RECORD_COLUMNS, row_to_record
from refold.journal.stores.rows import Judged, judge, stream_row
from refold.journal.stores.sparing_tables import damage_of_missing
from refold.journal.stores.strangers import STRANGERS_SQL, Strangers, damage_of

# ruff: noqa: S608 - what is put into SQL are names of columns

_ROWS = """
SELECT s.name, s.head_position, s.head_hash, s.engine_epoch, t.position, t.hash, t.engine_epoch, (
    SELECT p.hash FROM journal_records AS p WHERE p.stream_id = s.stream_id AND p.position = s.head_position - 1
)
FROM journal_streams AS s LEFT JOIN LATERAL (
    SELECT r.position, r.hash, r.engine_epoch FROM journal_records AS r WHERE r.stream_id = s.stream_id AND r.position >= 0
    ORDER BY r.position DESC LIMIT 1
) AS t ON true
"""
_FIRST = f"SELECT {', '.join(RECORD_COLUMNS)} FROM journal_records WHERE stream_id = %s AND position = 0"


def judged_rows(connection: sa.Connection, stream: str | None = None) -> dict[str, Judged]:
    """What the row of each stream, or of one, is worth, once it has caught up with its records."""
    sql, parameters = (_ROWS, ()) if stream is None else (_ROWS + "WHERE s.name = %s", (stream,))
    found = {}
    for name, *rest, named in connection.exec_driver_sql(sql, parameters):
        row = stream_row(name, (rest[0], rest[1], rest[2]), (rest[3], rest[4], rest[5]))
        if row.tail is not None and 0 <= row.head.position < row.tail.position and named in {None, row.head.hash}:
            row = row._replace(head=row.tail._replace(engine_epoch=row.head.engine_epoch))
        found[name] = judge(row)
    return found


def strangers(connection: sa.Connection) -> list[DamageBeside]:
    """The damage of rows that are in no stream."""
    rows = [Strangers(*row) for row in connection.exec_driver_sql(STRANGERS_SQL)]
    return [damage_of(each, is_stream=_begins(connection, each)) for each in rows]


def beside(connection: sa.Connection, name: str, missing: Collection[str]) -> list[DamageBeside]:
    """All of it; what concerns records comes first."""
    judged = (each.damage for each in judged_rows(connection).values())
    rows = [damage for damage in judged if damage is not None]
    return worst_first([*strangers(connection), *damage_of_missing(name, missing), *rows])


def _begins(connection: sa.Connection, each: Strangers) -> bool:
    """Whether there is a record that a stream begins with."""
    rows = connection.exec_driver_sql(_FIRST, (each.stream_id,))
    return any(follows(EMPTY_HEAD, row_to_record(row)) for row in rows)
