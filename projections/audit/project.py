"""Events into rows: a pure function of the story so far and the next record.

The projection keeps its own account, beside the fold and simpler than it, from the events alone. Where an event contradicts
it, that is a row of `audit_violations`, and the projection goes on: an auditor of a damaged history wants to see all of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

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
    RequestQuarantined,
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
from refold.journal.record import Record
from refold.projections.audit.now import (
    Now,
    changed,
    clean,
    drained,
    end_epoch,
    int64,
    placeholders,
    release,
    settle_stale,
    unresolved,
)
from refold.projections.audit.rows import Rows
from refold.projections.audit.schema import LOST
from refold.projections.audit.steps import forget_if_over, output_delivered, stale_output_consumed, step_scheduled
from refold.projections.audit.story import Life, Preemption, Request, Step, Story, Worker
from refold.projections.audit.telling import of_engine, of_request, of_step


def project(story: Story, rows: Rows, record: Record, events: Sequence[Event]) -> None:
    """Put what a record changes into `rows`, and remember in `story` what the next ones need."""
    now = Now(story, rows)
    now.enter(record.position, record.time_ns, record.engine_epoch)
    for index, event in enumerate(events):
        now.index = index
        try:
            _PROJECTORS[type(event)](now, event)
        except (LookupError, ValueError, TypeError, AssertionError, OverflowError) as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            now.violated("contradiction", f"{type(event).__name__} does not fit what came before it ({words})")
    story.num_events += len(events)
    if story.life is not None:
        story.life.last_ns = record.time_ns
        rows.lives[story.life.engine_epoch] = story.life


# -- lives and workers ------------------------------------------------------------------------------------------------


def _engine_opened(now: Now, event: EngineOpened) -> None:
    story, config = now.story, event.config
    story.life = Life(
        engine_epoch=event.engine_epoch,
        opened_position=now.position,
        opened_ns=now.time_ns,
        refold_version=clean(event.refold_version),
        model=clean(config.model),
        policy=config.policy,
        max_num_seqs=int64(config.max_num_seqs),
        max_num_batched_tokens=int64(config.max_num_batched_tokens),
        max_in_flight_steps=int64(config.max_in_flight_steps),
        num_blocks=int64(config.num_blocks),
        block_size=config.block_size,
        num_recovered_requests=sum(r.status != "finished" for r in story.requests.values()),
        last_ns=now.time_ns,
        has_prefix_caching=config.enable_prefix_caching,
    )
    _forget_blocks(story)
    now.tell(
        "EngineOpened", 0, f"engine epoch {event.engine_epoch}, refold {event.refold_version}, model {config.model}"
    )


def _engine_closed(now: Now, event: EngineClosed) -> None:
    life = now.story.life
    if life is not None:
        life.closed_position, life.closed_ns, life.close_reason = now.position, now.time_ns, clean(event.reason)
    now.tell("EngineClosed", 0, event.reason)


def _worker_started(now: Now, event: WorkerStarted) -> None:
    now.story.worker = now.rows.workers[event.generation] = Worker(
        generation=event.generation,
        kind=clean(event.kind),
        environment=clean(msgspec.json.encode(event.environment, order="deterministic").decode()),
        engine_epoch=now.engine_epoch,
        started_position=now.position,
        started_ns=now.time_ns,
    )
    now.tell("WorkerStarted", 0, f"generation {event.generation}, {event.kind}")


def _worker_lost(now: Now, event: WorkerLost) -> None:
    story = now.story
    lost = list(story.steps.values())
    now.expect(sorted(step.step for step in lost), sorted(event.steps), "steps in flight")
    num_tokens = sum(_lose_step(now, step) for step in lost)
    story.steps.clear()
    for request in list(story.requests.values()):
        if request.num_in_flight_tokens:
            request.num_in_flight_tokens = 0
            now.touch(request)
        forget_if_over(now, request)
    _forget_blocks(story)
    for handle in event.handles:
        _start_over(now, story.requests[handle])
    now.tell("WorkerLost", 0, f"generation {event.generation}: {event.reason}", num=num_tokens)
    now.rows.minutes[now.minute].add(num_worker_losses=1)
    _settle_worker(now, event, len(lost), num_tokens)


def _lose_step(now: Now, step: Step) -> int:
    """A step will never come back; returns how many tokens of it were still to come."""
    rows, num_tokens = now.rows, 0
    step.outcome, step.resolved_position, step.resolved_ns = LOST, now.position, now.time_ns
    for entry in range(step.num_entries):
        stale = step.stale.get(entry)
        if stale is None and step.is_delivered:
            continue
        row = rows.entry(step, entry, (LOST, now.index, 0, None, 0))
        (rows.entry_updates if step.is_written else rows.entries).append(row)
        num_tokens += step.tokens[entry]
        if stale is not None:
            settle_stale(now, stale, LOST, 0)
    rows.steps.append(step)
    return num_tokens


def _start_over(now: Now, request: Request) -> None:
    story = now.story
    request.epoch += 1
    request.num_worker_losses += 1
    request.num_computed = request.num_published = 0
    if request.status == "running":
        request.status = "preempted"
        story.num_running -= 1
        story.num_waiting += 1
    now.touch(request)
    now.tell("WorkerLost", request.handle, "its work in flight and its blocks are gone; it computes again")


def _settle_worker(now: Now, event: WorkerLost, num_steps: int, num_tokens: int) -> None:
    story, worker = now.story, now.story.worker
    if worker is None or worker.generation != event.generation:
        now.violated("contradiction", f"worker generation {event.generation} was lost, and never started")
    else:
        worker.lost_position, worker.lost_event, worker.lost_ns = now.position, now.index, now.time_ns
        worker.lost_reason, worker.num_lost_steps = clean(event.reason), num_steps
        worker.num_lost_tokens, worker.num_lost_requests = num_tokens, len(event.handles)
        now.rows.workers[worker.generation] = worker
    story.worker = None
    if story.life is not None and story.life.engine_epoch != now.engine_epoch:  # its engine died before it
        story.life.num_lost_steps, story.life.num_lost_tokens = num_steps, num_tokens
        now.rows.lives[story.life.engine_epoch] = story.life


def _forget_blocks(story: Story) -> None:
    story.owners.clear()
    story.writers.clear()
    for request in story.requests.values():
        request.block_ids = []


# -- requests ---------------------------------------------------------------------------------------------------------


def _request_submitted(now: Now, event: RequestSubmitted) -> None:
    story, length = now.story, len(event.prompt_token_ids)
    is_erased = any(map(is_placeholder, event.prompt_token_ids[:1]))
    request = Request(
        handle=event.handle,
        request_id=clean(event.request_id),
        position=now.position,
        submitted_ns=now.time_ns,
        arrival_ns=int64(event.arrival_ns),
        priority=int64(event.priority),
        tenant=clean(event.tenant),
        adapter=clean(event.adapter),
        cache_salt=clean(event.cache_salt),
        grammar=clean(event.grammar),
        is_session=int(event.resumable),
        num_media=len(event.media),
        num_prompt_tokens=length,
        max_tokens=int64(event.sampling.max_tokens),
        num_known=length,
        prompt_end=length,
        is_redacted=int(is_erased),
    )
    story.requests[event.handle] = now.touch(request)
    story.tenants[request.tenant] = 1
    story.num_waiting += 1
    story.num_request_events += 1
    now.rows.minutes[now.minute].add(num_submitted=1, num_prompt_tokens=length)
    now.rows.tenants[request.tenant, now.minute][0] += 1
    now.tell(
        "RequestSubmitted",
        event.handle,
        f"{length} prompt tokens, at most {event.sampling.max_tokens} more",
        num=length,
    )


def _request_preempted(now: Now, event: RequestPreempted) -> None:
    story, request = now.story, now.touch(now.story.requests[event.handle])
    now.expect(request.num_in_flight_tokens, event.num_stale_output_tokens, "tokens in flight", event.handle)
    now.expect(request.num_computed, event.num_computed_tokens, "computed tokens", event.handle)
    released = release(story, request)
    now.expect(released, event.released_block_ids, "released blocks", event.handle)
    serial = story.next_preemption
    story.next_preemption += 1
    preemption = story.preemptions[serial] = Preemption(
        position=now.position,
        event_index=now.index,
        handle=event.handle,
        time_ns=now.time_ns,
        engine_epoch=now.engine_epoch,
        reason=event.reason,
        for_handle=event.for_handle,
        needed_blocks=event.needed_blocks,
        free_blocks=event.free_blocks,
        num_released_blocks=len(event.released_block_ids),
        num_computed_tokens=event.num_computed_tokens,
        num_stale_tokens=event.num_stale_output_tokens,
        stale_policy=event.stale_policy,
        epoch=request.epoch,
        num_pending=0,
    )
    preemption.num_pending = end_epoch(now, request, event.reason, event.stale_policy, serial)
    if not preemption.num_pending:
        drained(now, serial, preemption)
    changed(now, serial, preemption)
    request.num_computed = request.num_published = 0
    request.preemption = serial
    if request.status == "running":
        request.status = "preempted"
        request.num_preemptions += 1
        story.num_running -= 1
        story.num_waiting += 1
    story.num_request_events += 1
    now.rows.minutes[now.minute].add(num_preemptions=1)
    now.rows.tenants[request.tenant, now.minute][4] += 1
    now.tell("RequestPreempted", event.handle, _why_preempted(event), num=event.num_stale_output_tokens)


def _why_preempted(event: RequestPreempted) -> str:
    whom = f" for handle {event.for_handle}" if event.for_handle is not None else ""
    need = f": needed {event.needed_blocks} blocks, {event.free_blocks} free" if event.needed_blocks else ""
    return f"{event.reason}{whom}{need}; stale output: {event.stale_policy}"


def _request_aborted(now: Now, event: RequestAborted) -> None:
    now.touch(now.story.requests[event.handle]).abort_cause = clean(event.cause)
    now.story.num_request_events += 1
    now.tell("RequestAborted", event.handle, event.cause)


def _request_finished(now: Now, event: RequestFinished) -> None:
    story, request = now.story, now.touch(now.story.requests[event.handle])
    now.expect(request.num_output_tokens, event.num_output_tokens, "output tokens", event.handle)
    if request.status == "finished":
        now.violated("contradiction", "a request finished twice", event.handle)
        return
    story.num_running -= request.status == "running"
    story.num_waiting -= request.status in {"waiting", "preempted"}
    request.num_aborted_in_flight_tokens = sum(
        step.tokens[entry] for step, entry in unresolved(story, request) if entry not in step.stale
    )
    end_epoch(now, request, "finished", "drop")
    release(story, request)
    request.num_computed = 0
    request.status, request.finish_reason = "finished", event.reason
    request.finished_position, request.finished_ns = now.position, now.time_ns
    request.finish_message = clean(event.message)
    request.num_finished_output_tokens = int64(event.num_output_tokens)
    story.num_request_events += 1
    now.lasted("total", request.submitted_ns)
    counts = now.rows.minutes[now.minute]
    counts.add(num_finished=1, num_aborted=int(event.reason not in {"stop", "length"}))
    now.rows.tenants[request.tenant, now.minute][1] += 1
    now.tell("RequestFinished", event.handle, f"{event.reason} after {event.num_output_tokens} tokens")
    forget_if_over(now, request)


# -- sessions ---------------------------------------------------------------------------------------------------------


def _session_extended(now: Now, event: SessionExtended) -> None:
    request = now.touch(now.story.requests[event.handle])
    length = len(event.token_ids)
    request.num_prompt_tokens += length
    request.queued_chunks.append(length)
    if request.status == "idle":
        _begin_turn(now, request)
    now.story.num_request_events += 1
    now.tell("SessionExtended", event.handle, f"{length} tokens more", num=length)


def _session_turn_ended(now: Now, event: SessionTurnEnded) -> None:
    story, request = now.story, now.touch(now.story.requests[event.handle])
    story.num_running -= request.status == "running"
    story.num_waiting -= request.status in {"waiting", "preempted"}
    current = [(step, entry) for step, entry in unresolved(story, request) if entry not in step.stale]
    request.num_computed -= sum(placeholders(step, entry) for step, entry in current)
    end_epoch(now, request, "turn_ended", "drop")
    request.num_turns += 1
    request.status = "idle"
    if request.queued_chunks:
        _begin_turn(now, request)
    story.num_request_events += 1
    now.tell("SessionTurnEnded", event.handle, f"{event.reason} after {event.num_output_tokens} tokens")


def _begin_turn(now: Now, request: Request) -> None:
    """The chunk takes the place of the last token; if nothing is left to compute, the last place is computed again."""
    request.num_known += request.queued_chunks.pop(0) - 1
    request.prompt_end = request.num_known
    if request.num_computed == request.num_known:
        request.num_computed -= 1
        last = request.num_computed // now.story.block_size
        if last < request.num_published:
            request.num_computed = last * now.story.block_size
            release(now.story, request, last)
            request.num_published = last
    request.status = "waiting"
    now.story.num_waiting += 1


def _content_redacted(now: Now, event: ContentRedacted) -> None:
    now.tell("ContentRedacted", 0, event.reason)
    for handle in event.handles:
        now.tell("ContentRedacted", handle, event.reason)
    now.rows.redacted += event.handles


_PROJECTORS: dict[type[Event], Callable[[Now, Any], None]] = {
    EngineOpened: _engine_opened,
    EngineClosed: _engine_closed,
    WorkerStarted: _worker_started,
    WorkerLost: _worker_lost,
    RequestSubmitted: _request_submitted,
    GrammarReady: of_request(lambda e: "its grammar is compiled"),  # noqa: ARG005
    SessionExtended: _session_extended,
    SessionClosed: of_request(lambda e: "no more input"),  # noqa: ARG005
    SessionTurnEnded: _session_turn_ended,
    StepScheduled: step_scheduled,
    DraftsProposed: of_request(lambda e: f"{len(e.token_ids)} drafts from outside"),
    RequestPreempted: _request_preempted,
    OutputDelivered: output_delivered,
    StaleOutputConsumed: stale_output_consumed,
    LogprobsDelivered: of_step,
    PromptLogprobsDelivered: of_request(lambda e: f"of {e.count} tokens"),
    LogitsRecorded: of_step,
    RequestQuarantined: of_request(lambda e: f"it killed {e.num_lost_workers} workers: its content is quarantined"),
    QuarantineLifted: of_request(lambda e: "its content is quarantined no longer"),  # noqa: ARG005
    RequestFinished: _request_finished,
    RequestAborted: _request_aborted,
    CacheReset: of_engine(lambda e: "running requests were preempted first" if e.reset_running else ""),
    EnginePaused: of_engine(lambda e: e.mode),
    EngineResumed: of_engine(lambda e: ""),  # noqa: ARG005
    ContentRedacted: _content_redacted,
    StateDigest: of_engine(lambda e: ""),  # noqa: ARG005 - a digest tells of tokens
}
