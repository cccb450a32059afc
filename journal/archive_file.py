"""Archive files: sealed records, compressed.

    magic, length and JSON of a header, blocks, index, length and checksum of the index, magic again

The header says how a record is laid out, so that a later refold reads what this one wrote. A block is some megabytes of records,
column by column, compressed with Zstandard, or with zlib where that isn't installed (`refold[zstd]`); each says which, and
has a checksum. The index says where each block is. A file is written beside its name, synced and
renamed, so one that has its name is whole.

A file whose name ends in `.parquet` is Parquet instead (`refold.journal.archive_parquet`).
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from refold.journal import archive_parquet
from refold.journal.archives import Archive
from refold.journal.errors import JournalCorrupt, JournalError, SchemaTooNew
from refold.journal.record import Head, Record, content_to_store, head_after, in_groups, restored
from refold.journal.stores.segments.compression import best_codec, codec
from refold.journal.stores.segments.files import OS_FILES

PARQUET = ".parquet"
BLOCK_BYTES = 4 << 20
BLOCK_RECORDS = 8192
_MAGIC = b"refold archive 1"
_LENGTH = struct.Struct(">Q")
_LAYOUT = 2  # columns as `restored` takes them


class _Header(msgspec.Struct):
    stream: str
    start: int
    layout: int


class _Block(msgspec.Struct, array_like=True):
    """Where a block of records is, and how it's packed."""

    start: int
    count: int
    codec: int
    offset: int
    num_bytes: int
    num_unpacked_bytes: int
    checksum: bytes


class _Opened(NamedTuple):
    header: _Header
    blocks: list[_Block]


def write_archive(path: Path, stream: str, records: Iterable[Record]) -> Archive:
    """Write records, which the caller has verified, to a new file; on disk, under its name, when this returns.

    Raises:
        Rejected: it is to be Parquet, and pyarrow isn't installed.
        JournalError: the file can't be written; there is none then.
    """
    beside = path.with_name(path.name + ".part")
    try:
        if path.suffix == PARQUET:
            start, head = archive_parquet.write_rows(beside, in_groups(records, BLOCK_RECORDS, BLOCK_BYTES))
        else:
            with beside.open("wb") as file:
                start, head = _write(file, stream, records)
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        beside.replace(path)
        OS_FILES.fsync_dir(path.parent)
        return describe(path, start, head)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise JournalError(
            f"cannot write {path}: {error.strerror}; nothing was archived, make room and try again"
        ) from error


def describe(path: Path, start: int, head: Head) -> Archive:
    """What a store keeps of an archive file."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").digest()
    return Archive(start, head.position, head.engine_epoch, head.hash, str(path), path.stat().st_size, checksum)


def read_archive(path: Path, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Records start <= p < stop of an archive file. The chain is for the caller to verify, as with any store.

    Raises:
        JournalCorrupt: the file is damaged.
        JournalError: it can't be read.
    """
    try:
        if path.suffix == PARQUET:
            yield from archive_parquet.read_rows(path, start, stop)
            return
        with path.open("rb") as file:
            opened = _open(path, file)
            for block in opened.blocks:
                if block.start + block.count > start and (stop is None or block.start < stop):
                    for record in _read_block(path, file, block):
                        if record.position >= start and (stop is None or record.position < stop):
                            yield record
    except OSError as error:
        raise JournalError(
            f"cannot read {path}: {error.strerror}; put the archive back, or beside the journal"
        ) from error


def _write(file: BinaryIO, stream: str, records: Iterable[Record]) -> tuple[int, Head]:
    blocks: list[_Block] = []
    head: Head | None = None
    for group in in_groups(records, BLOCK_RECORDS, BLOCK_BYTES):
        if head is None:
            header = msgspec.json.encode(_Header(stream, group[0].position, _LAYOUT))
            file.write(_MAGIC + _LENGTH.pack(len(header)) + header)
        blocks.append(_write_block(file, group))
        head = head_after(group[-1])
    assert head is not None, "an archive holds at least one record"
    index = msgspec.msgpack.encode(blocks)
    file.write(index + _LENGTH.pack(len(index)) + hashlib.sha256(index).digest() + _MAGIC)
    return blocks[0].start, head


def _write_block(file: BinaryIO, group: list[Record]) -> _Block:
    rows = [(*record[:5], *content_to_store(record), record.hash) for record in group]
    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)]
    data, packer = msgspec.msgpack.encode(columns), best_codec()
    packed = packer.pack(data)
    place = (packer.number, file.tell(), len(packed), len(data))
    file.write(packed)
    return _Block(group[0].position, len(group), *place, hashlib.sha256(packed).digest())


def _open(path: Path, file: BinaryIO) -> _Opened:
    tail = _LENGTH.size + 32 + len(_MAGIC)
    size = file.seek(0, os.SEEK_END)
    if size < tail + len(_MAGIC):
        raise _damaged(path, "is too short for an archive")
    file.seek(size - tail)
    ending = file.read(tail)
    (length,) = _LENGTH.unpack_from(ending)
    if not ending.endswith(_MAGIC) or length > size - tail:
        raise _damaged(path, "doesn't end as an archive does")
    file.seek(size - tail - length)
    index = file.read(length)
    if hashlib.sha256(index).digest() != ending[_LENGTH.size : -len(_MAGIC)]:
        raise _damaged(path, "has a damaged index")
    file.seek(0)
    start = file.read(len(_MAGIC) + _LENGTH.size)
    (length,) = _LENGTH.unpack_from(start, len(_MAGIC))
    try:
        header = msgspec.json.decode(file.read(min(length, size)), type=_Header)
        blocks = msgspec.msgpack.decode(index, type=list[_Block])
    except msgspec.DecodeError as error:
        raise _damaged(path, f"has a damaged header ({error})") from error
    if header.layout > _LAYOUT:
        raise SchemaTooNew(f"{path} has layout {header.layout}, this refold reads up to {_LAYOUT}: use a newer refold")
    return _Opened(header, blocks)


def _read_block(path: Path, file: BinaryIO, block: _Block) -> Iterator[Record]:
    file.seek(block.offset)
    packed = file.read(block.num_bytes)
    if hashlib.sha256(packed).digest() != block.checksum:
        raise JournalCorrupt(
            f"{path} is damaged between records {block.start} and {block.start + block.count - 1}: restore it from a backup",
            position=block.start,
            kind="edited",
        )
    data = codec(block.codec).unpack(packed, block.num_unpacked_bytes)
    columns = msgspec.msgpack.decode(data, type=list[list[Any]])
    yield from map(restored, zip(*columns, strict=True))


def _damaged(path: Path, what: str) -> JournalCorrupt:
    return JournalCorrupt(f"{path} {what}: restore it from a backup", position=0, kind="truncated")
