"""A file of its own for the read model of a journal that has no tables, or that can't be written.

It's a SQLite file, made by the same migrations as a journal's, with its own `application_id`: nobody takes it for a journal.
"""

import sqlite3
from pathlib import Path

from refold.journal.errors import JournalCorrupt, SchemaTooNew
from refold.journal.stores.sqlite_file import TABLE_VERSION, connect_readonly, explain

APPLICATION_ID = 0x52454641  # "REFA"


def path_beside(journal: Path) -> Path:
    """Where the read model of the journal at `journal` is."""
    return journal.with_name(f"{journal.name}.audit.db")


def is_current(path: Path) -> bool:
    """Whether the file is there and has today's tables.

    Raises:
        SchemaTooNew: a newer refold made it.
        JournalCorrupt: it's somebody else's.
    """
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        return False
    connection = connect_readonly(path)
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise explain(error, path, "read") from error
    finally:
        connection.close()
    if application_id != APPLICATION_ID and num_tables:
        raise JournalCorrupt(
            f"{path} is where the read model belongs, and isn't one: move it away", position=0, kind="foreign"
        )
    if version > TABLE_VERSION:
        raise SchemaTooNew(
            f"{path} has table version {version}, this refold knows up to {TABLE_VERSION}: use a newer refold, or delete the "
            "file: it is made again from the journal"
        )
    return bool(version == TABLE_VERSION)
