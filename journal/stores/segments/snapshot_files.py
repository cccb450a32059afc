"""Snapshots as files beside a stream's segments: one each, named by its position, whole or not there."""

import struct
import zlib

from refold.journal.snapshots import Snapshot

SNAPSHOT_SUFFIX = ".snapshot"
_MAGIC = b"\xf5RSS"
_FIXED = struct.Struct(">4sQQ32s32sIIQ")
_CRC = struct.Struct(">I")
_NUM_DIGITS = 20
FIXED_BYTES = _FIXED.size


def snapshot_name(position: int) -> str:
    """The file of the snapshot at a position."""
    return f"{position:0{_NUM_DIGITS}d}{SNAPSHOT_SUFFIX}"


def snapshot_position(name: str) -> int | None:
    """The position of a snapshot by its file's name; None if it isn't one."""
    digits = name.removesuffix(SNAPSHOT_SUFFIX)
    return int(digits) if name.endswith(SNAPSHOT_SUFFIX) and len(digits) == _NUM_DIGITS and digits.isdecimal() else None


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """The bytes of the file."""
    version, digest = snapshot.version.encode(), snapshot.digest.encode()
    numbers = (snapshot.position, snapshot.engine_epoch, snapshot.hash, snapshot.checksum)
    fixed = _FIXED.pack(_MAGIC, *numbers, len(version), len(digest), len(snapshot.body))
    packed = b"".join((fixed, version, digest, snapshot.body))
    return packed + _CRC.pack(zlib.crc32(packed))


def body_bytes(data: bytes) -> int | None:
    """The length of the body, from the first bytes of the file; None if they aren't a snapshot's."""
    if len(data) < FIXED_BYTES or not data.startswith(_MAGIC):
        return None
    return int(_FIXED.unpack_from(data)[-1])


def unpack_snapshot(data: bytes) -> Snapshot | None:
    """The snapshot; None if the file is damaged: it's as if there were none."""
    end = len(data) - _CRC.size
    if end < FIXED_BYTES or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    magic, position, engine_epoch, chain, checksum, *lengths = _FIXED.unpack_from(data)
    version_end = FIXED_BYTES + lengths[0]
    digest_end = version_end + lengths[1]
    if magic != _MAGIC or digest_end + lengths[2] != end:
        return None
    version, digest = data[FIXED_BYTES:version_end].decode(), data[version_end:digest_end].decode()
    return Snapshot(position, engine_epoch, chain, version, digest, data[digest_end:end], checksum)
