"""The read model in the journal's own PostgreSQL database: new rows by COPY, the rest by pipelined statements."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from refold.journal.stores import postgres_engine
from refold.journal.stores.location import shown
from refold.projections.audit.parts import IN_POSTGRESQL
from refold.projections.audit.schema import Table
from refold.projections.audit.writer import AuditWriter

_FEW_ROWS = 20


class PostgresAuditWriter(AuditWriter):
    """Writes into the database at `url`, whose tables are there."""

    mark = "%s"
    lock_row = " FOR UPDATE"
    parts_sql = IN_POSTGRESQL

    def __init__(self, url: str) -> None:
        """Connect.

        Raises:
            JournalError: the database can't be reached.
        """
        self._name = shown(url)
        self._engine = postgres_engine.create_engine(url, {"synchronous_commit": "off"})
        self._connection: sa.Connection | None = None
        self._raw: Any = None
        self._connect()

    def _connect(self) -> None:
        with self._explained("open"):
            self._connection = self._engine.connect()
            self._raw = self._connection.connection.driver_connection

    @contextmanager
    def transaction(self, *, lock_all: bool = False) -> Iterator[None]:
        """`BEGIN` to `COMMIT`, or `ROLLBACK`."""
        self._reconnect()
        with self._explained("write"), self._raw.transaction():
            if lock_all:
                self._raw.execute("LOCK TABLE audit_projections IN SHARE ROW EXCLUSIVE MODE")
            yield

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """One statement."""
        self._reconnect()
        with self._explained("write"):
            cursor = self._raw.execute(sql, tuple(parameters))
            return cursor.fetchall() if cursor.description is not None else []

    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for each row."""
        with self._explained("write"), self._raw.cursor() as cursor:
            cursor.executemany(sql, rows)

    def insert_new(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """COPY, where it's worth it."""
        if len(rows) < _FEW_ROWS:
            super().insert_new(table, rows)
            return
        sql = f"COPY {table.name} ({', '.join(table.names)}) FROM STDIN"
        with self._explained("write"), self._raw.cursor() as cursor, cursor.copy(sql) as copy:
            for row in rows:
                copy.write_row(row)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._engine.dispose()

    def _reconnect(self) -> None:
        """A connection that broke is made anew; a transaction that was open on it is gone, as a whole."""
        if self._connection is None or self._raw.closed:
            if self._connection is not None:
                self._connection.invalidate()
                self._connection.close()
            self._connect()

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        import psycopg  # noqa: PLC0415 - not everybody has it

        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            raise postgres_engine.explain(error, self._name, doing) from error
        except psycopg.Error as error:
            wrapped = sa.exc.DBAPIError("audit", None, error)
            raise postgres_engine.explain(wrapped, self._name, doing) from error
