"""Bringing a SQLite file to today's tables: a new one at once, an older one by the migrations that it lacks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from refold.journal.errors import JournalError, JournalOwned
from refold.journal.stores import sqlite_engine
from refold.journal.stores.ownership import owner_of
from refold.journal.stores.sqlite_file import APPLICATION_ID, TABLE_VERSION, look_at, schema_is_current
from refold.journal.stores.sqlite_marks import check_gone, check_marks, forget_marks, marks_of
from refold.migrations import at_once
from refold.projections.audit import beside

_PATIENCE_S = 30.0


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
    with writing(path) as connection:
        _upgrade(connection, path)
    if not schema_is_current(path):
        assert look_at(path).kind == "absent", "a migrated file is current"
        raise JournalError(f"{path} was taken away while its tables were made: see who removes it, then try again")
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
        with writing(path) as connection:
            _upgrade(connection, path, beside.APPLICATION_ID)


def mend_read_model_in(path: Path) -> None:
    """Make what is missing of the read model in a SQLite file."""
    with writing(path) as connection:
        at_once.mend(connection)


def _upgrade(connection: sa.Connection, path: Path, application_id: int = APPLICATION_ID) -> None:
    if at_once.is_blank(connection):  # asked inside the transaction: who waited for another's finds its tables
        at_once.make(connection)
    else:
        from refold.migrations.run import run_all  # noqa: PLC0415 - imports Alembic

        run_all(connection, path)
    connection.exec_driver_sql(f"PRAGMA application_id={application_id}")
    connection.exec_driver_sql(f"PRAGMA user_version={TABLE_VERSION}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[sa.Connection]:
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
    finally:
        engine.dispose()
