"""What came back: of the record in which a step ended, what its worker had said, entry by entry.

Of most steps that is all of it. Tokens behind the one that ended a request are counted and not told, and what was erased reads
as negative numbers.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from refold.journal.events import Event, LogitsRecorded, OutputDelivered, StaleOutputConsumed


class Said(NamedTuple):
    """What a worker said of one entry: how many tokens, the first of them, and digests of rows of logits if it was asked."""

    num_tokens: int
    token_ids: list[int]
    digests: list[int]


class CameBack(NamedTuple):
    """One step's answer, by handle."""

    step: int
    said: dict[int, Said]


def came_back(events: Iterable[Event]) -> CameBack | None:
    """The answer in a record; None if no step ends with it."""
    step, said, digests = -1, dict[int, Said](), defaultdict[int, list[int]](list)
    for event in events:
        if isinstance(event, OutputDelivered | StaleOutputConsumed):
            step = event.step
            said |= _of_entries(event)
        elif isinstance(event, LogitsRecorded):
            for handle, digest in zip(event.handles, event.digests, strict=False):  # fewer: all of them were erased
                digests[handle].append(digest)
    said |= {handle: said[handle]._replace(digests=found) for handle, found in digests.items()}
    return None if step < 0 else CameBack(step, said)


def _of_entries(event: OutputDelivered | StaleOutputConsumed) -> Iterator[tuple[int, Said]]:
    counts, offset = event.counts or [1] * len(event.handles), 0
    for entry, (handle, count) in enumerate(zip(event.handles, counts, strict=True)):
        told = event.token_ids[offset : offset + count]
        offset += count
        num_said = event.accepted_drafts[entry] + 1 if event.accepted_drafts and count else count
        yield handle, Said(num_said, told, [])
