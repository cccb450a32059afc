"""Compression of sealed segments: zstd where this Python has it, else zlib, which every Python has.

zstd comes with Python 3.14 or with the package `zstandard` (the extra `refold[zstd]`). Each sealed segment says which codec it
was packed with; the core install reads and writes zlib's.
"""

import importlib
import zlib
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

from refold.journal.errors import JournalError

ZLIB, ZSTD = 1, 2
_ZLIB_LEVEL = 3
_ZLIB_MAGIC = b"\x78"
MAGIC_BYTES = 4
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL = 3


class Unpacking(Protocol):
    """A block of unknown length on its way to being unpacked. Both libraries have such an object."""

    @property
    def eof(self) -> bool:
        """Whether the block's end was met."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What was given beyond it."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Go on with the next bytes. Raises the library's own errors on damage."""
        ...


class Codec(NamedTuple):
    """How blocks are packed. `unpack` takes the block and its unpacked length, and raises `BadBlock` on damage.

    `unpacking` begins a block of unknown length, which may raise `errors`; `magic` are the first bytes of any block.
    """

    number: int
    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes, int], bytes]
    unpacking: Callable[[], Unpacking]
    errors: tuple[type[Exception], ...]
    magic: bytes


class BadBlock(ValueError):
    """A block can't be unpacked."""


def best_codec() -> Codec:
    """The one that packs best: zstd if it's there, else zlib."""
    return _zstd() or _zlib()


def codec(number: int) -> Codec:
    """The codec that a sealed segment names.

    Raises:
        JournalError: it's zstd, and this Python hasn't got it; or a number that no refold wrote.
    """
    found = _zlib() if number == ZLIB else _zstd() if number == ZSTD else None
    if found is None and number == ZSTD:
        raise JournalError(
            "the journal is compressed with zstd: pip install 'refold[zstd]', or use Python 3.14 or newer"
        )
    if found is None:
        raise JournalError(
            f"the journal is compressed in way {number}, which this refold does not know: use a newer one"
        )
    return found


def codec_of(block: bytes) -> Codec | None:
    """The codec of a block, by its first bytes; None if no block begins so. Raises as `codec`."""
    if block.startswith(_ZLIB_MAGIC):
        return codec(ZLIB)
    return codec(ZSTD) if block.startswith(_ZSTD_MAGIC) else None


def _zlib() -> Codec:
    def unpack(data: bytes, size: int) -> bytes:
        try:
            return zlib.decompress(data, bufsize=size)
        except zlib.error as error:
            raise BadBlock(str(error)) from error

    return Codec(
        ZLIB, lambda data: zlib.compress(data, _ZLIB_LEVEL), unpack, zlib.decompressobj, (zlib.error,), _ZLIB_MAGIC
    )


def _zstd() -> Codec | None:
    return _zstd_of_python() or _zstd_of_package()


@cache  # to look for a module that isn't there takes longer than to read a segment; these functions any thread may call
def _zstd_of_python() -> Codec | None:
    try:
        zstd = importlib.import_module("compression.zstd")
    except ImportError:
        return None

    def unpack(data: bytes, _size: int) -> bytes:
        try:
            return bytes(zstd.decompress(data))
        except (zstd.ZstdError, EOFError) as error:
            raise BadBlock(str(error)) from error

    errors = (zstd.ZstdError, EOFError)
    return Codec(
        ZSTD, lambda data: bytes(zstd.compress(data, _ZSTD_LEVEL)), unpack, zstd.ZstdDecompressor, errors, _ZSTD_MAGIC
    )


def _zstd_of_package() -> Codec | None:
    try:
        zstd = importlib.import_module("zstandard")
    except ImportError:
        return None
    compressor, decompressor = zstd.ZstdCompressor(level=_ZSTD_LEVEL), zstd.ZstdDecompressor()

    def unpack(data: bytes, size: int) -> bytes:
        try:
            return bytes(decompressor.decompress(data, max_output_size=size))
        except zstd.ZstdError as error:
            raise BadBlock(str(error)) from error

    return Codec(ZSTD, compressor.compress, unpack, decompressor.decompressobj, (zstd.ZstdError,), _ZSTD_MAGIC)
