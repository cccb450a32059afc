"""Which tables and views a read model consists of, and which of them are gone: whoever has the right to drop one can.

All of them are made of the journal, so nothing is lost with them: `refold audit rebuild` makes them anew.
"""

from collections.abc import Collection

from refold.projections.audit.catalogue import VIEWS
from refold.projections.audit.schema import TABLES

IN_SQLITE = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
IN_POSTGRESQL = """
SELECT relname FROM pg_catalog.pg_class WHERE relkind IN ('r', 'p', 'v') AND pg_catalog.pg_table_is_visible(oid)
"""


def lost_tables(there: Collection[str]) -> list[str]:
    """The tables that are not among the names that are there."""
    return [table.name for table in TABLES if table.name not in there]


def lost_views(there: Collection[str]) -> list[str]:
    """As `lost_tables`, the views."""
    return [view.name for view in VIEWS if view.name not in there]
