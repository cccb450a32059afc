"""The head of a GGUF file: its metadata and where its tensors lie.

GGUF (version 2 and 3, little-endian) is: magic, version, tensor count, metadata count; the metadata as key, type, value;
then per tensor a name, its dimensions (fastest first), a quantisation type and an offset; then, aligned, the tensors.
Only the head is read here, with bounds checked against the file's size before anything is allocated, so a broken or
hostile file costs one error. The `gguf` package reads heads too, but takes seconds over a vocabulary of 49,000 strings;
its dequantisation, which is numpy all the way, is what `weights` uses.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from refold.journal.errors import Rejected

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor lies. `shape` is (out, in); `offset` is in bytes from the start of the file."""

    shape: tuple[int, ...]
    quantisation: int
    offset: int


class GgufFile(msgspec.Struct, frozen=True):
    """The head of one file."""

    path: Path
    size_bytes: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


class _Cursor:
    """Reads forward over a buffer and never past its end."""

    __slots__ = ("_at", "_buffer")

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self._at = 0

    @property
    def at(self) -> int:
        return self._at

    def take(self, size_bytes: int) -> bytes:
        end = self._at + size_bytes
        if end > len(self._buffer):
            raise _Broken(f"byte {self._at}: {size_bytes} bytes expected, {len(self._buffer) - self._at} left")
        chunk = self._buffer[self._at : end]
        self._at = end
        return chunk

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def integer(self, code: str) -> int:
        return int(self.unpack(code)[0])

    def string(self) -> str:
        # Vocabularies hold tokens that are no valid text; they must survive, and must not end the reader.
        return self.take(self.integer("Q")).decode("utf-8", "surrogateescape")

    def strings(self, count: int) -> list[str]:
        """`count` strings. A vocabulary and its merges are a hundred thousand, and most of the time to describe a model."""
        found, buffer, at = [], self._buffer, self._at
        for _ in range(count):
            start = at + 8
            end = start + int.from_bytes(buffer[at:start], "little")
            if end > len(buffer):
                raise _Broken(f"byte {at}: a string to byte {end} expected, {len(buffer) - at} bytes left")
            found.append(buffer[start:end].decode("utf-8", "surrogateescape"))
            at = end
        self._at = at
        return found


class _Broken(Exception):
    """The bytes are no GGUF head. Becomes a Rejected that names the file."""


def read_gguf(path: Path) -> GgufFile:
    """Read the head of `path`. Raises Rejected if it can't be read or isn't a whole GGUF head."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise Rejected(
                    f"{path} is not a GGUF file (it doesn't start with {MAGIC.decode()}); name another model"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _read_head(path, buffer)
    except OSError as error:
        raise Rejected(
            f"{path} can't be read: {error.strerror or error}; check the path and its permissions"
        ) from error
    except (_Broken, struct.error, OverflowError, MemoryError) as error:
        raise Rejected(f"{path} is a broken or truncated GGUF file ({error}); fetch it again") from error


def _read_head(path: Path, buffer: mmap.mmap) -> GgufFile:
    cursor = _Cursor(buffer)
    cursor.take(len(MAGIC))
    version = cursor.integer("I")
    if version not in VERSIONS:
        raise _Broken(f"version {version}, known are {VERSIONS}")
    num_tensors, num_metadata = cursor.integer("Q"), cursor.integer("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string()
        metadata[key] = _read_value(cursor, cursor.integer("I"))
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Broken(f"alignment {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorEntry(shape, kind, start + offset) for name, shape, kind, offset in entries}
    return GgufFile(path, len(buffer), metadata, tensors)


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind in _SCALARS:
        return cursor.unpack(_SCALARS[kind])[0]
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        raise _Broken(f"byte {cursor.at}: value type {kind}")
    inner, count = cursor.integer("I"), cursor.integer("Q")
    if inner in _SCALARS:
        return list(cursor.unpack(_SCALARS[inner], count))
    if inner != _STRING:
        raise _Broken(f"byte {cursor.at}: array of type {inner}")
    return cursor.strings(count)


def _read_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.integer("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _Broken(f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = cursor.unpack("Q", num_dimensions)
    return name, tuple(reversed(dimensions)), cursor.integer("I"), cursor.integer("Q")
