"""Today's tables at once: what all migrations make in an empty SQLite file, written down in `today.sql`.

Most files are new. They get their tables in a tenth of the time that the migrations take, and without Alembic.
`python -m refold.migrations check` compares the two; whoever adds a migration writes the file again, with `write`.
"""

from functools import cache
from importlib.resources import files
from pathlib import Path

import sqlalchemy as sa

from refold.journal.stores.tables import VERSION_TABLE

FILE = "today.sql"
_END = ";\n\n"
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
