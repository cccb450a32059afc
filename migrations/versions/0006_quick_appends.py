"""On PostgreSQL, an append does less: no foreign key from a record to its stream, and a record lies in one row while it fits in a page.

An append inserts what it selects from the stream's row, whose lock it holds until it commits: no record comes in without its
stream, and nothing deletes a stream. The key looked the same row up again, in a query of its own, and locked it again: a tenth of
the server's work. Streams have few snapshots and archives, and theirs stay.

Bodies and contents of more than 2 kB went to a table of their own, in pieces of 2 kB that each need a row and an entry in an index.
Now only those of more than a page do. Where all records have just over half a page, that takes up to half as much room again;
where they differ, none: the smaller ones fill the gaps. Rows that are there stay as they are.

SQLite's table keeps the key. It's checked in the same process for next to nothing, and to be rid of it all records would have
to be copied.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

TABLE, KEY = "journal_records", "fk_journal_records_stream_id"
_PAGE_HEADER = 32  # bytes of a page that aren't its only row's


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {KEY}")  # restored copies may be without
        page = int(op.get_bind().exec_driver_sql("SHOW block_size").scalar_one())
        op.execute(f"ALTER TABLE {TABLE} SET (toast_tuple_target = {page - _PAGE_HEADER})")


def downgrade() -> None:
    """The one way back that loses nothing: each record has its stream, which the server makes sure of."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {TABLE} RESET (toast_tuple_target)")
        op.create_foreign_key(op.f(KEY), TABLE, "journal_streams", ["stream_id"], ["stream_id"])
