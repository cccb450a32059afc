"""Records: the unit of the journal, chained by hash.

A record is the events of one command, stored as one atomic row. Positions are dense (0, 1, 2, ...) within a stream, so a
reader can never step over an uncommitted neighbour. `hash = sha256(previous hash ‖ header ‖ body ‖ content hash)` with every
header field in it, so an edited, lost, inserted or moved record is detected by anyone who reads. A truncated tail is
detected by whoever remembers a head.

What was said is not in the body but in the content (`refold.journal.content`), which the chain covers by its digest alone: it
can be erased, and the chain still holds. Records of schema version 1 have all in the body, and neither content nor digest.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from refold.journal.events import SCHEMA_VERSION

GENESIS_HASH = bytes(32)
NO_CONTENT_HASH = hashlib.sha256(b"").digest()
_HEADER = struct.Struct(">QQIq")
_HASH_BYTES = 32
FIRST_WITH_CONTENT = 2


class Record(NamedTuple):
    """One row of a stream.

    Attributes:
        position: 0, 1, 2, ... without gap.
        engine_epoch: the life of the engine that wrote it; never falls along a stream.
        schema_version: version of the event vocabulary in `body`.
        time_ns: wall clock of the writer when the record was made; never read by the fold.
        body: a JSON array of events, UTF-8, without what they say.
        content: what they say: a JSON array, UTF-8; empty if they say nothing; None if it was erased.
        content_hash: SHA-256 of the content as it was written; empty under schema version 1, which has none.
        hash: 32 bytes, see the module's text.
    """

    position: int
    engine_epoch: int
    schema_version: int
    time_ns: int
    body: bytes
    content: bytes | None
    content_hash: bytes
    hash: bytes


class Sealed(Record):
    """A record that this process has just hashed, and that knows what it was chained to. Nothing of it can change.

    Whoever is to write it needn't hash it a second time. A copy with other values (`_replace`) knows nothing, and is hashed;
    so is whatever comes from a store.
    """

    previous: bytes | None = None


class Head(NamedTuple):
    """The end of a stream: the position that the next record will take, and the hash it will be chained to."""

    position: int
    hash: bytes
    engine_epoch: int


EMPTY_HEAD = Head(0, GENESIS_HASH, 0)


def short(digest: object) -> str:
    """The beginning of a hash, for messages. A damaged store may hold one that is none."""
    return digest.hex()[:16] if isinstance(digest, bytes) else ascii(digest)[:16]


def content_digest(content: bytes) -> bytes:
    """SHA-256 of a content."""
    return hashlib.sha256(content).digest() if content else NO_CONTENT_HASH


def chain_hash(
    previous: bytes,
    position: int,
    engine_epoch: int,
    schema_version: int,
    time_ns: int,
    body: bytes,
    content_hash: bytes,
) -> bytes:
    """The hash of a record that follows one with hash `previous`.

    Raises:
        ValueError: the content's hash hasn't the length that the schema version gives it.
        struct.error: a field is out of its range.
    """
    if len(content_hash) != (_HASH_BYTES if schema_version >= FIRST_WITH_CONTENT else 0):
        raise ValueError(f"a content hash of {len(content_hash)} bytes under schema version {schema_version}")
    digest = hashlib.sha256(previous)
    digest.update(_HEADER.pack(position, engine_epoch, schema_version, time_ns))
    digest.update(body)
    digest.update(content_hash)
    return digest.digest()


def hash_after(head: Head, record: Record) -> bytes:
    """The hash that `record` must have to follow `head`.

    Raises:
        ValueError, TypeError, struct.error: a field has a value that no record has.
    """
    return chain_hash(head.hash, head.position, *record[1:5], record.content_hash)


def follows(head: Head, record: Record) -> bool:
    """Whether the record's hash is right for this place in the chain, whatever its own idea of its position."""
    try:
        return record.hash == hash_after(head, record)
    except (struct.error, TypeError, ValueError):  # a field has a value that no record has
        return False


def was_sealed_after(head: Head, record: Record) -> bool:
    """Whether this very record was made here to follow `head`: then `follows` holds, and needn't be computed."""
    return type(record) is Sealed and record.previous == head.hash and record.position == head.position


def seal(head: Head, time_ns: int, body: bytes, content: bytes = b"") -> Record:
    """The record that follows `head` in its engine epoch: `seal(head, time_ns, *encode(events))`."""
    position, previous, epoch = head
    content_hash = content_digest(content)
    digest = chain_hash(previous, position, epoch, SCHEMA_VERSION, time_ns, body, content_hash)
    sealed = Sealed(position, epoch, SCHEMA_VERSION, time_ns, body, content, content_hash, digest)
    sealed.previous = previous
    return sealed


def has_whole_content(record: Record) -> bool:
    """Whether the content is the one that was written. A record of schema version 1 has none."""
    if record.schema_version < FIRST_WITH_CONTENT:
        return record.content == b"" == record.content_hash
    return record.content is not None and content_digest(record.content) == record.content_hash


def content_to_store(record: Record) -> tuple[bytes | None, bytes | None]:
    """The content, and its hash where that doesn't follow from the content: what a store has to keep of both."""
    if (type(record) is Sealed and record.previous is not None) or has_whole_content(record):
        return (record.content if record.schema_version >= FIRST_WITH_CONTENT else None), None
    return record.content, record.content_hash


def restored(row: Sequence[Any]) -> Record:
    """A record from what a store keeps of it: its fields, content and hash as `content_to_store` gave them."""
    position, engine_epoch, schema_version, time_ns, body, content, stored_content_hash, digest = row
    is_old = type(schema_version) is int and schema_version < FIRST_WITH_CONTENT  # damage may be of any type
    if is_old and content is None:
        content = b""
    if stored_content_hash is not None:
        content_hash = stored_content_hash
    else:
        content_hash = b"" if is_old or content is None else content_digest(content)
    return Record(position, engine_epoch, schema_version, time_ns, body, content, content_hash, digest)


def in_groups(records: Iterable[Record], max_records: int, max_bytes: int) -> Iterator[list[Record]]:
    """Records in lists that end with the one that reaches a bound."""
    group: list[Record] = []
    num_bytes = 0
    for record in records:
        group.append(record)
        num_bytes += size_of(record)
        if len(group) >= max_records or num_bytes >= max_bytes:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def size_of(record: Record) -> int:
    """The bytes of body and content."""
    return len(record.body) + len(record.content or b"")


def head_after(record: Record) -> Head:
    """The head of a stream that ends with `record`."""
    return Head(record.position + 1, record.hash, record.engine_epoch)
