"""Today's tables at once: what all migrations make in an empty SQLite file, written down in `today.sql`.

Most files are new. They get their tables in a tenth of the time that the migrations take, and without Alembic.
`python -m refold.migrations check` compares the two; whoever adds a migration writes the file again, with `write`.
"""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

import sqlalchemy as sa

from refold.journal.stores.tables import VERSION_TABLE
from refold.projections.audit.schema import TABLES

FILE = "today.sql"
_END = ";\n\n"
_LIST = "audit_views"
_OF_READ_MODEL = ("audit_", "ix_audit_")
_MAKES = re.compile(r"(?:CREATE (TABLE|INDEX|VIEW)|INSERT INTO) (\w+)")
OUTDATE = "UPDATE audit_projections SET version = 0"
_HEADER = (
    "-- Written by `python -m refold.migrations write` from the migrations, which are where to change anything.\n\n"
)


def is_blank(connection: sa.Connection) -> bool:
    """Whether the database has nothing in it yet."""
    return connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first() is None


def make(connection: sa.Connection) -> None:
    """Make the tables and the views, inside the connection's transaction."""
    for statement in statements():
        connection.exec_driver_sql(statement)


def mend(connection: sa.Connection) -> None:
    """Make what is missing of a read model, and all its views, inside the connection's transaction.

    The table that lists the views is made last, for the reason that revision 0004 gives. If a table was missing, so were rows: then
    every projection is one to be built again.
    """
    there = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
    connection.exec_driver_sql(f"DROP TABLE IF EXISTS {_LIST}")
    for statement in statements():
        kind, name = _made_by(statement)
        if kind == "VIEW":
            connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
        if kind == "VIEW" or name == _LIST or (name.startswith(_OF_READ_MODEL) and name not in there):
            connection.exec_driver_sql(statement)
    _tell_planner(connection)
    if not {table.name for table in TABLES} - {_LIST} <= there:
        connection.exec_driver_sql(OUTDATE)


def _made_by(statement: str) -> tuple[str, str]:
    """What a statement makes, and the name of that; or `ROW` and the table that it puts one into."""
    if made := _MAKES.match(statement):
        return made[1] or "ROW", made[2]
    return "", ""


def _tell_planner(connection: sa.Connection) -> None:
    connection.exec_driver_sql("ANALYZE audit_projections")
    connection.exec_driver_sql("DELETE FROM sqlite_stat1 WHERE tbl LIKE 'audit\\_%' ESCAPE '\\'")
    for statement in statements():
        if _made_by(statement) == ("ROW", "sqlite_stat1"):
            connection.exec_driver_sql(statement)


@cache
def statements() -> tuple[str, ...]:
    """The statements of `today.sql`."""
    text = (files("refold.migrations") / FILE).read_text(encoding="utf-8")
    return tuple(text.removeprefix(_HEADER).removesuffix(_END).split(_END))


def written_down(connection: sa.Connection) -> list[str]:
    """The statements that make what the database has: its tables, indexes and views, and the rows of those not empty."""
    made = connection.exec_driver_sql(
        "SELECT name, type, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
    ).all()
    analyze = ["ANALYZE audit_projections"]  # an empty table: it makes sqlite_stat1, and nothing else
    tables = [VERSION_TABLE, "sqlite_stat1", *(name for name, kind, _ in made if kind == "table")]
    rows = [row for table in dict.fromkeys(tables) for row in _rows(connection, table)]
    return [*(sql for *_, sql in made), *analyze, *rows]


def _rows(connection: sa.Connection, table: str) -> list[str]:
    columns = connection.exec_driver_sql("SELECT name FROM pragma_table_info(?)", (table,)).scalars().all()
    quoted = " || ', ' || ".join(f"quote({column})" for column in columns)
    values = connection.exec_driver_sql(f"SELECT {quoted} FROM {table}").scalars()  # noqa: S608 - our own names
    into = f"INSERT INTO {table} ({', '.join(columns)})"
    return [f"{into} VALUES ({value})" for value in sorted(values)]


def write(made: list[str]) -> None:
    """Write `today.sql`."""
    Path(str(files("refold.migrations")), FILE).write_text(_HEADER + _END.join(made) + _END, encoding="utf-8")
