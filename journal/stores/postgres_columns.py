"""Are the journal's tables in a PostgreSQL database as they were made? A hand can drop one, or give a column another type.

What is read then is no record, and every query fails in a way of its own. So it's asked on opening, from the server's own tables, in one
query; a column that was added harms nobody.
"""

from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from refold.journal.errors import JournalCorrupt
from refold.journal.stores.sparing_tables import SPARING
from refold.journal.stores.tables import metadata

_COLUMNS_SQL = """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod)
FROM unnest(%s::text[]) AS t (name) JOIN pg_catalog.pg_class AS c ON c.oid = to_regclass(quote_ident(t.name))
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid WHERE a.attnum > 0 AND NOT a.attisdropped
"""


def require_columns(connection: sa.Connection, name: str) -> frozenset[str]:
    """See to it that the tables of today's version are there, and their columns of the types that they were made with.

    Returns the tables that are gone of those that records are read without.

    Raises:
        JournalCorrupt: something else isn't as it was made.
    """
    found: dict[str, dict[str, str]] = {}
    for table, column, kind in connection.exec_driver_sql(_COLUMNS_SQL, ([*metadata.tables],)):
        found.setdefault(table, {})[column] = kind
    for (table, column), wanted in _wanted().items():
        if table not in found:
            if table in SPARING:
                continue
            raise _damaged(name, f"its table {table} is gone")
        if (kind := found[table].get(column)) is None:
            raise _damaged(name, f"its column {table}.{column} is gone")
        if kind != wanted:
            raise _damaged(name, f"its column {table}.{column} has the type {kind}, not {wanted}")
    return SPARING - found.keys()


@cache
def _wanted() -> dict[tuple[str, str], str]:
    """The type of each column, as the server calls it."""
    dialect: Any = postgresql.dialect
    return {
        (table.name, column.name): column.type.compile(dialect=dialect()).lower()
        for table in metadata.tables.values()
        for column in table.columns
    }


def _damaged(name: str, how: str) -> JournalCorrupt:
    return JournalCorrupt(f"{name} is damaged: {how}; restore it from a backup", position=0, kind="undecodable")
