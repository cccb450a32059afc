"""The encoder's budget and cache as a plan will leave them.

An entry that computes places of a media input needs the encoder's output for it: cached, or computed in this step within the
budget, with room made by dropping what nobody uses. Nothing is dropped in the step that adds it again.
"""

from typing import NamedTuple

from refold.journal.events import EncoderInput
from refold.projections.encoder import EncoderCache
from refold.projections.requests import Request


class EncoderProposal(NamedTuple):
    """Media that an entry of `num_tokens` needs: (index, digest, size to compute or 0), and what must go for them."""

    num_tokens: int
    items: list[tuple[int, str, int]]
    evictions: list[str]


class EncoderRoom:
    """The encoder's budget and cache as this plan will leave them."""

    __slots__ = ("_added", "_cache", "_in_use", "budget", "evictions", "used")

    def __init__(self, cache: EncoderCache, budget: int) -> None:
        self._cache = cache
        self._added: dict[str, int] = {}
        self._in_use: set[str] = set()
        self.budget = budget
        self.used = cache.used
        self.evictions: list[str] = []

    def propose(self, request: Request, first: int, n: int) -> EncoderProposal:
        """What computing places first..first+n-1 needs. Fewer places if the encoder's output for some can't be there."""
        items: list[tuple[int, str, int]] = []
        evictions: list[str] = []
        budget, used = self.budget, self.used
        for index, media in enumerate(request.media):
            if media.start >= first + n or media.start + media.num_tokens <= first or index in request.media_held:
                continue
            new = {digest for _, digest, size in items if size}
            if self._is_there(media.digest, evictions) or media.digest in new:
                items.append((index, media.digest, 0))
                continue
            going = self._make_room(used + media.num_tokens, {d for _, d, _ in items} | set(evictions))
            is_going = media.digest in self.evictions or media.digest in evictions
            if media.num_tokens > budget or going is None or is_going:
                return EncoderProposal(max(media.start - first, 0), items, evictions)
            evictions += going
            used += media.num_tokens - sum(self._cache.sizes[d] for d in going)
            budget -= media.num_tokens
            items.append((index, media.digest, media.num_tokens))
        return EncoderProposal(n, items, evictions)

    def commit(self, entry: int, proposal: EncoderProposal) -> list[EncoderInput]:
        """Use up what was proposed."""
        self.evictions += proposal.evictions
        self.used -= sum(self._cache.sizes[digest] for digest in proposal.evictions)
        for _, digest, size in proposal.items:
            self._in_use.add(digest)
            if size:
                self._added[digest] = size
                self.used += size
                self.budget -= size
        return [EncoderInput(entry=entry, media=index, computed=size > 0) for index, _, size in proposal.items]

    def _is_there(self, digest: str, going: list[str]) -> bool:
        held = digest in self._cache.sizes and digest not in self.evictions and digest not in going
        return held or digest in self._added

    def _make_room(self, wanted: int, kept: set[str]) -> list[str] | None:
        """Which unused entries must go so that `wanted` embeddings fit; None if they can't."""
        going: list[str] = []
        for digest in self._cache.evictable:
            if wanted <= self._cache.capacity:
                break
            if digest not in kept and digest not in self._in_use and digest not in self.evictions:
                going.append(digest)
                wanted -= self._cache.sizes[digest]
        return going if wanted <= self._cache.capacity else None
