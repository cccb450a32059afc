"""Running the migrations: only here and for PostgreSQL is Alembic imported.

Alembic gets our connection, already inside the transaction that also sets the file's header. So a failure at any point,
a kill included, leaves the file as it was.
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError

from refold.journal.errors import JournalError
from refold.journal.stores import sqlite_engine
from refold.journal.stores.sqlite_file import look_at
from refold.journal.stores.tables import DIALECT, VERSION_TABLE, metadata
from refold.migrations import at_once
from refold.migrations.files import writing
from refold.projections.audit.tables import metadata as audit_metadata

one_at_a_time = threading.Lock()  # Alembic's `op` and `context` are this process's, not this thread's


def revision_of(path: Path) -> str | None:
    """The revision in the file's version table."""
    if look_at(path).kind != "journal":
        return None
    engine = sqlite_engine.create_engine(path)
    try:
        with engine.connect().execution_options(**sqlite_engine.READING) as connection:
            return context_of(connection).get_current_revision()
    except sa.exc.SQLAlchemyError as error:
        raise sqlite_engine.explain_sqlalchemy(error, path, "read") from error
    finally:
        engine.dispose()


def head_revision() -> str:
    """The newest revision that this refold ships."""
    head = ScriptDirectory.from_config(config_of(None)).get_current_head()
    assert head is not None
    return head


def run_all(connection: sa.Connection, path: Path) -> None:
    """Run those that the file at `path` lacks, inside the connection's transaction.

    Raises:
        JournalError: its revision isn't one of ours.
    """
    try:
        with one_at_a_time:
            command.upgrade(config_of(connection), "head")
    except CommandError as error:
        raise JournalError(f"cannot migrate {path}: {error}; use the refold that made it, or a newer one") from error


def differences() -> list[str]:
    """How tables made by the migrations differ from those made from the metadata, and from those made at once."""
    with tempfile.TemporaryDirectory() as folder:
        migrated, described = Path(folder, "migrated.db"), Path(folder, "described.db")
        with writing(migrated) as connection:
            run_all(connection, migrated)
            made = at_once.written_down(connection)
        with writing(described) as connection:
            metadata.create_all(connection)
            audit_metadata.create_all(connection)
        described_as: Any = [metadata, audit_metadata]  # Alembic takes several, its types don't say so
        with writing(migrated) as connection:
            found = [repr(difference) for difference in compare_metadata(context_of(connection), described_as)]
            ours = _definitions(connection)
        with writing(described) as connection:
            theirs = _definitions(connection)
    found += [
        f"{name}: migrations make {ours.get(name)}, the code describes {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    return found + _not_written_down(made)


def _not_written_down(made: list[str]) -> list[str]:
    known = at_once.statements()
    found = [f"migrations make what {at_once.FILE} hasn't: {one}" for one in made if one not in known]
    found += [f"{at_once.FILE} has what no migration makes: {one}" for one in known if one not in made]
    return [*found, "write it again: python -m refold.migrations write"] if found else []


def write_down() -> None:
    """Write what all migrations make where `at_once` finds it."""
    with tempfile.TemporaryDirectory() as folder:
        migrated = Path(folder, "migrated.db")
        with writing(migrated) as connection:
            run_all(connection, migrated)
            at_once.write(at_once.written_down(connection))


def context_of(connection: sa.Connection) -> MigrationContext:
    """What Alembic knows of the database behind a connection."""
    dialect = connection.dialect.name

    def is_here(described: Any, *_: object) -> bool:
        return described.info.get(DIALECT, dialect) == dialect if isinstance(described, sa.Constraint) else True

    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE, "include_object": is_here})


def _definitions(connection: sa.Connection) -> dict[str, str]:
    """Every table's and index's definition as SQLite keeps it, blanks apart. Views are what the migrations say they are."""
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'view' AND name NOT LIKE 'sqlite_%'"
    )
    return {name: " ".join(sql.split()) for name, sql in rows if name != VERSION_TABLE}


def config_of(connection: sa.Connection | None) -> Config:
    """Alembic's configuration, for a connection inside its transaction."""
    config = Config()
    config.attributes["connection"] = connection
    config.set_main_option("script_location", "refold:migrations")
    config.set_main_option("path_separator", "os")
    return config
