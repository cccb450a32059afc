"""Work orders: what a worker is told, made of what is recorded.

A scheduled step becomes an order, with the tokens of each request that enters the batch and the slots that may be dropped (a
session's at the end of each turn: it comes in again with the blocks that it kept). Nothing else goes into it than the events
and the state that they fold to, so an order can be made again from the journal.
"""

from refold.gpu.batch import AdmittedRequest, WorkOrder
from refold.journal.events import Event, RequestFinished, RequestPreempted, SessionTurnEnded, StepScheduled
from refold.scheduler.state import State


class OrderBook:
    """Which slots one worker holds. It must hear of every event, each when its whole record is folded."""

    __slots__ = ("_held", "_released")

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._released: list[int] = []

    def forget(self) -> None:
        """The next order is for a new worker, whose slots are empty."""
        self._held.clear()
        self._released.clear()

    def order(self, state: State, event: Event) -> WorkOrder | None:
        """The order that follows from an event, if one does."""
        if isinstance(event, StepScheduled):
            return self._order(state, event)
        if isinstance(event, RequestFinished | RequestPreempted | SessionTurnEnded) and event.handle in self._held:
            self._held.remove(event.handle)
            self._released.append(event.handle)
        return None

    def _order(self, state: State, event: StepScheduled) -> WorkOrder:
        new = {allocation.entry: len(allocation.block_ids) for allocation in event.allocations}
        admitted = [
            _admitted(state, event.handles[a.entry], a.entry, a.epoch, new.get(a.entry, 0)) for a in event.admissions
        ]
        released, self._released = self._released, []
        self._held.update(each.handle for each in admitted)
        return WorkOrder(generation=state.worker_generation, scheduled=event, admitted=admitted, released=released)


def _admitted(state: State, handle: int, entry: int, epoch: int, num_new_blocks: int) -> AdmittedRequest:
    request = state.requests.by_handle[handle]
    return AdmittedRequest(
        entry=entry,
        handle=handle,
        epoch=epoch,
        token_ids=list(request.tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        hit_block_ids=request.block_ids[: len(request.block_ids) - num_new_blocks],
    )
