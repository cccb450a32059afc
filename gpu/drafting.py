"""The worker's own drafts: prompt look-up over a request's tokens, with an index that grows with them.

What it proposes is what the scheduler's look-up (`refold.scheduler.drafting`) would: what followed the latest earlier occurrence
of the last tokens, the longest match first. The scheduler reads backwards at each step and keeps nothing, so that a plan is a
function of the state. A worker drafts in every step of every request, before anything else can begin: here each n-gram's
latest place is remembered, and a look-up costs the same however long the request is.

The worker knows its newest samples before anyone else, so it can draft with steps in flight.
"""

MAX_NGRAM = 3
LOOK_BACK_TOKENS = 2048


class DraftIndex:
    """The n-grams of one request's tokens, by where they were seen last. It must be asked with the same growing list."""

    __slots__ = ("_last_start", "_num_indexed")

    def __init__(self) -> None:
        self._last_start: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens that followed an earlier occurrence of the last tokens; none if there was none."""
        end = len(token_ids)
        self._index(token_ids, end - 1)
        oldest = max(0, end - LOOK_BACK_TOKENS)
        for length in range(min(MAX_NGRAM, end - oldest - 1), 0, -1):
            start = self._last_start.get(tuple(token_ids[end - length :]), -1)
            if start >= oldest:
                return token_ids[start + length : start + length + most]
        return []

    def _index(self, token_ids: list[int], stop: int) -> None:
        """Note every n-gram that ends before `stop`: the last tokens are what is looked for, not where."""
        assert self._num_indexed <= stop, f"{self._num_indexed} tokens are indexed, {stop} are left"
        for end in range(self._num_indexed + 1, stop + 1):
            for length in range(1, min(MAX_NGRAM, end) + 1):
                self._last_start[tuple(token_ids[end - length : end])] = end - length
        self._num_indexed = stop
