"""Alembic's entry point. It runs only on a connection that `refold.migrations.run` hands over, inside its transaction."""

from alembic import context

from refold.journal.stores.tables import VERSION_TABLE, metadata
from refold.projections.audit.tables import metadata as audit_metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("run `python -m refold.migrations upgrade URL`: migrations need refold's own connection")

context.configure(
    connection=connection,
    target_metadata=[metadata, audit_metadata],
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
