"""A trace for Perfetto or chrome://tracing: requests, the worker's steps, counters, and the way from preemption to resumption.

Chrome's JSON drops slices of one track that overlap, so each request has a track of its own, on which its states follow each
other: queued, running, preempted, idle. The worker does one step after the other: a step's slice begins when the worker is
free for it. Times are microseconds since the first record.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import msgspec

from refold.engine.history.plain import safe
from refold.engine.history.relations import Names
from refold.engine.history.replay import unheard
from refold.engine.history.words import preemption_in_words
from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.journal.record import Record
from refold.scheduler.state import State

REQUESTS, WORKER, COUNTERS = 1, 2, 3
_NAMES = {REQUESTS: "requests", WORKER: "worker", COUNTERS: "counters"}
_EXECUTED, _LIVES = 1, 2
Row = dict[str, Any]


class Tracer:
    """Follows a journal. `observe` gives the rows of one record, `end` those of what goes on at the end."""

    def __init__(self) -> None:
        self.names = Names()
        self._first_ns: int | None = None
        self._last_us = 0.0
        self._doing: dict[int, tuple[str, float, Row]] = {}
        self._preempted: dict[int, int] = {}
        self._num_flows = 0
        self._planned: dict[int, tuple[float, StepScheduled]] = {}
        self._free_at_us = 0.0
        self._counted: Row = {}
        self._worker: tuple[float, str] | None = None

    def begin(self) -> Iterator[Row]:
        """Names of the groups."""
        for pid, name in _NAMES.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for tid, name in ((_EXECUTED, "steps"), (_LIVES, "worker lives")):
            yield {"ph": "M", "name": "thread_name", "pid": WORKER, "tid": tid, "args": {"name": name}}

    def observe(self, record: Record, events: Sequence[Event], state: State) -> Iterator[Row]:
        """Follow one record; the state is the one behind it."""
        if self._first_ns is None:
            self._first_ns = record.time_ns
        now = max((record.time_ns - self._first_ns) / 1000, self._last_us)
        self._last_us = now
        for event in events:
            teller = _TELLERS.get(type(event))
            if teller is not None:
                yield from teller(self, now, record, event)
        yield from self._count(now, state)

    def end(self) -> Iterator[Row]:
        """What goes on at the end of the journal ends there."""
        for handle in list(self._doing):
            yield from self._turn_to(handle, None, self._last_us)
        if self._worker is not None:
            yield self._slice(WORKER, _LIVES, self._worker[1], self._worker[0], self._last_us, {})

    # -- requests -----------------------------------------------------------------------------------------------------

    def _turn_to(self, handle: int, what: str | None, now: float, **args: object) -> Iterator[Row]:
        """End what a request does, and let it do something else."""
        doing = self._doing.pop(handle, None)
        if doing is not None:
            name, start, told = doing
            yield self._slice(REQUESTS, handle, name, start, now, told)
        if what is not None:
            self._doing[handle] = (what, now, args)

    def _submitted(self, now: float, record: Record, event: RequestSubmitted) -> Iterator[Row]:
        self.names.observe(event)
        name = safe(event.request_id)
        yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": event.handle, "args": {"name": name}}
        args = {"position": record.position, "prompt_tokens": len(event.prompt_token_ids)}
        yield from self._turn_to(event.handle, "queued", now, **args)

    def _scheduled(self, now: float, record: Record, event: StepScheduled) -> Iterator[Row]:
        self._planned[event.step] = (now, event)
        for admission in event.admissions:
            handle = event.handles[admission.entry]
            yield from self._turn_to(handle, "running", now, position=record.position, step=event.step)
            flow = self._preempted.pop(handle, None)
            if flow is not None:
                yield {
                    "ph": "f",
                    "bp": "e",
                    "name": "preempted",
                    "cat": "preemption",
                    "id": flow,
                    "pid": REQUESTS,
                    "tid": handle,
                    "ts": now,
                }

    def _preempted_one(self, now: float, record: Record, event: RequestPreempted) -> Iterator[Row]:
        if event.reason == "session_reclaimed":
            return
        yield from self._turn_to(
            event.handle, "preempted", now, position=record.position, why=preemption_in_words(event, self.names)
        )
        self._num_flows += 1
        self._preempted[event.handle] = self._num_flows
        yield {
            "ph": "s",
            "name": "preempted",
            "cat": "preemption",
            "id": self._num_flows,
            "pid": REQUESTS,
            "tid": event.handle,
            "ts": now,
        }

    def _finished(self, now: float, record: Record, event: RequestFinished) -> Iterator[Row]:  # noqa: ARG002
        yield from self._turn_to(event.handle, None, now)
        args = {"reason": event.reason, "tokens": event.num_output_tokens}
        yield {
            "ph": "i",
            "s": "t",
            "name": f"finished: {event.reason}",
            "pid": REQUESTS,
            "tid": event.handle,
            "ts": now,
            "args": args,
        }

    def _turn_ended(self, now: float, record: Record, event: SessionTurnEnded) -> Iterator[Row]:
        yield from self._turn_to(event.handle, "idle", now, position=record.position)

    def _extended(self, now: float, record: Record, event: SessionExtended) -> Iterator[Row]:
        if self._doing.get(event.handle, ("",))[0] == "idle":
            yield from self._turn_to(event.handle, "queued", now, position=record.position)

    # -- the worker ---------------------------------------------------------------------------------------------------

    def _came_back(self, now: float, record: Record, event: OutputDelivered | StaleOutputConsumed) -> Iterator[Row]:
        planned = self._planned.pop(event.step, None)
        if planned is None:
            return
        start = min(max(planned[0], self._free_at_us), now)
        self._free_at_us = now
        tokens = sum(planned[1].num_tokens)
        args = {"position": record.position, "requests": len(planned[1].handles), "tokens": tokens}
        yield self._slice(WORKER, _EXECUTED, f"step {event.step}", start, now, args)

    def _worker_started(self, now: float, record: Record, event: WorkerStarted) -> Iterator[Row]:  # noqa: ARG002
        self._worker = (now, f"worker {event.generation}")
        yield from ()

    def _worker_lost(self, now: float, record: Record, event: WorkerLost) -> Iterator[Row]:
        self._planned.clear()
        self._free_at_us = now
        if self._worker is not None:
            args = {"position": record.position, "lost": safe(event.reason)}
            yield self._slice(WORKER, _LIVES, self._worker[1], self._worker[0], now, args)
            self._worker = None
        for handle in event.handles:
            if self._doing.get(handle, ("",))[0] == "running":
                yield from self._turn_to(handle, "preempted", now, position=record.position, why="its worker was lost")

    # -- counters -----------------------------------------------------------------------------------------------------

    def _count(self, now: float, state: State) -> Iterator[Row]:
        pool, queues = state.pool, state.queues
        counted: Row = {
            "KV blocks": {
                "owned": pool.num_blocks - pool.num_free - pool.num_fenced,
                "fenced": pool.num_fenced,
                "cached": len(pool.free_cached),
            },
            "requests": {"running": len(queues.running), "waiting": len(queues.waiting)},
            "tokens in flight": {
                "current": sum(r.num_in_flight_tokens - r.num_stale_output_tokens for r in queues.running),
                "stale": sum(r.num_stale_output_tokens for r in state.requests.by_handle.values()),
            },
        }
        for name, values in counted.items():
            if self._counted.get(name) != values:
                yield {"ph": "C", "name": name, "pid": COUNTERS, "tid": 0, "ts": now, "args": values}
        self._counted = counted

    @staticmethod
    def _slice(pid: int, tid: int, name: str, start: float, end: float, args: Row) -> Row:
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start, "args": args}


_TELLERS: dict[type[Event], Callable[[Tracer, float, Record, Any], Iterator[Row]]] = {
    RequestSubmitted: Tracer._submitted,  # noqa: SLF001 - the table of this module's own methods
    StepScheduled: Tracer._scheduled,  # noqa: SLF001
    RequestPreempted: Tracer._preempted_one,  # noqa: SLF001
    RequestFinished: Tracer._finished,  # noqa: SLF001
    SessionTurnEnded: Tracer._turn_ended,  # noqa: SLF001
    SessionExtended: Tracer._extended,  # noqa: SLF001
    OutputDelivered: Tracer._came_back,  # noqa: SLF001
    StaleOutputConsumed: Tracer._came_back,  # noqa: SLF001
    WorkerStarted: Tracer._worker_started,  # noqa: SLF001
    WorkerLost: Tracer._worker_lost,  # noqa: SLF001
}


def write_trace(
    replayed: Iterable[tuple[Record, Sequence[Event], State]],
    target: TextIO,
    on_record: Callable[[], object] = unheard,
) -> int:
    """Write the trace of a whole replay as it comes; returns the number of its rows."""
    tracer, encode, count = Tracer(), msgspec.json.Encoder().encode, 0

    def put(rows: Iterable[Row]) -> None:
        nonlocal count
        for row in rows:
            target.write((",\n" if count else "") + encode(row).decode())
            count += 1

    target.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    put(tracer.begin())
    for record, events, state in replayed:
        put(tracer.observe(record, events, state))
        on_record()
    put(tracer.end())
    target.write("\n]}\n")
    return count
