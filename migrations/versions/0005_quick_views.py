"""The views `tokens` and `violations`, asked of a whole journal of a million events, within the second that a browser of tables allows.

Their rows and columns stay what they are. SQLite reads a whole row of a table without rowids to compare its key, and that of a
projection has a large blob in it: so the projection is looked up first, once, and not again for each token. And what is counted for
each request or step is counted where an index has it, instead of in a table of all of them.
"""

import sqlalchemy as sa
from alembic import op

from refold.migrations.views import read_view

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

VIEWS = ("tokens", "violations")


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        for view in VIEWS:
            op.execute(f"DROP VIEW {view}")
            op.execute(f"CREATE VIEW {view} AS {read_view('r0005', view)}")
        _list_views_last()
    else:
        for view in VIEWS:  # replaced, not dropped: whoever was allowed to read it still is
            op.execute(f"CREATE OR REPLACE VIEW {view} AS {read_view('r0005', view)}")


def _list_views_last() -> None:
    """The table that lists them is made last again; revision 0004 says why."""
    rows = op.get_bind().execute(sa.text("SELECT name, question FROM audit_views ORDER BY name")).all()
    op.drop_table("audit_views")
    listed = op.create_table(
        "audit_views",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_audit_views")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    assert listed is not None
    op.bulk_insert(listed, [{"name": name, "question": question} for name, question in rows])


def downgrade() -> None:
    raise NotImplementedError("a journal is never taken back to older tables: restore a backup")
