"""Alembic migrations of the journal's tables, shipped inside the package."""
