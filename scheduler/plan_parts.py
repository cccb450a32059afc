"""What a plan is put together from: frozen, and only data.

They stand apart from the code that plans because the compiled form of the core leaves out modules that define structs (setup.py).
"""

from collections.abc import Sequence

import msgspec

from refold.scheduler.encoder_room import EncoderProposal


class Hit(msgspec.Struct, frozen=True, gc=False):
    """Cached blocks that hold a request's prefix; of them, `idle` belong to nobody yet and count as free."""

    block_ids: list[int]
    idle: list[int]


NO_HIT = Hit([], [])


class Shape(msgspec.Struct, frozen=True, gc=False):
    """An entry to be: `num_tokens` in all (0: not in this step), the last `num_drafts` of them drafts."""

    num_tokens: int
    is_chunk: bool
    num_drafts: int = 0
    draft_token_ids: Sequence[int] = ()
    encoder: EncoderProposal | None = None


class Promise(msgspec.Struct, frozen=True, gc=False):
    """Blocks `start` to `end` of a request's `table` will hold what its `hashes` say, once this step has run."""

    start: int
    end: int
    hashes: list[bytes]
    table: list[int]

    def has(self, index: int, content_hash: bytes) -> bool:
        """Whether block `index` of a chain that came to `start` is promised here too."""
        return index < self.end and self.hashes[index] == content_hash
