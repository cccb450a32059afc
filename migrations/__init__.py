"""Alembic migrations of the journal's tables, shipped inside the package.

`ensure(url)` is what an engine calls at open: a file that already has today's tables costs a fraction of a millisecond and
imports nothing, a new one gets them at once (`at_once.py`), and on an older one Alembic runs. Commands:
`python -m refold.migrations upgrade|current|check|write`.

A migration of a SQLite file is one `BEGIN IMMEDIATE` transaction, version table and header fields included: it happens
entirely or not at all, and of two processes that migrate at once one waits and then finds nothing left to do. A file that
belongs to another program is refused before anything is written to it. A journal of segments has no tables: to create it is
to make its folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from refold.journal.stores.location import Location, file_path, locate
from refold.journal.stores.segments import folder
from refold.journal.stores.sqlite_file import schema_is_current
from refold.projections.audit import beside

__all__ = [
    "check",
    "current",
    "ensure",
    "ensure_read_model",
    "is_current",
    "mend_read_model",
    "schema_is_current",
    "upgrade",
    "write_down",
]


class _Tables(NamedTuple):
    """How a kind of journal that has tables is migrated. Kinds that have none need no migration."""

    is_current: Callable[[Location], bool]
    upgrade: Callable[[Location], bool]
    revision: Callable[[Location], str | None]


def is_current(url: str) -> bool:
    """Whether the journal has today's tables. One without tables always has.

    Raises:
        SchemaTooNew: a newer refold made it.
        JournalCorrupt: it isn't ours.
    """
    location = locate(url)
    tables = _TABLES.get(location.kind)
    return tables is None or tables.is_current(location)


def ensure(url: str) -> bool:
    """Create or upgrade the tables if they aren't today's. Whether anything was done."""
    return False if is_current(url) else upgrade(url)


def upgrade(url: str) -> bool:
    """Create or upgrade the tables. Whether anything was done.

    Raises:
        JournalOwned: they aren't today's, and a live engine writes the journal.
        SchemaTooNew: a newer refold made it.
        JournalError: the journal isn't ours, or can't be written.
    """
    location = locate(url)
    tables = _TABLES.get(location.kind)
    return tables is not None and tables.upgrade(location)


def current(url: str) -> str | None:
    """The revision that the journal's tables are at; None if there are none yet."""
    location = locate(url)
    tables = _TABLES.get(location.kind)
    return None if tables is None else tables.revision(location)


def ensure_read_model(path: Path) -> None:
    """Create or upgrade a file of its own for a read model, if it hasn't today's tables.

    Raises:
        SchemaTooNew: a newer refold made it.
        JournalError: it's somebody else's file, or can't be written.
    """
    if not beside.is_current(path):
        from refold.migrations.files import upgrade_read_model  # noqa: PLC0415

        upgrade_read_model(path)


def mend_read_model(path: Path | None, url: str | None) -> None:
    """Make what is missing of the tables and views of a read model, in a SQLite file or in a PostgreSQL database.

    Raises:
        JournalError: it can't be written.
    """
    if path is not None:
        from refold.migrations.files import mend_read_model_in  # noqa: PLC0415

        mend_read_model_in(path)
        return
    from refold.migrations.postgres import mend_read_model_in_database  # noqa: PLC0415

    assert url is not None, "a read model is in a file or in a database"
    mend_read_model_in_database(url)


def check() -> list[str]:
    """The differences between the tables that the migrations make and those the code describes; empty if they agree."""
    from refold.migrations.run import differences  # noqa: PLC0415

    return differences()


def write_down() -> None:
    """Write anew what all migrations make in a new file, after one was added."""
    from refold.migrations.run import write_down as write  # noqa: PLC0415

    write()


def _sqlite_is_current(location: Location) -> bool:
    assert location.path is not None
    return schema_is_current(location.path)


def _sqlite_upgrade(location: Location) -> bool:
    from refold.migrations.files import upgrade_file  # noqa: PLC0415

    assert location.path is not None
    return upgrade_file(location.path)


def _sqlite_revision(location: Location) -> str | None:
    from refold.migrations.run import revision_of  # noqa: PLC0415

    assert location.path is not None
    return revision_of(location.path)


def _postgresql_is_current(location: Location) -> bool:
    from refold.migrations.postgres import is_current_database  # noqa: PLC0415

    return is_current_database(location.url)


def _postgresql_upgrade(location: Location) -> bool:
    from refold.migrations.postgres import upgrade_database  # noqa: PLC0415

    return upgrade_database(location.url)


def _postgresql_revision(location: Location) -> str | None:
    from refold.migrations.postgres import revision_of_database  # noqa: PLC0415

    return revision_of_database(location.url)


def _segments_are_current(location: Location) -> bool:
    return folder.look_at(file_path(location)) == "journal"


def _segments_create(location: Location) -> bool:
    return folder.create(file_path(location))


def _segments_format(location: Location) -> str | None:
    return folder.FORMAT if _segments_are_current(location) else None


_TABLES = {
    "sqlite": _Tables(_sqlite_is_current, _sqlite_upgrade, _sqlite_revision),
    "segments": _Tables(_segments_are_current, _segments_create, _segments_format),
    "postgresql": _Tables(_postgresql_is_current, _postgresql_upgrade, _postgresql_revision),
}
