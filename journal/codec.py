"""Events to bytes and back: JSON, so that `sqlite3`, `psql` and `jq` read a journal without us.

A record has two parts: the body, and the content that was taken out of it (`refold.journal.content`). Decoding is strict: an
unknown event or field, a missing field or a wrong type is an error that names the position. Records of an older schema go
through the upcasters first, one for each version (`refold.journal.upcasters`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from refold.journal.content import (
    NO_CONTENT,
    Column,
    ContentMismatch,
    PlainEvents,
    StoredEvents,
    is_plain,
    put_back,
    take_out,
)
from refold.journal.errors import JournalCorrupt, SchemaTooNew
from refold.journal.events import SCHEMA_VERSION, Event
from refold.journal.record import Record
from refold.journal.upcasters import upcast

_ENCODER = msgspec.json.Encoder()
_BODY = msgspec.json.Decoder(StoredEvents)
_PLAIN = msgspec.json.Decoder(PlainEvents)
_WHOLE_CONTENT = msgspec.json.Decoder(list[list[int] | str])
_CONTENT = msgspec.json.Decoder(list[Column])


class Encoded(NamedTuple):
    """The two parts of a record: JSON arrays, UTF-8, no spaces. `content` is empty if the events say nothing erasable."""

    body: bytes
    content: bytes


def encode(events: Sequence[Event], salt: str = "") -> Encoded:
    """The body and the content of a record; `salt` is what makes the content's digest unguessable.

    Raises:
        UnicodeEncodeError, TypeError: the events can't be encoded.
    """
    stored, columns = take_out(events)
    return Encoded(_ENCODER.encode(stored), encode_content(salt, columns))


def encode_content(salt: str, columns: Sequence[Column]) -> bytes:
    """A content with these columns, in the order of the body."""
    return _ENCODER.encode([salt, *columns]) if columns else NO_CONTENT


def decode(record: Record) -> list[Event]:
    """The events of a record. An erased token is a placeholder, an erased digest is empty.

    Raises:
        SchemaTooNew: the record was written by a newer vocabulary.
        JournalCorrupt: the body isn't a list of events, or the content isn't what was taken out of it.
    """
    if record.schema_version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"record {record.position} has schema version {record.schema_version}, this refold reads up to "
            f"{SCHEMA_VERSION}: read it with a newer refold"
        )
    body, content = record.body, record.content
    try:
        if record.schema_version < SCHEMA_VERSION:
            body, content = upcast(record.schema_version, body, content)
        events = _plain(body) if content == NO_CONTENT else None
        return put_back(_BODY.decode(body), columns_of(content), record.position) if events is None else events
    except (msgspec.DecodeError, UnicodeDecodeError, ContentMismatch) as error:
        raise JournalCorrupt(
            f"record {record.position} holds no list of events: {error}", position=record.position, kind="undecodable"
        ) from error


def _plain(body: bytes) -> list[Event] | None:
    """The short way for a body from which nothing was taken, as most steps'; None if it takes the long one."""
    try:
        events: list[Event] = _PLAIN.decode(body)
    except msgspec.ValidationError:
        return None
    return events if is_plain(events) else None


def stored_events(record: Record) -> list[Any]:
    """The events of a record of today's schema as its body holds them, counts in the place of columns.

    Raises:
        msgspec.DecodeError: the body isn't a list of events.
    """
    stored: list[Any] = _BODY.decode(record.body)
    return stored


def columns_of(content: bytes | None) -> list[Column] | None:
    """The columns of a content, the salt apart; None if it was erased.

    Raises:
        msgspec.DecodeError: it's no content.
    """
    if not content:
        return None if content is None else []
    try:
        columns: list[Column] = _WHOLE_CONTENT.decode(content)  # type: ignore[assignment]
    except msgspec.ValidationError:
        columns = _CONTENT.decode(content)
    if not columns or not isinstance(columns[0], str):
        raise ContentMismatch("the content doesn't begin with its salt")
    return columns[1:]


def events_among(records: Iterable[Record], kinds: Iterable[type[Event]]) -> Iterator[Event]:
    """The events of those records that may hold one of these kinds, others of theirs included; the rest isn't decoded."""
    marks = [f'"{kind.__name__}"'.encode() for kind in kinds]
    for record in records:
        if any(mark in record.body for mark in marks):
            yield from decode(record)
