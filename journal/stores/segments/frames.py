"""The bytes of a segment: a header, then groups of records, each a frame with its length, its place and its checksums.

A group is what one append wrote: it is there whole or not at all. Its frame begins with a magic number that UTF-8 can't
contain and ends with bytes that aren't zero, so that what a lost or cut write leaves behind can be told from what was
written and then damaged. A group without records says who took the stream over: it's how an engine epoch begins.

Everything is big-endian; docs/reference/segments.md has the tables. CRC-32 is zlib's: each damaged bit, each burst up to 32.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from refold.journal.record import Head, Record

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"\xf5RSEG\r\n\0"
GROUP_MAGIC = b"\xf5RG\xfe"
GROUP_END = b"\xf5\n"
MAX_PAYLOAD_BYTES = 1 << 30

_SEGMENT = struct.Struct(">8sHQQ32sH")
_GROUP = struct.Struct(">4sIIQQI")
_CRC = struct.Struct(">I")
_RECORD = struct.Struct(">QIqII32sB")
_ERASED = 0xFFFFFFFF

GROUP_HEADER_BYTES = _GROUP.size + _CRC.size
GROUP_FRAME_BYTES = GROUP_HEADER_BYTES + len(GROUP_END)
MAX_SEGMENT_HEADER_BYTES = _SEGMENT.size + 0xFFFF + _CRC.size


class SegmentHeader(NamedTuple):
    """What a segment says of itself: the stream, and the head that its first record continues."""

    stream: str
    head: Head
    size: int


class Group(NamedTuple):
    """The header of a group that lies at `start`: `num_records` records from `position` on.

    `engine_epoch` is the stream's from here on: that of the last record, or the one that a group without records begins.
    """

    start: int
    num_records: int
    payload_bytes: int
    position: int
    engine_epoch: int
    payload_crc: int

    @property
    def payload_start(self) -> int:
        """Where the records begin."""
        return self.start + GROUP_HEADER_BYTES

    @property
    def end(self) -> int:
        """Where the next group begins."""
        return self.start + GROUP_FRAME_BYTES + self.payload_bytes

    @property
    def stop(self) -> int:
        """The position after its last record."""
        return self.position + self.num_records


def pack_segment_header(stream: str, head: Head) -> bytes:
    """The first bytes of a segment whose first record continues `head`."""
    name = stream.encode()
    packed = _SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, head.position, head.engine_epoch, head.hash, len(name)) + name
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_segment_header(data: bytes) -> SegmentHeader | None:
    """The header at the beginning of `data`; None if there is none, or a damaged one."""
    if len(data) < _SEGMENT.size:
        return None
    magic, version, position, engine_epoch, digest, name_bytes = _SEGMENT.unpack_from(data)
    end = _SEGMENT.size + name_bytes
    if magic != SEGMENT_MAGIC or version != FORMAT_VERSION or len(data) < end + _CRC.size:
        return None
    if _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    return SegmentHeader(data[_SEGMENT.size : end].decode(), Head(position, digest, engine_epoch), end + _CRC.size)


def is_cut_header(data: bytes) -> bool:
    """Whether `data`, all of a file, is the beginning of a segment's header and not all of it. An empty file is."""
    if not SEGMENT_MAGIC.startswith(data[: len(SEGMENT_MAGIC)]):
        return False
    return len(data) < _SEGMENT.size or len(data) < _SEGMENT.size + _SEGMENT.unpack_from(data)[-1] + _CRC.size


def pack_group(position: int, engine_epoch: int, records: Sequence[Record]) -> bytes:
    """The frame of records that one append adds; of none, when an engine takes the stream over."""
    parts: list[bytes] = []
    for record in records:
        parts += _pack_record(record)
    payload = b"".join(parts)
    group = Group(0, len(records), len(payload), position, engine_epoch, zlib.crc32(payload))
    return b"".join((pack_group_header(group), payload, GROUP_END))


def pack_group_header(group: Group) -> bytes:
    """The bytes before the records."""
    packed = _GROUP.pack(GROUP_MAGIC, *group[1:])
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_group(data: bytes, offset: int, start: int) -> Group | None:
    """The header of the group at `data[offset:]`, which lies at `start` in its file; None if there is none, or a damaged one."""
    if len(data) - offset < GROUP_HEADER_BYTES:
        return None
    magic, count, payload_bytes, position, engine_epoch, payload_crc = _GROUP.unpack_from(data, offset)
    if magic != GROUP_MAGIC:
        return None
    if _CRC.unpack_from(data, offset + _GROUP.size)[0] != zlib.crc32(data[offset : offset + _GROUP.size]):
        return None
    return Group(start, count, payload_bytes, position, engine_epoch, payload_crc)


def is_whole(group: Group, body: bytes) -> bool:
    """Whether `body`, all that follows the group's header, is what was written."""
    return (
        len(body) == group.payload_bytes + len(GROUP_END)
        and body.endswith(GROUP_END)
        and zlib.crc32(memoryview(body)[: group.payload_bytes]) == group.payload_crc
    )


def _pack_record(record: Record) -> tuple[bytes, ...]:
    body, content, content_hash = record.body, record.content, record.content_hash
    content_bytes = _ERASED if content is None else len(content)
    head = _RECORD.pack(
        record.engine_epoch,
        record.schema_version,
        record.time_ns,
        len(body),
        content_bytes,
        record.hash,
        len(content_hash),
    )
    return head, content_hash, body, content or b""


def unpack_records(group: Group, payload: bytes) -> Iterator[Record]:
    """The records of a group. Of a damaged one, as many as can be made out.

    Raises:
        struct.error: it is damaged.
    """
    offset = 0
    for position in range(group.position, group.stop):
        epoch, schema_version, time_ns, body_bytes, content_bytes, digest, hash_bytes = _RECORD.unpack_from(
            payload, offset
        )
        body_start = offset + _RECORD.size + hash_bytes
        body_stop = body_start + body_bytes
        offset = body_stop + (0 if content_bytes == _ERASED else content_bytes)
        content = None if content_bytes == _ERASED else payload[body_stop:offset]
        content_hash, body = payload[body_start - hash_bytes : body_start], payload[body_start:body_stop]
        yield Record(position, epoch, schema_version, time_ns, body, content, content_hash, digest)
