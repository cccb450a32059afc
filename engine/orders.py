"""Work orders: what a worker must be told beside the journaled step.

The worker rolls its slots forward by itself. It must be told the tokens of a request that enters the batch, and which slots
it may drop; both follow from the events since the last order.
"""

from refold.gpu.batch import AdmittedRequest, WorkOrder
from refold.journal.events import Event, RequestFinished, RequestPreempted, StepScheduled
from refold.scheduler.state import State


class Orders:
    """Which slots the current worker holds, and which of them are to be dropped with the next order."""

    __slots__ = ("_held", "_released")

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._released: list[int] = []

    def observe(self, event: Event) -> None:
        """Note which requests left the batch."""
        if isinstance(event, RequestFinished | RequestPreempted) and event.handle in self._held:
            self._held.remove(event.handle)
            self._released.append(event.handle)

    def forget(self) -> None:
        """The worker is gone, with every slot."""
        self._held.clear()
        self._released.clear()

    def order(self, state: State, event: StepScheduled) -> WorkOrder:
        """The order for a step that was just folded."""
        admitted = [
            _admitted(state, event.handles[a.entry], a.entry, a.epoch, a.hit_block_ids) for a in event.admissions
        ]
        released, self._released = self._released, []
        self._held.update(each.handle for each in admitted)
        return WorkOrder(generation=state.worker_generation, scheduled=event, admitted=admitted, released=released)


def _admitted(state: State, handle: int, entry: int, epoch: int, hit_block_ids: list[int]) -> AdmittedRequest:
    request = state.requests.by_handle[handle]
    return AdmittedRequest(
        entry=entry,
        handle=handle,
        epoch=epoch,
        token_ids=list(request.tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=request.sampling,
        hit_block_ids=hit_block_ids,
    )
