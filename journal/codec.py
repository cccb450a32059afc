"""Events to bytes and back: JSON, so that `sqlite3`, `psql` and `jq` read a journal without us.

Decoding is strict: an unknown event or field, a missing field or a wrong type is an error that names the position.
"""

from collections.abc import Sequence

import msgspec

from refold.journal.errors import JournalCorrupt, SchemaTooNew
from refold.journal.events import SCHEMA_VERSION, AnyEvent, Event
from refold.journal.record import Record

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(list[AnyEvent])


def encode(events: Sequence[Event]) -> bytes:
    """The body of a record: a JSON array of tagged objects, UTF-8, no spaces."""
    return _ENCODER.encode(events)


def decode(record: Record) -> list[Event]:
    """The events of a record.

    Raises:
        SchemaTooNew: the record was written by a newer vocabulary.
        JournalCorrupt: the body isn't a list of events.
    """
    if record.schema_version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"record {record.position} has schema version {record.schema_version}, this refold reads up to "
            f"{SCHEMA_VERSION}: read it with a newer refold"
        )
    try:
        return _DECODER.decode(record.body)  # type: ignore[return-value]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalCorrupt(
            f"record {record.position} holds no list of events: {error}", position=record.position, kind="undecodable"
        ) from error
