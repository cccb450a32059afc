"""Recall: which command led to a record.

A journal holds facts, not orders. But enough is in the facts, and in the state before them, to say the order again: a step's
facts follow from `ScheduleStep`, an output's from `CompleteStep` with the tokens that came back, and so on. Two things are gone
and don't matter: tokens behind the one that ended a request, and positions of what was thrown away.

With the order, a decision can be taken again (law L12), and a history can be played again without its journal.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from refold.journal.content import is_placeholder
from refold.journal.events import (
    CacheReset,
    ContentRedacted,
    DraftsProposed,
    EngineClosed,
    EngineOpened,
    EnginePaused,
    EngineResumed,
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
    RequestSubmitted,
    SessionClosed,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.journal.surprisals import EntrySurprisals, blank, numbers_per_token
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
from refold.scheduler.state import State


class Forgotten(ValueError):
    """The command can't be said again: its content was erased, or the record is no decision of any refold."""


def command_of(events: Sequence[Event], state: State) -> Command:
    """The command that led to these events of one record; `state` is the one before them.

    Raises:
        Forgotten: nobody can tell any more.
    """
    kinds = {type(event) for event in events}
    for kind, recall in _RECALLERS:
        if kind in kinds:
            try:
                return recall(events, state)
            except (LookupError, ValueError, TypeError, ArithmeticError) as error:
                raise Forgotten(f"the command of {kind.__name__} can't be told: {error}") from error
    if RequestPreempted in kinds:
        return ScheduleStep()
    raise Forgotten(f"no command leads to {', '.join(sorted(kind.__name__ for kind in kinds)) or 'nothing'}")


def _the(kind: type[Event], events: Sequence[Event]) -> Any:
    return next(event for event in events if type(event) is kind)


def _name(state: State, handle: int) -> str:
    return state.requests.by_handle[handle].request_id


def _known(token_ids: Sequence[int]) -> list[int]:
    if any(map(is_placeholder, token_ids)):
        raise Forgotten("its tokens were erased")
    return list(token_ids)


def _open(events: Sequence[Event], state: State) -> Command:  # noqa: ARG001
    e: EngineOpened = _the(EngineOpened, events)
    return OpenEngine(
        engine_epoch=e.engine_epoch,
        refold_version=e.refold_version,
        root_seed=e.root_seed,
        config=e.config,
        stream=e.stream,
    )


def _submit(events: Sequence[Event], state: State) -> Command:  # noqa: ARG001
    e: RequestSubmitted = _the(RequestSubmitted, events)
    return SubmitRequest(
        request_id=e.request_id,
        prompt_token_ids=_known(e.prompt_token_ids),
        sampling=e.sampling,
        arrival_ns=e.arrival_ns,
        priority=e.priority,
        cache_salt=e.cache_salt,
        tenant=e.tenant,
        adapter=e.adapter,
        media=e.media,
        resumable=e.resumable,
        grammar=e.grammar,
    )


def _extend(events: Sequence[Event], state: State) -> Command:
    e: SessionExtended = _the(SessionExtended, events)
    return ExtendSession(request_id=_name(state, e.handle), token_ids=_known(e.token_ids), sampling=e.sampling)


def _close_or_expire(events: Sequence[Event], state: State) -> Command:
    closed = [event.handle for event in events if isinstance(event, SessionClosed)]
    if len(closed) == 1:
        return CloseSession(request_id=_name(state, closed[0]))
    return ExpireSessions(idle_before_ns=max(state.requests.by_handle[handle].idle_since_ns for handle in closed))


def _complete(events: Sequence[Event], state: State) -> Command:
    """The answer to the oldest step, as far as it is still told."""
    step = state.window.in_flight[0]
    came_back: dict[int, tuple[int, list[int]]] = {}
    for event in events:
        if isinstance(event, OutputDelivered | StaleOutputConsumed):
            if event.step != step.step:
                raise Forgotten(f"step {event.step} came back, {step.step} is the oldest in flight")
            _collect(event, came_back)
    counts, token_ids, positions = [], [], []
    for entry, request in enumerate(step.requests):
        count, tokens = came_back[request.handle]
        if entry in step.chunk_entries:
            count = 0
        if count > 1 + (step.num_drafts[entry] if step.num_drafts else 0):
            raise Forgotten(f"{count} tokens of one entry came back in step {step.step}")
        counts.append(count)
        token_ids += tokens[:count] + [0] * (count - len(tokens))
        positions.append(len(request.tokens) if count else -1)
    refused = {
        event.handle
        for event in events
        if isinstance(event, RequestFinished) and event.reason == "error" and event.message.startswith("the grammar ")
    }
    return CompleteStep(
        step=step.step,
        generation=state.worker_generation,
        counts=counts,
        token_ids=token_ids,
        positions=positions,
        refused_entries=[entry for entry, request in enumerate(step.requests) if request.handle in refused],
        time_ns=max((event.time_ns for event in events if isinstance(event, SessionTurnEnded)), default=0),
        digests=_digests(events),
        logprobs=[
            each
            for event in events
            if isinstance(event, LogprobsDelivered)
            for each in _logprobs(event, step.handles, counts)
        ],
        prompt_logprobs=[
            EntrySurprisals(
                entry=step.handles.index(event.handle), num_top=event.num_top, surprisals=_known(event.surprisals)
            )
            for event in events
            if isinstance(event, PromptLogprobsDelivered)
        ],
    )


def _logprobs(event: LogprobsDelivered, handles: list[int], counts: list[int]) -> Iterator[EntrySurprisals]:
    """What the worker told of each entry's tokens; of those that a stop cut off, anything."""
    numbers, start = _known(event.surprisals), 0
    for handle, count, num_top in zip(event.handles, event.counts, event.num_top, strict=True):
        entry = handles.index(handle)
        stop = start + count * numbers_per_token(num_top)
        told = numbers[start:stop] + blank(counts[entry] - count, num_top)
        start = stop
        yield EntrySurprisals(entry=entry, num_top=num_top, surprisals=told)


def _digests(events: Sequence[Event]) -> list[int]:
    for event in events:
        if isinstance(event, LogitsRecorded):
            if len(event.digests) != len(event.handles) or any(map(is_placeholder, event.digests)):
                raise Forgotten("digests of its logits were erased")
            return event.digests
    return []


def _collect(event: OutputDelivered | StaleOutputConsumed, came_back: dict[int, tuple[int, list[int]]]) -> None:
    """Handle -> how many tokens the worker said, and those that are told."""
    counts = event.counts or [1] * len(event.handles)
    accepted, offset = event.accepted_drafts, 0
    for entry, (handle, count) in enumerate(zip(event.handles, counts, strict=True)):
        tokens = _known(event.token_ids[offset : offset + count])
        offset += count
        came_back[handle] = (accepted[entry] + 1 if accepted else count, tokens)


def _lose(events: Sequence[Event], state: State) -> Command:  # noqa: ARG001
    e: WorkerLost = _the(WorkerLost, events)
    return LoseWorker(reason=e.reason, by_step=bool(e.suspects))


def _lift(events: Sequence[Event], state: State) -> Command:
    e: QuarantineLifted = _the(QuarantineLifted, events)
    ids = dict(state.suspicion.quarantined.values())
    return LiftQuarantine(request_id=ids.get(e.handle, ""))


def _reset(events: Sequence[Event], state: State) -> Command:  # noqa: ARG001
    e: CacheReset = _the(CacheReset, events)
    return ResetCache(reset_running=e.reset_running)


def _redact(events: Sequence[Event], state: State) -> Command:  # noqa: ARG001
    e: ContentRedacted = _the(ContentRedacted, events)
    return RedactContent(handles=e.handles, positions=e.positions, content_hashes=e.content_hashes, reason=e.reason)


def _abort(events: Sequence[Event], state: State) -> Command:
    e: RequestAborted = _the(RequestAborted, events)
    return AbortRequest(request_id=_name(state, e.handle), cause=e.cause)


def _fail(events: Sequence[Event], state: State) -> Command:
    e: RequestFinished = _the(RequestFinished, events)
    return FailRequest(request_id=_name(state, e.handle), message=e.message)


def _propose(events: Sequence[Event], state: State) -> Command:
    e: DraftsProposed = _the(DraftsProposed, events)
    return ProposeDrafts(request_id=_name(state, e.handle), token_ids=_known(e.token_ids))


def _record_digest(events: Sequence[Event], state: State) -> Command:  # noqa: ARG001
    if not _the(StateDigest, events).digest:
        raise Forgotten("the digest was erased, or belongs to an older fold")
    return RecordDigest()


# The first kind that a record has counts: the kinds that bring others along come before those.
_RECALLERS: tuple[tuple[type[Event], Callable[[Sequence[Event], State], Command]], ...] = (
    (EngineOpened, _open),
    (EngineClosed, lambda events, _: CloseEngine(reason=_the(EngineClosed, events).reason)),
    (
        WorkerStarted,
        lambda events, _: StartWorker(
            kind=_the(WorkerStarted, events).kind, environment=_the(WorkerStarted, events).environment
        ),
    ),
    (WorkerLost, _lose),
    (QuarantineLifted, _lift),
    (RequestSubmitted, _submit),
    (SessionExtended, _extend),
    (SessionClosed, _close_or_expire),
    (StepScheduled, lambda *_: ScheduleStep()),
    (OutputDelivered, _complete),
    (StaleOutputConsumed, _complete),
    (CacheReset, _reset),
    (ContentRedacted, _redact),
    (RequestAborted, _abort),
    (RequestFinished, _fail),
    (
        GrammarReady,
        lambda events, state: ReadyGrammar(request_id=_name(state, _the(GrammarReady, events).handle)),
    ),
    (DraftsProposed, _propose),
    (EnginePaused, lambda events, _: PauseEngine(mode=_the(EnginePaused, events).mode)),
    (EngineResumed, lambda *_: ResumeEngine()),
    (StateDigest, _record_digest),
)
