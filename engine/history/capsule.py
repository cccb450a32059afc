"""Capsules: a journal in one small file, for a bug report: what was decided is all there, what was said is not.

Every token goes through one secret permutation of the vocabulary, drawn for this capsule and thrown away. Equal tokens stay equal,
stop tokens still stop, prefixes are shared as they were, so the schedule is the same to the last block. Names (of clients,
tenants, salts, adapters, pictures, grammars, the model) become numbers, texts that anyone may have written are dropped, seeds
are replaced, and times count from a fixed day. Recorded digests are made anew: one that was right stays right, one that was
wrong stays wrong.

It is pseudonymous, not secret: who has much text and a capsule of it can count frequencies. Look at what you send.

The file is gzip over lines of JSON: a header, then a record a line. It holds no paths and no code, and it is read as if a
stranger had written it: bounded sizes at each step, strict types, no names taken from it.
"""

import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from refold.engine.history.replay import fold_event, unheard
from refold.engine.history.veil import Veil
from refold.journal.codec import decode
from refold.journal.errors import InvariantViolation, JournalCorrupt, JournalError, SchemaTooNew
from refold.journal.events import SCHEMA_VERSION, AnyEvent, EngineOpened, Event, RequestQuarantined, StateDigest
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import verified_part
from refold.scheduler.state import State, digest
from refold.scheduler.trials import content_of

FORMAT = 1
OLDEST_SCHEMA = 2
"""Of the capsules that are read. Schema 3 tells all that schema 2 tells, alike."""
MAX_FILE_BYTES = 256 << 20
MAX_BYTES = 2 << 30
MAX_LINE_BYTES = 32 << 20
MAX_RECORDS = 20_000_000
MAX_BLOCKS = 1 << 20
MAX_INT = 1 << 62
_CHUNK_BYTES = 1 << 18
_GZIP = 31


class CapsuleHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line. `note` is for people."""

    refold_capsule: int
    schema_version: int
    num_records: int
    note: str = ""


class CapsuleRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line: a record without its hash."""

    epoch: int
    time_ns: int
    events: list[AnyEvent]


_HEADER = msgspec.json.Decoder(CapsuleHeader)
_RECORD = msgspec.json.Decoder(CapsuleRecord)
_ENCODE = msgspec.json.Encoder().encode


# -- writing ----------------------------------------------------------------------------------------------------------


def write_capsule(
    reader: JournalReader,
    target: BinaryIO,
    stream: str = DEFAULT_STREAM,
    note: str = "",
    on_record: Callable[[], object] = unheard,
) -> CapsuleHeader:
    """Write what is readable of a stream. A journal that contradicts itself is written whole: that is what it is for.

    Raises:
        JournalError: it can't be read.
    """
    header = CapsuleHeader(FORMAT, SCHEMA_VERSION, reader.head(stream).position, note[:2000])
    packer = zlib.compressobj(9, zlib.DEFLATED, _GZIP)
    target.write(packer.compress(_ENCODE(header) + b"\n"))
    for record in redacted(verified_part(reader, stream, stop=header.num_records)):
        target.write(packer.compress(_ENCODE(record) + b"\n"))
        on_record()
    target.write(packer.flush())
    return header


def redacted(records: Iterable[Record]) -> Iterator[CapsuleRecord]:
    """The records as a capsule holds them."""
    veil, before, after = Veil(), _Fold(), _Fold()
    for record in records:
        events = decode(record)
        hidden = []
        for event in events:
            veiled = veil.event(event)
            if isinstance(event, StateDigest):
                veiled = _digest_like(event, before, after)
            elif isinstance(event, RequestQuarantined):
                veiled = _content_like(event, before, after)
            before.fold(event)
            after.fold(veiled)
            hidden.append(veiled)
        yield CapsuleRecord(record.engine_epoch, veil.time(record.time_ns), hidden)  # type: ignore[arg-type]


class _Fold:
    """A fold that gives up at the first contradiction."""

    def __init__(self) -> None:
        self.state: State | None = State()

    def fold(self, event: Event) -> None:
        if self.state is not None:
            try:
                fold_event(self.state, event, 0, 0)
            except InvariantViolation:
                self.state = None


def _digest_like(event: StateDigest, before: _Fold, after: _Fold) -> StateDigest:
    """A digest that is as right or as wrong as the recorded one."""
    if not event.digest or before.state is None or after.state is None:
        return StateDigest(digest="")
    if event.digest == digest(before.state):
        return StateDigest(digest=digest(after.state))
    return StateDigest(digest="0" * 64)


def _content_like(event: RequestQuarantined, before: _Fold, after: _Fold) -> Event:
    """A content digest that is as right or as wrong as the recorded one."""
    if not event.content_digest or before.state is None or after.state is None:
        return msgspec.structs.replace(event, content_digest="")
    found, veiled = (state.requests.by_handle.get(event.handle) for state in (before.state, after.state))
    if found is None or veiled is None or content_of(found) != event.content_digest:
        return msgspec.structs.replace(event, content_digest="0" * 64)
    return msgspec.structs.replace(event, content_digest=content_of(veiled))


# -- reading ----------------------------------------------------------------------------------------------------------


def read_capsule(path: Path) -> tuple[CapsuleHeader, Iterator[CapsuleRecord]]:
    """A capsule's header, and its records one after the other. Whoever wrote it is not trusted.

    Raises:
        JournalError: it can't be read, is no capsule, or holds more than a capsule may.
        SchemaTooNew: a newer refold wrote it.
        JournalCorrupt: (while reading) a line is no record.
    """
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise JournalError(f"{path.name or path} is a folder, and a capsule is one file: name that")
        if not path.is_file():
            raise JournalError(f"{path.name} is no file")
    except OSError as error:
        raise JournalError(f"{path.name} can't be read: {error.strerror}") from error
    if size > MAX_FILE_BYTES:
        raise JournalError(f"{path.name} has {size:,} bytes, a capsule has at most {MAX_FILE_BYTES:,}")
    lines = _lines(path)
    header = _header(next(lines, b""), path)
    return header, _records(lines, header)


def _header(line: bytes, path: Path) -> CapsuleHeader:
    try:
        header = _HEADER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JournalError(f"{path.name} is no refold capsule") from error
    if header.refold_capsule > FORMAT or header.schema_version > SCHEMA_VERSION:
        raise SchemaTooNew(f"{path.name} was written by a newer refold: read it with that one")
    if not 0 <= header.num_records <= MAX_RECORDS or header.refold_capsule < 1 or header.schema_version < 1:
        raise JournalError(f"{path.name} has a header that no refold wrote")
    if header.schema_version < OLDEST_SCHEMA:
        raise JournalError(
            f"{path.name} is of schema version {header.schema_version}, capsules of that aren't read any more"
        )
    return header


def _records(lines: Iterator[bytes], header: CapsuleHeader) -> Iterator[CapsuleRecord]:
    position = -1
    for position, line in enumerate(lines):
        if position >= header.num_records:
            raise JournalCorrupt(
                f"the capsule has more than its {header.num_records} records", position=position, kind="edited"
            )
        try:
            record = _RECORD.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            what = " ".join(str(error).split())[:120]
            raise JournalCorrupt(
                f"line {position + 2} of the capsule is no record: {what}", position=position, kind="undecodable"
            ) from error
        _check(record, position)
        yield record
    if position + 1 != header.num_records:
        raise JournalCorrupt(
            f"the capsule ends after {position + 1} of {header.num_records} records",
            position=position + 1,
            kind="truncated",
        )


def _check(record: CapsuleRecord, position: int) -> None:
    """Numbers that would cost too much memory, or that no store takes."""
    if not (record.events and 1 <= record.epoch <= MAX_INT and -MAX_INT <= record.time_ns <= MAX_INT):
        raise JournalCorrupt(
            f"record {position} of the capsule has a header that no record has", position=position, kind="edited"
        )
    for event in record.events:
        if isinstance(event, EngineOpened):
            config = event.config
            sizes = (config.num_blocks, config.block_size, config.encoder_cache_tokens, config.max_in_flight_steps)
            if not all(0 <= size <= MAX_BLOCKS for size in sizes) or config.block_size < 1:
                raise JournalCorrupt(
                    f"record {position} of the capsule opens an engine that can't be: {sizes}",
                    position=position,
                    kind="edited",
                )


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a gzip file, never more at once than one may be long."""
    unpacker, rest, total = zlib.decompressobj(_GZIP), b"", 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                while chunk:
                    if unpacker.eof:
                        raise JournalError(f"{path.name} goes on behind its end: it is no refold capsule")
                    rest += unpacker.decompress(chunk, _CHUNK_BYTES)
                    chunk = unpacker.unconsumed_tail or unpacker.unused_data
                    total += _CHUNK_BYTES
                    *whole, rest = rest.split(b"\n")
                    yield from whole
                    _check_bounds(path, total, len(rest))
    except (zlib.error, OSError) as error:
        raise JournalError(f"{path.name} is no refold capsule, or damaged: {error}") from error
    if not unpacker.eof:
        raise JournalError(f"{path.name} is cut off, or no refold capsule")
    if rest:
        yield rest


def _check_bounds(path: Path, total: int, pending: int) -> None:
    if pending > MAX_LINE_BYTES:
        raise JournalError(f"{path.name} has a line of more than {MAX_LINE_BYTES:,} bytes: no capsule has")
    if total > MAX_BYTES:
        raise JournalError(f"{path.name} unpacks to more than {MAX_BYTES:,} bytes: no capsule does")


def new_note() -> str:
    """A number by which two capsules can be told apart."""
    return secrets.token_hex(4)
