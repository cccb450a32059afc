"""The read model's tables for SQLAlchemy, built from their description: what the migrations are compared with."""

from typing import Any

import sqlalchemy as sa

from refold.journal.stores.tables import BIG
from refold.journal.stores.tables import metadata as journal_metadata
from refold.projections.audit.schema import TABLES, Column, Table

metadata = sa.MetaData(naming_convention=journal_metadata.naming_convention)

_KINDS: dict[str, Any] = {"int": BIG, "text": sa.Text, "blob": sa.LargeBinary}


def index_name(table: Table, columns: tuple[str, ...]) -> str:
    """The name of an index: the table's, and its columns' but for the projection."""
    return f"ix_{table.name}_{'_'.join(column for column in columns if column != 'projection_id')}"


def _column(column: Column) -> sa.Column[object]:
    return sa.Column(column.name, _KINDS[column.kind], nullable=column.nullable, autoincrement=False)


def _build(table: Table) -> sa.Table:
    return sa.Table(
        table.name,
        metadata,
        *map(_column, table.columns),
        sa.PrimaryKeyConstraint(*table.key),
        *(sa.Index(index_name(table, columns), *columns) for columns in table.indexes),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )


BUILT = {table.name: _build(table) for table in TABLES}
