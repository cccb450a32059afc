"""Snapshots of the fold, and the archives that hold a stream's oldest records."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "journal_snapshots",
        sa.Column("stream_id", sa.Integer(), nullable=False),
        sa.Column("position", BIG, nullable=False),
        sa.Column("engine_epoch", BIG, nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("stream_id", "position", name=op.f("pk_journal_snapshots")),
        sa.ForeignKeyConstraint(
            ["stream_id"], ["journal_streams.stream_id"], name=op.f("fk_journal_snapshots_stream_id")
        ),
        sqlite_strict=True,
    )
    op.create_table(
        "journal_archives",
        sa.Column("stream_id", sa.Integer(), nullable=False),
        sa.Column("start", BIG, nullable=False),
        sa.Column("stop", BIG, nullable=False),
        sa.Column("engine_epoch", BIG, nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("num_bytes", BIG, nullable=False),
        sa.Column("checksum", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("stream_id", "start", name=op.f("pk_journal_archives")),
        sa.ForeignKeyConstraint(
            ["stream_id"], ["journal_streams.stream_id"], name=op.f("fk_journal_archives_stream_id")
        ),
        sqlite_strict=True,
    )


def downgrade() -> None:
    raise NotImplementedError("a journal is never taken back to older tables: restore a backup")
