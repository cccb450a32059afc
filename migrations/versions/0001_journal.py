"""The journal: streams with their heads, and records."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "journal_streams",
        sa.Column("stream_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("head_position", BIG, nullable=False),
        sa.Column("head_hash", sa.LargeBinary(), nullable=False),
        sa.Column("engine_epoch", BIG, nullable=False),
        sa.PrimaryKeyConstraint("stream_id", name=op.f("pk_journal_streams")),
        sa.UniqueConstraint("name", name=op.f("uq_journal_streams_name")),
        sqlite_strict=True,
    )
    op.create_table(
        "journal_records",
        sa.Column("stream_id", sa.Integer(), nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("engine_epoch", BIG, nullable=False),
        sa.Column("schema_version", sa.Integer(), nullable=False),
        sa.Column("time_ns", BIG, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("stream_id", "position", name=op.f("pk_journal_records")),
        sa.ForeignKeyConstraint(
            ["stream_id"], ["journal_streams.stream_id"], name=op.f("fk_journal_records_stream_id")
        ),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    if op.get_context().dialect.name == "postgresql":  # its own compression costs twice the rest of an append
        op.execute("ALTER TABLE journal_records ALTER COLUMN body SET STORAGE EXTERNAL")


def downgrade() -> None:
    raise NotImplementedError("a journal is never taken back to older tables: restore a backup")
