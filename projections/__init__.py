"""Projections: everything that is known about requests, queues, blocks and steps, as folds over the journal's events."""
