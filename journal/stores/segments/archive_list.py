"""The file `archives` in a stream's folder: where the oldest records of the stream are. It is small, and replaced as a whole."""

import shlex
import zlib
from pathlib import Path

import msgspec

from refold.journal.archives import Archive
from refold.journal.errors import JournalError

_DECODER = msgspec.json.Decoder(list[Archive])


def pack_archives(archives: list[Archive]) -> bytes:
    """The content of the file: the CRC-32 of what follows, in hex, a newline, and JSON."""
    data = msgspec.json.encode(archives)
    return b"%08x\n" % zlib.crc32(data) + data


def unpack_archives(data: bytes, path: Path) -> list[Archive]:
    """The archives that a file lists; an empty one lists none.

    Raises:
        JournalError: it's damaged.
    """
    if not data:
        return []
    crc, _, listed = data.partition(b"\n")
    if crc != b"%08x" % zlib.crc32(listed):
        raise JournalError(
            f"{path} was changed: it lists where older records are archived, and holds none itself; restore it from a backup, or "
            f"remove it and make it anew: `refold archive --adopt FOLDER {shlex.quote(str(path.parent.parent))}`, if they are "
            "in FOLDER"
        )
    return _DECODER.decode(listed)
