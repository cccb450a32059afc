"""History: what a journal says, read without an engine, a worker or a model.

Everything here reads records, folds them with the same code that the live engine folds with, and returns structured facts.
Nothing here writes, and nothing imports torch or SQLAlchemy.
"""
