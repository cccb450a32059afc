"""Block hashes: what a full block of known tokens holds, and all before it, in 16 bytes.

Each hash covers its parent's, so equal hashes mean equal prefixes. The root covers what else the keys and values depend on.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from refold.journal.events import Media

if TYPE_CHECKING:
    from refold.projections.requests import Request

_IS_LITTLE = sys.byteorder == "little"
_sha256 = hashlib.sha256


def extend_block_hashes(request: "Request", block_size: int) -> None:
    """Hash every full block of known tokens: each hash covers its parent's, so equal hashes mean equal prefixes.

    SHA-256, cut to 16 bytes: a fixed algorithm, so that a journal folds alike on any machine, and one that a tenant can't
    collide on purpose. The salt separates tenants from block 0 on.
    """
    request.plain_until = 0  # a known hash is to be published
    hashes, tokens = request.block_hashes, request.tokens
    for i in range(len(hashes), len(tokens) // block_size):
        start = (
            i * block_size
        )  # from here on as `block_hash`, written out: this is done for every block, and calls cost as much
        said = hashes[-1] if i else root_hash(request.cache_salt, request.adapter)
        said += (
            tokens[start : start + block_size].tobytes()
            if _IS_LITTLE
            else pack_tokens(tokens[start : start + block_size])
        )
        if request.media:
            said += media_identity(request.media, start, block_size)
        hashes.append(_sha256(said).digest()[:16])


def pack_tokens(tokens: "array[int]") -> bytes:
    """Tokens as bytes, alike on every machine: 8 each, the lowest first."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def block_hash(parent: bytes, packed_tokens: bytes, media: bytes = b"") -> bytes:
    """The chain hash of a block that follows one with hash `parent`: what the laws hold `extend_block_hashes` against."""
    return _sha256(parent + packed_tokens + media).digest()[:16]


def root_hash(cache_salt: str, adapter: str = "") -> bytes:
    """The parent of every first block under a salt and an adapter."""
    return hashlib.sha256(f"refold block 1\x00{adapter}\x00{cache_salt}".encode()).digest()[:16]


def media_identity(media: Iterable[Media], start: int, block_size: int) -> bytes:
    """Which media a block holds, and where in it: the tokens of two pictures are the same placeholders."""
    inside = [m for m in media if m.start < start + block_size and m.start + m.num_tokens > start]
    return "".join(f"\x00{m.digest}@{m.start - start}+{m.num_tokens}" for m in inside).encode()
