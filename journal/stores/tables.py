"""The journal's tables, described once for every SQL database.

`journal_records` is the truth. `journal_streams` holds each stream's head, which makes an append a compare-and-swap, and
its engine epoch, which fences a writer that lost the stream. `body` and `content` are text, so `sqlite3`, `psql` and `jq` read
them. `content` is null in rows of schema version 1, which have none, and where it was erased; `content_hash` is null where it
follows from the content.

On SQLite the tables are STRICT (a wrong type is refused, not stored), and `journal_records` is WITHOUT ROWID: one b-tree
holds each row once, so that no column can be read from an index while another copy of it lies damaged in the table. On PostgreSQL a record has
no foreign key to its stream: an append selects from the stream's row what it inserts (migration 0006).
The tables are created by the migrations, never from here; `refold.migrations` checks that both agree.
"""

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

VERSION_TABLE = "refold_schema"
"""Where Alembic keeps the revision: never in `alembic_version`, which may be somebody else's."""

# STRICT tables know INTEGER (64 bits there), not BIGINT.
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

DIALECT = "dialect"
"""Under this key a constraint's `info` has the one dialect that has it."""

journal_streams = sa.Table(
    "journal_streams",
    metadata,
    sa.Column("stream_id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("head_position", BIG, nullable=False),
    sa.Column("head_hash", sa.LargeBinary, nullable=False),
    sa.Column("engine_epoch", BIG, nullable=False),
    sqlite_strict=True,
)

journal_records = sa.Table(
    "journal_records",
    metadata,
    sa.Column("stream_id", sa.Integer, nullable=False),
    sa.Column("position", BIG, nullable=False),
    sa.Column("engine_epoch", BIG, nullable=False),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("time_ns", BIG, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("content", sa.Text),
    sa.Column("content_hash", sa.LargeBinary),
    sa.PrimaryKeyConstraint("stream_id", "position"),
    sa.ForeignKeyConstraint(["stream_id"], ["journal_streams.stream_id"], info={DIALECT: "sqlite"}).ddl_if("sqlite"),
    sqlite_strict=True,
    sqlite_with_rowid=False,
)

# A row of a snapshot is large and read whole: it lies in a table with rowids.
journal_snapshots = sa.Table(
    "journal_snapshots",
    metadata,
    sa.Column("stream_id", sa.Integer, sa.ForeignKey("journal_streams.stream_id"), nullable=False),
    sa.Column("position", BIG, nullable=False),
    sa.Column("engine_epoch", BIG, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("stream_id", "position"),
    sqlite_strict=True,
)

journal_archives = sa.Table(
    "journal_archives",
    metadata,
    sa.Column("stream_id", sa.Integer, sa.ForeignKey("journal_streams.stream_id"), nullable=False),
    sa.Column("start", BIG, nullable=False),
    sa.Column("stop", BIG, nullable=False),
    sa.Column("engine_epoch", BIG, nullable=False),
    sa.Column("hash", sa.LargeBinary, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("num_bytes", BIG, nullable=False),
    sa.Column("checksum", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("stream_id", "start"),
    sqlite_strict=True,
)
