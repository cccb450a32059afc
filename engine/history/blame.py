"""Blame: where each token came from.

Of each output token of a request: the step that made it, when that step was planned and when it came back, in which epoch of
the request, at which place in the batch and with whom, whether it was sampled or a draft that was accepted, and whether it
came as stale output of an epoch that was over.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from refold.engine.history.replay import unheard
from refold.engine.history.request_story import RequestStory, told
from refold.journal.events import Event, OutputDelivered, RequestSubmitted, StaleOutputConsumed, StepScheduled
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.scheduler.state import State


class Origin(msgspec.Struct, frozen=True):
    """Where one token came from. `scheduled` and `delivered` are positions of records; `batch` is the whole step's."""

    index: int
    token_id: int
    step: int
    scheduled: int
    delivered: int
    scheduled_ns: int
    delivered_ns: int
    engine_epoch: int
    worker_generation: int
    request_epoch: int
    entry: int
    batch: list[str]
    num_batch_tokens: int
    made: str
    is_stale: bool

    @property
    def words(self) -> str:
        """One line, without its index."""
        mates = len(self.batch) - 1
        company = "alone" if not mates else f"with {mates} other{'s' if mates > 1 else ''}"
        stale = ", as stale output of an epoch that was over" if self.is_stale else ""
        return (
            f"{self.made} in step {self.step} ({company}, {self.num_batch_tokens} tokens), epoch {self.request_epoch}"
            f"{stale}; planned at {self.scheduled}, back at {self.delivered}"
        )


class _Planned(msgspec.Struct, frozen=True):
    """A step of our request's that is in flight."""

    event: StepScheduled
    position: int
    time_ns: int
    entry: int
    epoch: int
    generation: int


class BlameStory(RequestStory):
    """Follows a journal and keeps where the tokens of the last request with a client's id came from."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.origins: list[Origin] = []
        self._planned: dict[int, _Planned] = {}

    def observe(self, record: Record, events: Sequence[Event], state: State) -> None:
        """Follow one record; the state is the one behind it."""
        for event in events:
            if isinstance(event, RequestSubmitted):
                if self._is_begun_by(event):
                    self.origins, self._planned = [], {}
            elif isinstance(event, StepScheduled) and self._handle in event.handles:
                entry = event.handles.index(self._handle)
                request = state.requests.by_handle[self._handle]
                self._planned[event.step] = _Planned(
                    event, record.position, record.time_ns, entry, request.epoch, state.worker_generation
                )
            elif isinstance(event, OutputDelivered | StaleOutputConsumed) and self._handle in event.handles:
                self._came_back(record, event)

    def _came_back(self, record: Record, event: OutputDelivered | StaleOutputConsumed) -> None:
        planned = self._planned.pop(event.step)
        at = event.handles.index(self._handle)
        is_stale = isinstance(event, StaleOutputConsumed)
        if isinstance(event, StaleOutputConsumed) and not event.delivered[at]:
            return
        counts = event.counts or [1] * len(event.handles)
        start = sum(counts[:at])
        accepted = event.accepted_drafts[at] if event.accepted_drafts else 0
        for offset, token in enumerate(event.token_ids[start : start + counts[at]]):
            made = "a draft, accepted" if offset < accepted else "sampled"
            self._add(record, planned, token, event.first_output_indices[at] + offset, made, is_stale=is_stale)

    def _add(self, record: Record, planned: _Planned, token: int, index: int, made: str, *, is_stale: bool) -> None:
        self.origins.append(
            Origin(
                index=index,
                token_id=token,
                step=planned.event.step,
                scheduled=planned.position,
                delivered=record.position,
                scheduled_ns=planned.time_ns,
                delivered_ns=record.time_ns,
                engine_epoch=record.engine_epoch,
                worker_generation=planned.generation,
                request_epoch=planned.epoch,
                entry=planned.entry,
                batch=[self.names[handle] for handle in planned.event.handles],
                num_batch_tokens=sum(planned.event.num_tokens),
                made=made,
                is_stale=is_stale,
            )
        )


def blame(
    reader: JournalReader,
    request_id: str,
    stream: str = DEFAULT_STREAM,
    on_record: Callable[[], object] = unheard,
) -> BlameStory:
    """Follow a whole journal. Raises as `replay`."""
    return told(BlameStory(request_id), reader, stream, on_record)


def rows(origins: Sequence[Origin]) -> Iterator[dict[str, Any]]:
    """As plain data."""
    for origin in origins:
        yield msgspec.to_builtins(origin)
