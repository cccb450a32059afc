"""Causes: what kind of wrong a wrong record is.

`verify` finds the first record that is not as it must be. What is wrong with it has a class, so that a script, a bug tracker
or a tired engineer can sort: was it the disk, somebody's hand, the scheduler, or a configuration that wasn't the one written
down?

    edited deleted inserted reordered truncated torn ...   the bytes aren't those that were written (`refold.journal.verify`)
    lost-event       an event that must have been there isn't: what follows speaks of it
    schedule         who runs, with how many tokens, who gives way
    cache            blocks, hashes, encoder outputs
    stale            tokens in flight, epochs, what was delivered or dropped
    output           tokens, their indices, ends
    digest           the recorded digest isn't that of the fold
    config-drift     another configuration than the recorded one explains the decision
    admission        who was let in, opened or refused
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from refold.engine.history.differences import Difference, event_differences, shown
from refold.journal.events import (
    EngineConfig,
    Event,
    LogitsRecorded,
    LogprobsDelivered,
    OutputDelivered,
    Policy,
    PromptLogprobsDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    SessionTurnEnded,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)
from refold.projections import queues
from refold.projections.outbox import Outbox
from refold.projections.totals import Totals
from refold.scheduler.commands import Command
from refold.scheduler.decide import decide
from refold.scheduler.snapshot import Folded, pack, unpack
from refold.scheduler.state import State


class Cause(NamedTuple):
    """The class of a fault, and what speaks for it, in words; empty if the class says it all."""

    kind: str
    words: str = ""


_OF_LAW = {
    "L1": "stale",
    "L2": "stale",
    "L3": "cache",
    "L4": "cache",
    "L5": "output",
    "L6": "schedule",
    "L7": "stale",
    "L8": "schedule",
    "L9": "output",
    "L10": "cache",
    "L11": "digest",
    "L13": "cache",
}
_OF_EVENT: dict[type[Event], str] = {
    StepScheduled: "schedule",
    RequestPreempted: "stale",
    OutputDelivered: "output",
    StaleOutputConsumed: "stale",
    LogprobsDelivered: "output",
    PromptLogprobsDelivered: "output",
    LogitsRecorded: "output",
    RequestFinished: "output",
    SessionTurnEnded: "output",
    StateDigest: "digest",
}
_OF_FIELD = {
    "block_ids": "cache",
    "hit_block_ids": "cache",
    "evicted_block_ids": "cache",
    "released_block_ids": "cache",
    "encoder_inputs": "cache",
    "encoder_evictions": "cache",
    "allocations": "cache",
    "admissions": "schedule",
    "epoch": "stale",
    "stale_policy": "stale",
    "num_stale_output_tokens": "stale",
    "delivered": "stale",
}


def class_of_law(law: str) -> Cause:
    """The class of a broken law, whatever the event."""
    return Cause(_OF_LAW.get(law, "admission"))


def cause_of_law(law: str, event: Event) -> Cause:
    """The class of a broken law; an event that the fold refuses is classed by its kind."""
    return Cause(_OF_LAW.get(law) or _OF_EVENT.get(type(event), "admission"))


# -- an event that doesn't fit the state before it --------------------------------------------------------------------


def cause_of_refusal(state: State, event: Event) -> Cause:
    """Why the fold refuses an event: something before it is missing, or it is wrong itself. `state` is the one before."""
    missing = _first_missing(state, event)
    if missing is not None:
        return Cause("lost-event", missing)
    if type(event) is StepScheduled and _block_trouble(state, event):
        return Cause("cache", "its blocks are not free to be taken, or not there to be shared")
    return Cause(_OF_EVENT.get(type(event), "admission"))


def _first_missing(state: State, event: Event) -> str | None:
    """What is missing first; None if nothing is, or if the event's columns contradict each other (a forgery)."""
    try:
        return next(_missing(state, event), None)
    except (LookupError, TypeError, ValueError):
        return None


def _missing(state: State, event: Event) -> Iterator[str]:
    """What the event speaks of and the journal never told."""
    told = _TOLD.get(type(event))
    if told is not None:
        yield from told(state, event)
    known = state.requests
    for handle in (*getattr(event, "handles", ()), getattr(event, "handle", 0)):
        if handle >= known.next_handle and type(event) is not RequestSubmitted:
            yield f"request #{handle} was never submitted"


def _before_step(state: State, event: StepScheduled) -> Iterator[str]:
    if event.step > state.window.next_step:
        yield f"step {state.window.next_step} was never scheduled"
    by_handle = state.requests.by_handle
    for admission in event.admissions:
        request = by_handle.get(event.handles[admission.entry])
        if request is not None and admission.epoch > request.epoch:
            yield f"{request.request_id} is in epoch {admission.epoch}: nothing told of {request.epoch + 1}"
        if request is not None and request.num_deliverable_stale_tokens:
            yield f"{request.request_id} came back in: its stale output never came back"
    for handle, first in zip(event.handles, event.first_positions, strict=False):
        request = by_handle.get(handle)
        if request is not None and request.epoch == 0 and first > len(request.tokens) + request.num_output_placeholders:
            yield f"{request.request_id} is at position {first}: what it computed before isn't told"


def _before_output(state: State, event: OutputDelivered | StaleOutputConsumed) -> Iterator[str]:
    oldest = state.window.in_flight[0].step if state.window.in_flight else state.window.next_step
    if event.step >= state.window.next_step:
        yield f"step {event.step} was never scheduled"
    elif event.step > oldest:
        yield f"step {oldest} never came back"
    by_handle = state.requests.by_handle
    for handle, index in zip(event.handles, event.first_output_indices, strict=False):
        request = by_handle.get(handle)
        if request is not None and index > request.next_output_index:
            yield f"output {request.next_output_index} of {request.request_id} was never delivered"


def _before_end(state: State, event: RequestFinished) -> Iterator[str]:
    request = state.requests.by_handle.get(event.handle)
    if request is not None and event.num_output_tokens > request.next_output_index:
        yield f"output {request.next_output_index} of {request.request_id} was never delivered"


def _before_submission(state: State, event: RequestSubmitted) -> Iterator[str]:
    if event.handle > state.requests.next_handle:
        yield f"request #{state.requests.next_handle} was never submitted"


def _before_worker(state: State, event: WorkerStarted | WorkerLost) -> Iterator[str]:
    expected = state.worker_generation + (type(event) is WorkerStarted)
    if event.generation > expected or (type(event) is WorkerStarted and state.worker_alive):
        yield f"the life of worker {state.worker_generation} has no end, or that of {expected} no beginning"
    if isinstance(event, WorkerLost) and len(event.steps) != len(state.window.in_flight):
        yield f"steps {shown(event.steps)} went with worker {event.generation}: some never came back, or were never scheduled"


def _before_preemption(state: State, event: RequestPreempted) -> Iterator[str]:
    request = state.requests.by_handle.get(event.handle)
    if request is not None and event.num_computed_tokens > request.num_computed_tokens:
        yield f"{request.request_id} had computed {event.num_computed_tokens} tokens: a step of it isn't told"


_TOLD: dict[type[Event], Callable[[State, Any], Iterator[str]]] = {
    StepScheduled: _before_step,
    OutputDelivered: _before_output,
    StaleOutputConsumed: _before_output,
    RequestFinished: _before_end,
    RequestSubmitted: _before_submission,
    WorkerStarted: _before_worker,
    WorkerLost: _before_worker,
    RequestPreempted: _before_preemption,
}


def _block_trouble(state: State, event: StepScheduled) -> bool:
    counts, hashes = state.pool.ref_counts, state.pool.hashes
    taken = [block for allocation in event.allocations for block in allocation.block_ids]
    shared = [block for admission in event.admissions for block in admission.hit_block_ids]
    outside = any(not 0 <= block < state.pool.num_blocks for block in (*taken, *shared))
    return (
        outside or len(set(taken)) != len(taken) or any(counts[b] for b in taken) or any(not hashes[b] for b in shared)
    )


# -- a decision that today's code takes otherwise ---------------------------------------------------------------------


def cause_of_decision(recorded: Sequence[Event], decided: Sequence[Event], state: State, command: Command) -> Cause:
    """Why a decision was taken otherwise than today: something isn't told, another configuration, or what differs."""
    for event in recorded:
        if event is recorded[0] or type(event) is StepScheduled:
            missing = _first_missing(state, event)
            if missing is not None:
                return Cause("lost-event", missing)
    try:
        drift = next(drifts(recorded, state, command), None)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        drift = None
    if drift is not None:
        return Cause("config-drift", drift.words("is recorded as", "with"))
    return Cause(class_of(recorded, decided))


def class_of(recorded: Sequence[Event], decided: Sequence[Event]) -> str:
    """The class of the first thing that two decisions don't say alike."""
    if 0 < len(recorded) < len(decided) and _is_part(recorded, decided):
        return "lost-event"
    if 0 < len(decided) < len(recorded) and _is_part(decided, recorded):
        extra = next(event for event in recorded if list(recorded).count(event) > list(decided).count(event))
        return _OF_EVENT.get(type(extra), "admission")
    found = event_differences(recorded, decided)
    if not found:
        return "schedule"
    fields = [part.partition("[")[0] for part in found[0].path.split(".")]
    for field in reversed(fields):
        if field in _OF_FIELD:
            return _OF_FIELD[field]
    kinds = {type(event).__name__: type(event) for event in (*recorded, *decided)}
    told = [fields[0], str(found[0].left), str(found[0].right)]
    for name in ("StaleOutputConsumed", "StepScheduled", "RequestPreempted"):
        if name in told and name in kinds:
            return "stale" if name == "StaleOutputConsumed" else "schedule"
    for name in told:
        if name in kinds:
            return _OF_EVENT.get(kinds[name], "admission")
    return "schedule"


def _is_part(some: Sequence[Event], whole: Sequence[Event]) -> bool:
    """Whether all of some are in the whole, in the same order."""
    rest = iter(whole)
    return all(event in rest for event in some)


def gap_in(state: State, records: Iterable[Sequence[Event]]) -> str:
    """What is never told between this state and the next records, by the numbers that go up one by one; empty if nothing is."""
    step, handle = state.window.next_step, state.requests.next_handle
    back = state.window.in_flight[0].step if state.window.in_flight else step
    for events in records:
        for event in events:
            if isinstance(event, StepScheduled):
                if event.step > step:
                    return f"step {step} was never scheduled"
                step = event.step + 1
            elif isinstance(event, OutputDelivered | StaleOutputConsumed):
                if event.step > back:
                    return f"step {back} never came back"
                back = event.step + 1
            elif isinstance(event, RequestSubmitted):
                if event.handle > handle:
                    return f"request #{handle} was never submitted"
                handle = event.handle + 1
            elif isinstance(event, WorkerLost):
                back = step
    return ""


def drifts(recorded: Sequence[Event], state: State, command: Command) -> Iterator[Difference]:
    """Single changes of the configuration under which today's code decides as was recorded."""
    if state.opened_config is None:
        return
    config = state.config
    for name, value in _candidates(recorded, state):
        other = msgspec.structs.replace(config, **{name: value})
        if other != config and _decides(_under(state, other), command, recorded):
            yield Difference(name, getattr(config, name), shown(value))


def _under(state: State, config: EngineConfig) -> State:
    """A copy of the state, under another configuration."""
    copy = unpack(b"".join(pack(Folded(state, Outbox(0), Totals())))).state
    before, copy.config = copy.config, config
    if config.policy != before.policy or config.tenant_weights != before.tenant_weights:
        queues.reorder(copy.queues, config)
    return copy


def _decides(state: State, command: Command, recorded: Sequence[Event]) -> bool:
    try:
        return list(recorded) == decide(state, command)
    except Exception:  # noqa: BLE001 - a configuration that can't be is not the one that was
        return False


def _candidates(recorded: Sequence[Event], state: State) -> Iterator[tuple[str, object]]:
    """Values that a field may have had, by what was recorded: never more than a few hundred."""
    config = state.config
    steps = [event for event in recorded if isinstance(event, StepScheduled)]
    tokens, sizes = sum(sum(step.num_tokens) for step in steps), [n for step in steps for n in step.num_tokens]
    running = len(state.queues.running) + sum(len(step.admissions) for step in steps)
    for policy in get_args(Policy):
        yield "policy", policy
    for name in ("enable_prefix_caching", "admit_full_sequence"):
        yield name, not getattr(config, name)
    yield from (("max_num_batched_tokens", n) for n in _around(tokens, config.max_num_batched_tokens))
    yield from (("max_num_seqs", n) for n in _around(running, config.max_num_seqs))
    yield from (("max_in_flight_steps", n) for n in range(1, 9))
    yield from (("long_prefill_token_threshold", n) for n in sorted({0, *sizes}))
    yield from (("watermark_blocks", n) for n in range(9))
    yield from (("decode_stagger", n) for n in range(1, 9))
    yield from (("num_speculative_tokens", n) for n in range(9))
    for speculation in ("off", "ngram", "worker"):
        yield "speculation", speculation
    yield "speculation_by_batch", ()
    yield "tenant_weights", {}
    for name in ("encoder_budget_tokens", "encoder_cache_tokens"):
        yield from ((name, n) for n in _around(getattr(config, name), 2 * getattr(config, name)))
    yield from (("max_model_len", n) for n in _lengths(recorded, state))
    yield from (("eos_token_ids", ids) for ids in _stops(recorded, config))


def _around(*values: int) -> list[int]:
    return sorted({n for value in values for n in (value - 1, value, value + 1, 2 * value, value // 2) if n > 0})


def _lengths(recorded: Sequence[Event], state: State) -> Iterable[int]:
    for event in recorded:
        if isinstance(event, RequestFinished | SessionTurnEnded) and event.reason == "length":
            request = state.requests.by_handle.get(event.handle)
            if request is not None:
                yield request.num_prompt_tokens + event.num_output_tokens - request.num_earlier_outputs


def _stops(recorded: Sequence[Event], config: EngineConfig) -> Iterator[tuple[int, ...]]:
    yield ()
    for event in recorded:
        if isinstance(event, RequestFinished | SessionTurnEnded) and event.stop_token_id is not None:
            yield (*config.eos_token_ids, event.stop_token_id)
