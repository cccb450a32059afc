"""Running the migrations: the only place that imports Alembic.

Alembic gets our connection, already inside the transaction that also sets the file's header. So a failure at any point,
a kill included, leaves the file as it was.
"""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError

from refold.journal.errors import JournalError, JournalOwned
from refold.journal.stores import sqlite_engine
from refold.journal.stores.ownership import owner_of
from refold.journal.stores.sqlite_file import APPLICATION_ID, TABLE_VERSION, look_at, schema_is_current
from refold.journal.stores.sqlite_marks import check_gone, check_marks, forget_marks, marks_of
from refold.journal.stores.tables import VERSION_TABLE, metadata
from refold.projections.audit import beside
from refold.projections.audit.tables import metadata as audit_metadata

_PATIENCE_S = 30.0
one_at_a_time = threading.Lock()  # Alembic's `op` and `context` are this process's, not this thread's


def upgrade_file(path: Path) -> bool:
    """Bring the SQLite file at `path` to today's tables, creating it if it's absent. Whether anything was done."""
    if schema_is_current(path):
        return False
    owner = owner_of(path)
    if owner is not None:
        if schema_is_current(path):  # whoever opened it since has migrated it first
            return False
        raise JournalOwned(f"{path} is written by process {owner} and needs a migration: stop that engine first")
    _settle_marks(path)
    with _writing(path) as connection:
        _upgrade(connection)
    assert schema_is_current(path), "a migrated file is current"
    return True


def _settle_marks(path: Path) -> None:
    """A file that's gone, or has lost even its tables, has lost what was acknowledged in it; a new one starts without marks.

    Raises:
        JournalCorrupt: it has.
    """
    marks = marks_of(path)  # first: nobody makes marks before there is a file
    kind = look_at(path).kind
    if kind == "absent":
        check_gone(path, marks)
        forget_marks(path)
    elif kind == "empty":
        check_marks(path, marks, {})


def upgrade_read_model(path: Path) -> None:
    """Bring a file of its own for the read model to today's tables, creating it if it's absent."""
    if not beside.is_current(path):
        with _writing(path) as connection:
            _upgrade(connection, beside.APPLICATION_ID)


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


def differences() -> list[str]:
    """How tables made by the migrations differ from those made from the metadata: Alembic's view, then SQLite's own."""
    with tempfile.TemporaryDirectory() as folder:
        migrated, described = Path(folder, "migrated.db"), Path(folder, "described.db")
        upgrade_file(migrated)
        with _writing(described) as connection:
            metadata.create_all(connection)
            audit_metadata.create_all(connection)
        described_as: Any = [metadata, audit_metadata]  # Alembic takes several, its types don't say so
        with _writing(migrated) as connection:
            found = [repr(difference) for difference in compare_metadata(context_of(connection), described_as)]
            ours = _definitions(connection)
        with _writing(described) as connection:
            theirs = _definitions(connection)
    found += [
        f"{name}: migrations make {ours.get(name)}, the code describes {theirs.get(name)}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    return found


def _upgrade(connection: sa.Connection, application_id: int = APPLICATION_ID) -> None:
    with one_at_a_time:
        command.upgrade(config_of(connection), "head")
    connection.exec_driver_sql(f"PRAGMA application_id={application_id}")
    connection.exec_driver_sql(f"PRAGMA user_version={TABLE_VERSION}")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[sa.Connection]:
    """One write transaction on the file, with our errors."""
    engine = sqlite_engine.create_engine(path, busy_timeout_s=_PATIENCE_S)
    doing = "open"
    try:
        with engine.connect() as connection:
            sqlite_engine.enter_wal(connection, path, patience_s=_PATIENCE_S)
            doing = "migrate"
            with connection.begin():
                yield connection
    except sa.exc.SQLAlchemyError as error:
        raise sqlite_engine.explain_sqlalchemy(error, path, doing) from error
    except CommandError as error:
        raise JournalError(f"cannot migrate {path}: {error}; use the refold that made it, or a newer one") from error
    finally:
        engine.dispose()


def context_of(connection: sa.Connection) -> MigrationContext:
    """What Alembic knows of the database behind a connection."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})


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
