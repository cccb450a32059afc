"""Orders without what was erased: who is left of a batch when some of its requests can't be computed any more.

A redacted request has no tokens, so no worker can compute it again. Nor can it compute a request that found the redacted one's
blocks in the cache. Both leave their batches; the others stay, in their order. What the others get then has the same bits
only if the worker's arithmetic doesn't depend on who is in the batch, so whoever uses this must know that of the worker.
"""

from msgspec.structs import replace

from refold.gpu.batch import AdmittedRequest, WorkOrder
from refold.journal.content import is_placeholder
from refold.journal.events import StepScheduled


class Remaining:
    """Follows the orders for one worker, all of them. `lost` are the handles that can't be computed."""

    __slots__ = ("_lost_blocks", "lost")

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self._lost_blocks: set[int] = set()

    def of(self, order: WorkOrder) -> WorkOrder | None:
        """The order for those who are left: the same one if nobody has to leave it, None if everybody does."""
        scheduled = order.scheduled
        admitted = {each.entry: each for each in order.admitted}
        blocks = {each.entry: each.block_ids for each in scheduled.allocations}
        given = {each.entry: each.token_ids for each in scheduled.drafts}
        for entry, handle in enumerate(scheduled.handles):
            if entry in admitted:
                self._judge(admitted[entry])
            if any(map(is_placeholder, given.get(entry, ()))):
                self.lost.add(handle)
            if handle in self.lost:
                self._lost_blocks.update(blocks.get(entry, ()))
            else:
                self._lost_blocks.difference_update(blocks.get(entry, ()))
        left = [entry for entry, handle in enumerate(scheduled.handles) if handle not in self.lost]
        if len(left) == len(scheduled.handles):
            return order
        return _only(order, left) if left else None

    def _judge(self, admitted: AdmittedRequest) -> None:
        """A request comes in, maybe again: can it be computed?"""
        is_erased = any(map(is_placeholder, admitted.token_ids))
        if is_erased or not self._lost_blocks.isdisjoint(admitted.hit_block_ids):
            self.lost.add(admitted.handle)
        else:
            self.lost.discard(admitted.handle)


def _only(order: WorkOrder, left: list[int]) -> WorkOrder:
    """The order for the entries in `left`, which get new numbers."""
    place = {entry: index for index, entry in enumerate(left)}
    scheduled = order.scheduled
    kept = replace(
        scheduled,
        handles=[scheduled.handles[entry] for entry in left],
        num_tokens=[scheduled.num_tokens[entry] for entry in left],
        first_positions=[scheduled.first_positions[entry] for entry in left],
        num_drafts=[scheduled.num_drafts[entry] for entry in left] if scheduled.num_drafts else [],
        chunk_entries=[place[entry] for entry in scheduled.chunk_entries if entry in place],
        **{
            name: _renumbered(scheduled, name, place)
            for name in ("admissions", "allocations", "drafts", "encoder_inputs")
        },
    )
    admitted = [replace(each, entry=place[each.entry]) for each in order.admitted if each.entry in place]
    return replace(order, scheduled=kept, admitted=admitted)


def _renumbered(scheduled: StepScheduled, name: str, place: dict[int, int]) -> list[object]:
    return [replace(each, entry=place[each.entry]) for each in getattr(scheduled, name) if each.entry in place]
