"""Tables of a SQL journal that records are read without, and what it means when a hand has dropped one.

Snapshots spare a fold from the beginning, and are made of records. A list of archives names files with older records; where the table
of records begins at 0, there are none, and where it doesn't, the gap shows. So whoever reads goes on as if the table were empty. Whoever writes is
refused: he would write to a journal that isn't as it was made, and a whole one is a copy away. PostgreSQL has one table more of this
kind, `refold_schema`, of which a database without it is read if all tables are of today's version.
"""

from collections.abc import Collection

from refold.journal.beside import DamageBeside

SNAPSHOTS, ARCHIVES = "journal_snapshots", "journal_archives"
VERSION_TABLE = "refold_schema"  # as `tables` has it, which readers of SQLite do without
SPARING = frozenset({SNAPSHOTS, ARCHIVES})


def damage_of_missing(name: str, tables: Collection[str]) -> list[DamageBeside]:
    """What is to be said of the tables that the journal `name` lacks."""
    why = "no record is in it (unindexed): `refold copy` makes a whole journal"
    return [
        DamageBeside(f"{name} is damaged: its table {table} is {_how(table)}, and {why}", kind="unindexed")
        for table in sorted(tables)
    ]


def check_none_missing(name: str, tables: Collection[str]) -> None:
    """For whoever is about to write.

    Raises:
        DamageBeside: a table is missing.
    """
    for damage in damage_of_missing(name, tables):
        raise damage


def _how(table: str) -> str:
    return "gone, or empty" if table == VERSION_TABLE else "gone"
