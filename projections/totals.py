"""Totals: how much of everything the journal tells. A fold like any other, so that they survive a restart."""

from collections.abc import Callable, Iterable
from typing import Any

from refold.journal.events import (
    EngineClosed,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)

COUNTS = (
    "finished",
    "lost_steps",
    "lost_workers",
    "preemptions",
    "prompt_tokens",
    "requests",
    "scheduled_tokens",
    "stale_tokens_delivered",
    "stale_tokens_dropped",
    "steps",
    "tokens",
)


class Totals:
    """Counts over every life of the engine. Written by `observe_all` only."""

    __slots__ = (*COUNTS, "is_closed")

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.finished: dict[str, int] = {}
        self.steps = 0
        self.scheduled_tokens = 0
        self.tokens = 0
        self.preemptions = 0
        self.stale_tokens_delivered = 0
        self.stale_tokens_dropped = 0
        self.lost_workers = 0
        self.lost_steps = 0
        self.is_closed = False

    def counts(self) -> dict[str, Any]:
        """Every count by its name."""
        return {name: getattr(self, name) for name in COUNTS}

    def observe_all(self, events: Iterable[Event]) -> None:
        """Count events."""
        for event in events:
            observer = _OBSERVERS.get(type(event))
            if observer is not None:
                observer(self, event)


def _submitted(totals: Totals, event: RequestSubmitted) -> None:
    totals.requests += 1
    totals.prompt_tokens += len(event.prompt_token_ids)


def _finished(totals: Totals, event: RequestFinished) -> None:
    totals.finished[event.reason] = totals.finished.get(event.reason, 0) + 1


def _step(totals: Totals, event: StepScheduled) -> None:
    totals.steps += 1
    totals.scheduled_tokens += sum(event.num_tokens)


def _delivered(totals: Totals, event: OutputDelivered) -> None:
    totals.tokens += len(event.token_ids)


def _preempted(totals: Totals, event: RequestPreempted) -> None:  # noqa: ARG001
    totals.preemptions += 1


def _stale(totals: Totals, event: StaleOutputConsumed) -> None:
    delivered = sum(count for count, out in zip(event.counts, event.delivered, strict=True) if out)
    totals.tokens += delivered
    totals.stale_tokens_delivered += delivered
    totals.stale_tokens_dropped += sum(event.counts) - delivered


def _opened(totals: Totals, event: EngineOpened) -> None:  # noqa: ARG001
    totals.is_closed = False


def _closed(totals: Totals, event: EngineClosed) -> None:  # noqa: ARG001
    totals.is_closed = True


def _worker_lost(totals: Totals, event: WorkerLost) -> None:
    """The worker of an engine that closed in good order wasn't lost: it ended with its engine."""
    totals.lost_workers += not totals.is_closed
    totals.lost_steps += len(event.steps)


_OBSERVERS: dict[type[Event], Callable[[Totals, Any], None]] = {
    EngineOpened: _opened,
    EngineClosed: _closed,
    RequestSubmitted: _submitted,
    RequestFinished: _finished,
    StepScheduled: _step,
    OutputDelivered: _delivered,
    RequestPreempted: _preempted,
    StaleOutputConsumed: _stale,
    WorkerLost: _worker_lost,
}
