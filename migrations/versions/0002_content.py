"""Records get their content beside the body, and its hash where it can't be computed any more.

Rows that are there keep null in both: schema version 1 has everything in the body. Adding a column rewrites no row.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("journal_records", sa.Column("content", sa.Text(), nullable=True))
    op.add_column("journal_records", sa.Column("content_hash", sa.LargeBinary(), nullable=True))
    if op.get_context().dialect.name == "postgresql":  # its own compression costs twice the rest of an append
        op.execute("ALTER TABLE journal_records ALTER COLUMN content SET STORAGE EXTERNAL")


def downgrade() -> None:
    raise NotImplementedError("a journal is never taken back to older tables: restore a backup")
