"""Alembic migrations of the journal's tables, shipped inside the package.

`ensure(url)` is what an engine calls at open: a file that already has today's tables costs a fraction of a millisecond and
imports nothing; otherwise Alembic runs. Commands: `python -m refold.migrations upgrade|current|check`.

A migration of a SQLite file is one `BEGIN IMMEDIATE` transaction, version table and header fields included: it happens
entirely or not at all, and of two processes that migrate at once one waits and then finds nothing left to do. A file that
belongs to another program is refused before anything is written to it.
"""

from refold.journal.stores.location import locate
from refold.journal.stores.sqlite_file import schema_is_current

__all__ = ["check", "current", "ensure", "is_current", "schema_is_current", "upgrade"]


def is_current(url: str) -> bool:
    """Whether the journal has today's tables. A `memory:` journal always has.

    Raises:
        SchemaTooNew: a newer refold made it.
        JournalCorrupt: it isn't ours.
    """
    path = locate(url).path
    return path is None or schema_is_current(path)


def ensure(url: str) -> bool:
    """Create or upgrade the tables if they aren't today's. Whether anything was done."""
    return False if is_current(url) else upgrade(url)


def upgrade(url: str) -> bool:
    """Create or upgrade the tables. Whether anything was done.

    Raises:
        JournalOwned: they aren't today's, and a live engine writes the journal.
        SchemaTooNew: a newer refold made it.
        JournalError: the file isn't ours, or can't be written.
    """
    from refold.migrations.run import upgrade_file  # noqa: PLC0415

    path = locate(url).path
    return path is not None and upgrade_file(path)


def current(url: str) -> str | None:
    """The revision that the journal's tables are at; None if there are none yet."""
    from refold.migrations.run import revision_of  # noqa: PLC0415

    path = locate(url).path
    return None if path is None else revision_of(path)


def check() -> list[str]:
    """The differences between the tables that the migrations make and those the code describes; empty if they agree."""
    from refold.migrations.run import differences  # noqa: PLC0415

    return differences()
