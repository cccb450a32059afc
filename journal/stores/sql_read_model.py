"""The audit read model of a journal in the same database forgets what a redaction erases, in the same transaction.

The read model is projected from the journal by others, and would hear of it later; but what is erased must be gone at once.
It holds tokens in one column only, and nothing else that was said.
"""

from collections.abc import Sequence

import sqlalchemy as sa

from refold.journal.codec import decode
from refold.journal.events import ContentRedacted
from refold.journal.record import Record

_PROJECTIONS = """
SELECT p.projection_id FROM audit_projections AS p JOIN journal_streams AS s ON s.name = p.stream
WHERE s.stream_id = :stream_id
"""
# Rows whose projection is in no list any more, whosever they were: the next audit throws them away, and nobody knows when that is.
# From one projection's tokens to the next one's, by the index.
_UNLISTED = """
WITH RECURSIVE ids (id) AS (
    SELECT min(projection_id) FROM audit_tokens
    UNION ALL
    SELECT (SELECT min(t.projection_id) FROM audit_tokens AS t WHERE t.projection_id > ids.id) FROM ids WHERE ids.id IS NOT NULL
)
SELECT id FROM ids WHERE id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM audit_projections AS p WHERE p.projection_id = ids.id)
"""
_FORGET = (
    f"UPDATE audit_tokens SET token_id = NULL WHERE projection_id IN ({_UNLISTED}) AND handle = :handle",  # noqa: S608
    f"UPDATE audit_tokens SET token_id = NULL WHERE projection_id IN ({_PROJECTIONS}) AND handle = :handle",  # noqa: S608
    f"UPDATE audit_requests SET is_redacted = 1 WHERE projection_id IN ({_PROJECTIONS}) AND handle = :handle",  # noqa: S608
)


def forget_redacted(connection: sa.Connection, stream_id: int, records: Sequence[Record]) -> None:
    """Forget the tokens of the requests that these records say were redacted."""
    for record in records:
        for event in decode(record):
            for handle in event.handles if isinstance(event, ContentRedacted) else ():
                for sql in _FORGET:
                    bound = {"stream_id": stream_id, "handle": handle}
                    connection.execute(
                        sa.text(sql), {name: value for name, value in bound.items() if f":{name}" in sql}
                    )
