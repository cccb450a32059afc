"""Which request and which step an event speaks of: what filters stand on."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from refold.journal.events import (
    ContentRedacted,
    DraftsProposed,
    Event,
    GrammarReady,
    LogitsRecorded,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    QuarantineLifted,
    RequestAborted,
    RequestFinished,
    RequestPreempted,
    RequestQuarantined,
    RequestSubmitted,
    SessionClosed,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)


def _preempted(event: RequestPreempted) -> tuple[int, ...]:
    return (event.handle,) if event.for_handle is None else (event.handle, event.for_handle)


_HANDLES: dict[type[Event], Callable[[Any], Iterable[int]]] = {
    RequestSubmitted: lambda e: (e.handle,),
    StepScheduled: lambda e: e.handles,
    RequestPreempted: _preempted,
    OutputDelivered: lambda e: e.handles,
    StaleOutputConsumed: lambda e: e.handles,
    LogprobsDelivered: lambda e: e.handles,
    PromptLogprobsDelivered: lambda e: (e.handle,),
    LogitsRecorded: lambda e: e.handles,
    RequestQuarantined: lambda e: (e.handle,),
    QuarantineLifted: lambda e: (e.handle,),
    RequestFinished: lambda e: (e.handle,),
    RequestAborted: lambda e: (e.handle,),
    GrammarReady: lambda e: (e.handle,),
    SessionExtended: lambda e: (e.handle,),
    SessionClosed: lambda e: (e.handle,),
    SessionTurnEnded: lambda e: (e.handle,),
    DraftsProposed: lambda e: (e.handle,),
    WorkerLost: lambda e: e.handles,
    ContentRedacted: lambda e: e.handles,
}

_STEPS: dict[type[Event], Callable[[Any], Iterable[int]]] = {
    StepScheduled: lambda e: (e.step,),
    OutputDelivered: lambda e: (e.step,),
    StaleOutputConsumed: lambda e: (e.step,),
    LogprobsDelivered: lambda e: (e.step,),
    LogitsRecorded: lambda e: (e.step,),
    WorkerLost: lambda e: e.steps,
}


def handles_of(event: Event) -> Iterable[int]:
    """The requests that the event names, by handle; whoever a preemption was for included."""
    relation = _HANDLES.get(type(event))
    return relation(event) if relation is not None else ()


def steps_of(event: Event) -> Iterable[int]:
    """The steps that the event names."""
    relation = _STEPS.get(type(event))
    return relation(event) if relation is not None else ()


class Names:
    """Client ids by handle, learned from the journal. A handle that it hasn't met reads as `#17`."""

    __slots__ = ("_by_handle", "_handles")

    def __init__(self) -> None:
        self._by_handle: dict[int, str] = {}
        self._handles: dict[str, int] = {}

    def observe(self, event: RequestSubmitted) -> None:
        """Learn one name. A later request with the same client id takes the name over."""
        self._by_handle[event.handle] = event.request_id
        self._handles[event.request_id] = event.handle

    def __getitem__(self, handle: int) -> str:
        return self._by_handle.get(handle) or f"#{handle}"

    def handle_of(self, request_id: str) -> int | None:
        """The handle of the last request with this client id."""
        return self._handles.get(request_id)

    def similar(self, request_id: str) -> list[str]:
        """Known client ids that look like this one; see `similar`."""
        return similar(request_id, list(self._handles))


def similar(request_id: str, known: Sequence[str]) -> list[str]:
    """Ids that look like this one, the best first; the first ones known if none does."""
    return get_close_matches(request_id, known, n=3, cutoff=0.5) or list(known[:3])
