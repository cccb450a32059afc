"""On PostgreSQL, records no longer have a foreign key to their stream: its check was a tenth of an append.

An append inserts what it selects from the stream's row, whose lock it holds until it commits: no record comes in without its
stream, and nothing deletes a stream. The key looked the same row up again, in a query of its own, and locked it again. Streams
have few snapshots and archives, and theirs stay.

SQLite's table keeps the key. It's checked in the same process for next to nothing, and to be rid of it all records would have
to be copied.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLE, KEY = "journal_records", "fk_journal_records_stream_id"


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {KEY}")  # restored copies may be without


def downgrade() -> None:
    """The one way back that loses nothing: each record has its stream, which the server makes sure of."""
    if op.get_context().dialect.name == "postgresql":
        op.create_foreign_key(op.f(KEY), TABLE, "journal_streams", ["stream_id"], ["stream_id"])
