"""Decide: a command and the state give events.

    events = decide(state, command)

Pure: it reads the state and changes nothing, so an exception in it costs nothing but the command. What it returns is
appended to the journal and then folded; only the fold changes the state.
"""

from collections.abc import Callable
from typing import Any

from refold.journal.errors import Rejected
from refold.journal.events import (
    CacheReset,
    DraftsProposed,
    EnginePaused,
    EngineResumed,
    Event,
    GrammarReady,
    QuarantineLifted,
    RequestAborted,
    RequestFinished,
    StateDigest,
)
from refold.projections.requests import RUNNING
from refold.scheduler.admission import check_prompt_tokens, submit_request
from refold.scheduler.commands import (
    AbortRequest,
    CloseEngine,
    CloseSession,
    Command,
    CompleteStep,
    ExpireSessions,
    ExtendSession,
    FailRequest,
    LiftQuarantine,
    LoseWorker,
    OpenEngine,
    PauseEngine,
    ProposeDrafts,
    ReadyGrammar,
    RecordDigest,
    RedactContent,
    ResetCache,
    ResumeEngine,
    ScheduleStep,
    StartWorker,
    SubmitRequest,
)
from refold.scheduler.completion import complete_step
from refold.scheduler.planning import plan_step
from refold.scheduler.recovery import close_engine, lose_worker, open_engine, start_worker
from refold.scheduler.redaction import redact_content
from refold.scheduler.scratch import preemption
from refold.scheduler.sessions import close_session, expire_sessions, extend_session
from refold.scheduler.state import State, digest


def decide(state: State, command: Command) -> list[Event]:
    """The facts that obeying `command` makes. Empty: there was nothing to do.

    Raises:
        Rejected: the command can't be obeyed; the caller's fault.
        WorkerLost: a worker's answer can't be its answer.
    """
    return DECISIONS[type(command)](state, command)


def _abort_request(state: State, command: AbortRequest) -> list[Event]:
    request = state.requests.find_live(command.request_id)
    if request is None:
        return []
    return [
        RequestAborted(handle=request.handle, cause=command.cause),
        RequestFinished(handle=request.handle, reason="abort", num_output_tokens=request.next_output_index),
    ]


def _fail_request(state: State, command: FailRequest) -> list[Event]:
    request = state.requests.find_live(command.request_id)
    if request is None:
        return []
    outputs = request.next_output_index
    return [RequestFinished(handle=request.handle, reason="error", num_output_tokens=outputs, message=command.message)]


def _reset_cache(state: State, command: ResetCache) -> list[Event]:
    running = state.queues.running
    holders = [r for r in state.requests.sessions.values() if r.status is not RUNNING and r.block_ids]
    if (running or holders) and not command.reset_running:
        raise Rejected(
            f"the prefix cache can't be reset while {len(running)} requests run and {len(holders)} sessions hold blocks: "
            "wait for them, or reset the running ones too"
        )
    free = state.pool.num_free
    reclaims = [preemption(r, "session_reclaimed", "drop", None, 0, free) for r in holders]
    preemptions = [preemption(r, "cache_reset", "drop", None, 0, free) for r in reversed(running)]
    return [*reclaims, *preemptions, CacheReset(reset_running=command.reset_running)]


def _ready_grammar(state: State, command: ReadyGrammar) -> list[Event]:
    request = state.requests.find_live(command.request_id)
    return [GrammarReady(handle=request.handle)] if request is not None and request.waits_for_grammar else []


def _propose_drafts(state: State, command: ProposeDrafts) -> list[Event]:
    request = state.requests.find_live(command.request_id)
    if request is None or request.num_in_flight_tokens or request.status is not RUNNING:
        return []
    if state.config.speculation == "off":
        return []
    check_prompt_tokens(command.request_id, command.token_ids, state.config)
    return [DraftsProposed(handle=request.handle, token_ids=command.token_ids)]


def _lift_quarantine(state: State, command: LiftQuarantine) -> list[Event]:
    handles = {request_id: handle for handle, request_id in state.suspicion.quarantined.values()}
    if command.request_id not in handles:
        others = "1 other content is" if len(handles) == 1 else f"{len(handles)} other contents are"
        raise Rejected(f"nothing that request {command.request_id!r} asked for is quarantined, and {others}")
    return [QuarantineLifted(handle=handles[command.request_id])]


def _pause_engine(state: State, command: PauseEngine) -> list[Event]:
    return [EnginePaused(mode=command.mode)] if state.paused != command.mode else []


def _resume_engine(state: State, command: ResumeEngine) -> list[Event]:  # noqa: ARG001
    return [EngineResumed()] if state.paused is not None else []


def _record_digest(state: State, command: RecordDigest) -> list[Event]:  # noqa: ARG001
    return [StateDigest(digest=digest(state))]


DECISIONS: dict[type[Command], Callable[[State, Any], list[Event]]] = {
    OpenEngine: open_engine,
    CloseEngine: close_engine,
    StartWorker: start_worker,
    LoseWorker: lose_worker,
    LiftQuarantine: _lift_quarantine,
    SubmitRequest: submit_request,
    AbortRequest: _abort_request,
    FailRequest: _fail_request,
    ScheduleStep: plan_step,
    CompleteStep: complete_step,
    ResetCache: _reset_cache,
    ReadyGrammar: _ready_grammar,
    ProposeDrafts: _propose_drafts,
    ExtendSession: extend_session,
    CloseSession: close_session,
    ExpireSessions: expire_sessions,
    PauseEngine: _pause_engine,
    ResumeEngine: _resume_engine,
    RecordDigest: _record_digest,
    RedactContent: redact_content,
}
