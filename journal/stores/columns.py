"""A record as a row of `journal_records`, and back: the one place that knows which fields are stored as text.

The columns after `stream_id` have the names of `Record`'s fields and come in its order. What is UTF-8 in a record is text in
a table.
"""

from collections.abc import Sequence
from typing import Any

from refold.journal.record import Record, content_to_store, restored

RECORD_COLUMNS = Record._fields


def record_to_row(record: Record) -> tuple[Any, ...]:
    """The values of a record, in the order of `RECORD_COLUMNS`."""
    content, content_hash = content_to_store(record)
    text = None if content is None else content.decode()
    return (*record[:4], record.body.decode(), text, content_hash, record.hash)


def row_to_record(row: Sequence[Any]) -> Record:
    """The record in a row whose text came as text. A body that is missing is damage, which the verifier must see."""
    *header, body, content, content_hash, digest = row
    return restored((*header, _utf8(body), _utf8(content), content_hash, digest))


def _utf8(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
