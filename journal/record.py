"""Records: the unit of the journal, chained by hash.

A record is the events of one command, stored as one atomic row. Positions are dense (0, 1, 2, ...) within a stream, so a
reader can never step over an uncommitted neighbour. `hash = sha256(previous hash ‖ header ‖ body)` with every header field
in it, so an edited, lost, inserted or moved record is detected by anyone who reads. A truncated tail is detected by
whoever remembers a head.
"""

import hashlib
import struct
from typing import NamedTuple

from refold.journal.events import SCHEMA_VERSION

GENESIS_HASH = bytes(32)
_HEADER = struct.Struct(">QQIq")


class Record(NamedTuple):
    """One row of a stream.

    Attributes:
        position: 0, 1, 2, ... without gap.
        engine_epoch: the life of the engine that wrote it; never falls along a stream.
        schema_version: version of the event vocabulary in `body`.
        time_ns: wall clock of the writer when the record was made; never read by the fold.
        body: a JSON array of events, UTF-8.
        hash: 32 bytes, see the module's text.
    """

    position: int
    engine_epoch: int
    schema_version: int
    time_ns: int
    body: bytes
    hash: bytes


class Head(NamedTuple):
    """The end of a stream: the position that the next record will take, and the hash it will be chained to."""

    position: int
    hash: bytes
    engine_epoch: int


EMPTY_HEAD = Head(0, GENESIS_HASH, 0)


def chain_hash(
    previous: bytes, position: int, engine_epoch: int, schema_version: int, time_ns: int, body: bytes
) -> bytes:
    """The hash of a record that follows one with hash `previous`."""
    digest = hashlib.sha256(previous)
    digest.update(_HEADER.pack(position, engine_epoch, schema_version, time_ns))
    digest.update(body)
    return digest.digest()


def seal(head: Head, time_ns: int, body: bytes) -> Record:
    """The record that follows `head` in its engine epoch."""
    digest = chain_hash(head.hash, head.position, head.engine_epoch, SCHEMA_VERSION, time_ns, body)
    return Record(head.position, head.engine_epoch, SCHEMA_VERSION, time_ns, body, digest)


def head_after(record: Record) -> Head:
    """The head of a stream that ends with `record`."""
    return Head(record.position + 1, record.hash, record.engine_epoch)
