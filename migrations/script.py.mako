"""${message}.

Revision ${up_revision}, after ${down_revision | comma,n}. Raise TABLE_VERSION in refold.journal.stores.sqlite_file with it.
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    raise NotImplementedError("a journal is never taken back to older tables: restore a backup")
