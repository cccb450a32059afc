"""The window of in-flight steps: what the worker was asked and has not answered.

An entry remembers the epoch that it was scheduled in. When its request's epoch rises, the entry is stale, and the bump's
policy says what to do with its tokens: `deliver` or `drop`. An entry once marked `drop` stays so, whatever bump follows:
its positions have been sampled again since. Steps come back in the order in which they were scheduled.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping

from refold.journal.events import StalePolicy, StepScheduled
from refold.projections.batch import Batch, next_batch
from refold.projections.requests import Request

NOBODY = Batch()


class InFlightStep:
    """One step in flight. Columns as in its `StepScheduled`; `stale` maps the entries whose epoch is over to their policy.

    `delivered`: the current entries have come back, the stale ones are still to be told. `filled`: the requests whose blocks
    it filled with a token not known when it was scheduled, so that the block's hash can be told only when all is back.

    Where every entry samples and nothing can be rejected, `sampled_positions` says which position each samples; else it is empty.
    `due_entries`: all that may do more than decode one token; the others reach no border of a block and no limit. Of them,
    `last_entries` sample their request's last token, as far as that is known beforehand.
    """

    __slots__ = (
        "batch",
        "chunk_entries",
        "delivered",
        "due_entries",
        "encoded",
        "epochs",
        "filled",
        "handles",
        "last_entries",
        "num_drafts",
        "num_tokens",
        "num_unresolved",
        "requests",
        "sampled_positions",
        "stale",
        "step",
        "written",
    )

    def __init__(self, event: StepScheduled, batch: Batch) -> None:
        self.step = event.step
        self.batch = batch
        self.requests = batch.requests
        self.handles = batch.handles
        self.epochs = batch.epochs
        self.num_tokens = event.num_tokens
        self.num_drafts = event.num_drafts
        self.encoded: list[str] = []
        self.chunk_entries = frozenset(event.chunk_entries)
        self.stale: dict[int, StalePolicy] = {}
        self.num_unresolved = len(event.handles)
        self.delivered = False
        self.due_entries: list[int] = []
        self.last_entries: list[int] = []
        self.sampled_positions: list[int] = []
        self.written: list[int] = []
        self.filled: list[Request] = []


class Window:
    """In-flight steps, the oldest first. `last_batch` is that of the last one, which may have come back since."""

    __slots__ = ("in_flight", "last_batch", "next_step")

    def __init__(self) -> None:
        self.in_flight: deque[InFlightStep] = deque()
        self.last_batch = NOBODY
        self.next_step = 0


def open_step(window: Window, event: StepScheduled, by_handle: Mapping[int, Request]) -> InFlightStep:
    """A step enters the window: who runs already first, then who comes in."""
    assert event.step == window.next_step, (event.step, window.next_step)
    assert len(event.handles) == len(event.num_tokens) == len(event.first_positions) >= 1, event.step
    batch = window.last_batch = _batch_of(window, event, by_handle)
    step = InFlightStep(event, batch)
    window.in_flight.append(step)
    window.next_step += 1
    return step


def _batch_of(window: Window, event: StepScheduled, by_handle: Mapping[int, Request]) -> Batch:
    """The last step's, if it has the same entries; else what is left of it, and who comes in."""
    old, left = window.last_batch, set[int]()
    if window.in_flight:
        last = window.in_flight[-1]
        assert last.batch is old, (last.step, event.step)
        if not (last.stale or last.last_entries) and old.handles == event.handles:
            return old
        left = last.stale.keys() | last.last_entries
    elif not old.is_as_new:
        old = NOBODY
    elif old.handles == event.handles:
        return old
    num_running = len(event.handles) - len(event.admissions)
    return next_batch(old, left, event.handles[:num_running], event.handles[num_running:], by_handle)


def mark_stale(window: Window, request: Request, policy: StalePolicy) -> tuple[int, int | None]:
    """Mark the request's entries in flight; returns how many of their tokens are deliverable, and as `last_step_of`."""
    deliverable, last = 0, None
    for step, entry in _entries_of(window, request):
        if step.stale.get(entry) != "drop":
            step.stale[entry] = policy
        if step.stale[entry] == "deliver":
            deliverable += step.num_tokens[entry]
        last = step.step
    return deliverable, last


def last_step_of(window: Window, request: Request) -> int | None:
    """The last step in flight that has an entry of the request; None if there is none."""
    return max((step.step for step, _ in _entries_of(window, request)), default=None)


def _entries_of(window: Window, request: Request) -> Iterator[tuple[InFlightStep, int]]:
    for step in window.in_flight if request.num_in_flight_tokens else ():
        entry = _entry_of(step.handles, request.handle)
        if entry is not None and (entry in step.stale or not step.delivered):
            yield step, entry


def _entry_of(handles: list[int], handle: int) -> int | None:
    """Where a handle is: in a batch by order of arrival, which is sorted, at once."""
    entry = bisect_left(handles, handle)
    if entry < len(handles) and handles[entry] == handle:
        return entry
    return handles.index(handle) if handle in handles else None


def resolve(window: Window, step: InFlightStep, num_entries: int) -> bool:
    """Entries of the oldest step came back. True when they were the last: the step has left the window."""
    assert window.in_flight[0] is step, step.step
    step.num_unresolved -= num_entries
    assert step.num_unresolved >= 0, step.step
    if step.num_unresolved:
        return False
    window.in_flight.popleft()
    return True
