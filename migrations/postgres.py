"""Running the migrations on PostgreSQL: one transaction under a lock, so that it happens entirely or not at all, once."""

import contextlib
from collections.abc import Iterator

import sqlalchemy as sa
from alembic import command
from alembic.util.exc import CommandError

from refold.journal.errors import JournalError, JournalOwned
from refold.journal.stores import postgres_engine, postgres_owner
from refold.journal.stores.location import shown
from refold.journal.stores.sparing_tables import check_none_missing
from refold.migrations.at_once import OUTDATE
from refold.migrations.run import config_of, context_of, one_at_a_time
from refold.migrations.views import newest_view
from refold.projections.audit.catalogue import VIEWS
from refold.projections.audit.parts import IN_POSTGRESQL, lost_tables, lost_views
from refold.projections.audit.schema import VIEW_LIST
from refold.projections.audit.tables import BUILT
from refold.projections.audit.tables import metadata as audit_metadata

_PATIENCE_MS = 30_000
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('refold.migrations', 0))"


def is_current_database(url: str) -> bool:
    """Whether the database has today's tables.

    Raises:
        JournalCorrupt: it says so, and they aren't.
    """
    with _connected(url, "read") as connection:
        is_current = postgres_engine.is_current(postgres_engine.table_version(connection, shown(url)), shown(url))
        if is_current:
            check_none_missing(shown(url), postgres_engine.missing_tables(connection, shown(url)))
        return is_current


def upgrade_database(url: str) -> bool:
    """Bring the database's tables to today's, creating them if they're absent. Whether anything was done."""
    if is_current_database(url):
        return False
    name = shown(url)
    with _connected(url, "migrate") as connection, connection.begin():
        connection.exec_driver_sql(_LOCK)
        version = postgres_engine.table_version(connection, name)
        if postgres_engine.is_current(version, name):
            return False
        postgres_engine.require_utf8(connection, name)
        for _, process in postgres_owner.owners(connection) if version else ():
            raise JournalOwned(
                f"{name} is written by process {process or '?'} and needs a migration: stop that engine first"
            )
        with one_at_a_time:
            command.upgrade(config_of(connection), "head")
    assert is_current_database(url), "a migrated database is current"
    return True


def mend_read_model_in_database(url: str) -> None:
    """Make the tables, indexes and views that are missing of the read model; those that are there stay, with the rights to them.

    If a table was missing, so were rows: then every projection is one to be built again.
    """
    with _connected(url, "mend") as connection, connection.begin():
        connection.exec_driver_sql(_LOCK)
        there = set(connection.exec_driver_sql(IN_POSTGRESQL).scalars())
        audit_metadata.create_all(connection)
        for index in (index for table in BUILT.values() for index in table.indexes):
            index.create(connection, checkfirst=True)
        for view in lost_views(there):
            connection.execute(sa.text(f"CREATE VIEW {view} AS {newest_view(view)}"))
        lost = lost_tables(there)
        if VIEW_LIST.name in lost:
            rows = [{"name": view.name, "question": view.question} for view in VIEWS]
            connection.execute(sa.insert(BUILT[VIEW_LIST.name]), rows)
        if {*lost} - {VIEW_LIST.name}:
            connection.exec_driver_sql(OUTDATE)


def revision_of_database(url: str) -> str | None:
    """The revision in the database's version table."""
    with _connected(url, "read") as connection:
        if not postgres_engine.table_version(connection, shown(url)):
            return None
        return context_of(connection).get_current_revision()


@contextlib.contextmanager
def _connected(url: str, doing: str) -> Iterator[sa.Connection]:
    engine = postgres_engine.create_engine(url, {"lock_timeout": str(_PATIENCE_MS)}, autocommit=False)
    try:
        with engine.connect() as connection:
            yield connection
    except sa.exc.SQLAlchemyError as error:
        raise postgres_engine.explain(error, shown(url), doing) from error
    except CommandError as error:
        raise JournalError(
            f"cannot {doing} {shown(url)}: {error}; use the refold that made it, or a newer one"
        ) from error
    finally:
        engine.dispose()
