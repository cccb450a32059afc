"""What the law book remembers: of each request, what the journal told; of each block, who writes it.

It names a block's content by an identity of its own making, beside the hash that the scheduler must have given it.
"""

import hashlib
import struct
from collections import deque

from refold.journal.events import RequestSubmitted
from refold.projections.block_hashes import block_hash, media_identity, root_hash


class Account:
    """What the journal told about one request: its context now, and all that it was given."""

    __slots__ = ("chunks", "context", "hashes", "identities", "is_idle", "outputs", "submitted", "turn_start")

    def __init__(self, event: RequestSubmitted) -> None:
        self.submitted = event
        self.context = list(event.prompt_token_ids)
        self.turn_start = len(self.context)
        self.outputs: list[int] = []
        self.hashes: list[bytes] = []
        self.identities: list[bytes] = []
        self.chunks: deque[list[int]] = deque()
        self.is_idle = False

    def let_go(self) -> None:
        """The request has ended and what it published is proved: only its outputs are still of use."""
        self.context = []
        self.chunks.clear()
        self.forget_chain()

    def forget_chain(self) -> None:
        """The context has changed, or is cut into other blocks."""
        self.hashes.clear()
        self.identities.clear()

    def chain(self, index: int, size: int) -> tuple[bytes, bytes]:
        """The hash that block `index` must have, and the identity of its content. What was hashed isn't hashed again."""
        event = self.submitted
        del self.hashes[len(self.context) // size :], self.identities[len(self.context) // size :]
        for i in range(len(self.hashes), index + 1):
            tokens = self.context[i * size : (i + 1) * size]
            packed = struct.pack(f"<{size}q", *tokens)
            media = media_identity(event.media, i * size, size) if event.media else b""
            parent = self.hashes[i - 1] if i else root_hash(event.cache_salt, event.adapter)
            self.hashes.append(block_hash(parent, packed, media))
            inside = [
                (m.digest, m.num_tokens, m.start - i * size)
                for m in event.media
                if m.start < (i + 1) * size and m.start + m.num_tokens > i * size
            ]
            before = self.identities[i - 1] if i else repr((event.cache_salt, event.adapter)).encode()
            content = before + repr((tokens, inside)).encode()
            self.identities.append(hashlib.blake2b(content, digest_size=16).digest())
        return self.hashes[index], self.identities[index]


class Written:
    """Who writes a block, as which block of its table, and which places are written: a bit each."""

    __slots__ = ("handle", "index", "places")

    def __init__(self, handle: int, index: int) -> None:
        self.handle = handle
        self.index = index
        self.places = 0
