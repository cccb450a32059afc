"""Decide: a command and the state give events.

    events = decide(state, command)

Pure: it reads the state and changes nothing, so an exception in it costs nothing but the command. What it returns is
appended to the journal and then folded; only the fold changes the state.
"""

from collections.abc import Callable
from typing import Any

from refold.journal.errors import Rejected
from refold.journal.events import CacheReset, Event, RequestAborted, RequestFinished, StateDigest
from refold.scheduler.admission import submit_request
from refold.scheduler.commands import (
    AbortRequest,
    CloseEngine,
    Command,
    CompleteStep,
    FailRequest,
    LoseWorker,
    OpenEngine,
    RecordDigest,
    ResetCache,
    ScheduleStep,
    StartWorker,
    SubmitRequest,
)
from refold.scheduler.completion import complete_step
from refold.scheduler.planning import plan_step
from refold.scheduler.recovery import close_engine, lose_worker, open_engine, start_worker
from refold.scheduler.scratch import preemption
from refold.scheduler.state import State, digest


def decide(state: State, command: Command) -> list[Event]:
    """The facts that obeying `command` makes. Empty: there was nothing to do.

    Raises:
        Rejected: the command can't be obeyed; the caller's fault.
        WorkerLost: a worker's answer can't be its answer.
    """
    return DECISIONS[type(command)](state, command)


def _schedule_step(state: State, command: ScheduleStep) -> list[Event]:  # noqa: ARG001
    return plan_step(state)


def _abort_request(state: State, command: AbortRequest) -> list[Event]:
    request = state.requests.find_live(command.request_id)
    if request is None:
        return []
    return [
        RequestAborted(handle=request.handle, cause=command.cause),
        RequestFinished(handle=request.handle, reason="abort", num_output_tokens=request.num_output_tokens),
    ]


def _fail_request(state: State, command: FailRequest) -> list[Event]:
    request = state.requests.find_live(command.request_id)
    if request is None:
        return []
    outputs = request.num_output_tokens
    return [RequestFinished(handle=request.handle, reason="error", num_output_tokens=outputs, message=command.message)]


def _reset_cache(state: State, command: ResetCache) -> list[Event]:
    running = state.queues.running
    if running and not command.reset_running:
        raise Rejected(
            f"the prefix cache can't be reset while {len(running)} requests run: wait for them, or reset the running ones too"
        )
    free = state.pool.num_free
    preemptions = [preemption(r, "cache_reset", "drop", None, 0, free) for r in reversed(running)]
    return [*preemptions, CacheReset(reset_running=command.reset_running)]


def _record_digest(state: State, command: RecordDigest) -> list[Event]:  # noqa: ARG001
    return [StateDigest(digest=digest(state))]


DECISIONS: dict[type[Command], Callable[[State, Any], list[Event]]] = {
    OpenEngine: open_engine,
    CloseEngine: close_engine,
    StartWorker: start_worker,
    LoseWorker: lose_worker,
    SubmitRequest: submit_request,
    AbortRequest: _abort_request,
    FailRequest: _fail_request,
    ScheduleStep: _schedule_step,
    CompleteStep: complete_step,
    ResetCache: _reset_cache,
    RecordDigest: _record_digest,
}
