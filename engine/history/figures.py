"""Figures: latencies, throughput and preemptions of a run, whether it was recorded or played again."""

from collections.abc import Sequence

import msgspec

from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StepScheduled,
)


class Spread(msgspec.Struct, frozen=True):
    """Of many durations, in nanoseconds."""

    count: int = 0
    mean_ns: int = 0
    p50_ns: int = 0
    p95_ns: int = 0
    p99_ns: int = 0
    max_ns: int = 0


def spread(durations: Sequence[int]) -> Spread:
    """The percentiles by rank: the smallest that at least so many are no larger than."""
    if not durations:
        return Spread()
    ordered = sorted(durations)

    def rank(percent: int) -> int:
        return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]

    return Spread(len(ordered), sum(ordered) // len(ordered), rank(50), rank(95), rank(99), ordered[-1])


class Figures(msgspec.Struct, frozen=True):
    """What came of a run. Durations in nanoseconds; `num_recomputed_tokens` were computed before and lost."""

    num_requests: int
    num_finished: int
    num_steps: int
    num_tokens: int
    num_scheduled_tokens: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_stale_tokens: int
    duration_ns: int
    tokens_per_s: float
    queued: Spread
    first_token: Spread
    inter_token: Spread
    total: Spread


class Meter:
    """Observes a run, event by event, with the time of each."""

    def __init__(self, block_size: int = 1) -> None:
        self.block_size = block_size
        self.queued: list[int] = []
        self.first_token: list[int] = []
        self.inter_token: list[int] = []
        self.total: list[int] = []
        self._counts = dict.fromkeys(
            ("requests", "finished", "steps", "tokens", "scheduled", "lost", "cached", "preemptions", "stale"), 0
        )
        self._asked: dict[int, int] = {}
        self._admitted: set[int] = set()
        self._last_token: dict[int, int] = {}
        self._begin_ns: int | None = None
        self._end_ns = 0

    def observe(self, time_ns: int, events: Sequence[Event]) -> None:
        """Follow one record."""
        counts = self._counts
        for event in events:
            if isinstance(event, RequestSubmitted):
                counts["requests"] += 1
                self._asked[event.handle] = time_ns
                self._begin_ns = time_ns if self._begin_ns is None else self._begin_ns
            elif isinstance(event, StepScheduled):
                self._scheduled(time_ns, event)
            elif isinstance(event, RequestPreempted):
                counts["preemptions"] += 1
                counts["lost"] += event.num_computed_tokens
            elif isinstance(event, OutputDelivered):
                self._output(time_ns, event.handles, event.counts or [1] * len(event.handles))
            elif isinstance(event, StaleOutputConsumed):
                counts["stale"] += sum(event.num_tokens)
                kept = [count * out for count, out in zip(event.counts, event.delivered, strict=True)]
                self._output(time_ns, event.handles, kept)
            elif isinstance(event, RequestFinished):
                self._finished(time_ns, event)

    def figures(self) -> Figures:
        """What it comes to."""
        counts = self._counts
        duration = max(self._end_ns - (self._begin_ns or 0), 0) if self._begin_ns is not None else 0
        return Figures(
            num_requests=counts["requests"],
            num_finished=counts["finished"],
            num_steps=counts["steps"],
            num_tokens=counts["tokens"],
            num_scheduled_tokens=counts["scheduled"],
            num_recomputed_tokens=counts["lost"],
            num_cached_tokens=counts["cached"],
            num_preemptions=counts["preemptions"],
            num_stale_tokens=counts["stale"],
            duration_ns=duration,
            tokens_per_s=counts["tokens"] / duration * 1e9 if duration else 0.0,
            queued=spread(self.queued),
            first_token=spread(self.first_token),
            inter_token=spread(self.inter_token),
            total=spread(self.total),
        )

    def _scheduled(self, time_ns: int, event: StepScheduled) -> None:
        self._counts["steps"] += 1
        self._counts["scheduled"] += sum(event.num_tokens)
        for admission in event.admissions:
            handle = event.handles[admission.entry]
            self._counts["cached"] += len(admission.hit_block_ids) * self.block_size
            if handle not in self._admitted and handle in self._asked:
                self._admitted.add(handle)
                self.queued.append(time_ns - self._asked[handle])

    def _output(self, time_ns: int, handles: Sequence[int], counts: Sequence[int]) -> None:
        for handle, count in zip(handles, counts, strict=True):
            if not count:
                continue
            self._counts["tokens"] += count
            last_ns = self._last_token.get(handle)
            if last_ns is not None:
                self.inter_token.extend([(time_ns - last_ns) // count] * count)
            elif handle in self._asked:
                self.first_token.append(time_ns - self._asked[handle])
            self._last_token[handle] = time_ns
        self._end_ns = max(self._end_ns, time_ns)

    def _finished(self, time_ns: int, event: RequestFinished) -> None:
        self._counts["finished"] += 1
        self._last_token.pop(event.handle, None)
        self._admitted.discard(event.handle)
        asked_ns = self._asked.pop(event.handle, None)
        if asked_ns is not None:
            self.total.append(time_ns - asked_ns)
        self._end_ns = max(self._end_ns, time_ns)
