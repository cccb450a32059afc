"""Words: one plain sentence per event.

What came from outside (ids, reasons, messages) may hold anything, and goes through `safe`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from refold.engine.history.plain import count, listed, safe
from refold.engine.history.relations import Names
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
    Sampling,
    SessionClosed,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
    WorkerStarted,
)


def sentence(event: Event, names: Names) -> str:
    """The event in words. One whose columns contradict each other (a forgery) gets its name only."""
    try:
        return _SENTENCES[type(event)](event, names)
    except (IndexError, ValueError):
        return f"{type(event).__name__} with columns that contradict each other"


def sampling_in_words(sampling: Sampling) -> str:
    """How the tokens are chosen, in a few words."""
    words = ["greedy"] if sampling.temperature == 0 else [f"temperature {sampling.temperature:g}"]
    if sampling.temperature and sampling.top_k:
        words.append(f"top-k {sampling.top_k}")
    if sampling.temperature and sampling.top_p < 1:
        words.append(f"top-p {sampling.top_p:g}")
    if sampling.temperature and sampling.min_p:
        words.append(f"min-p {sampling.min_p:g}")
    if sampling.temperature:
        words.append(f"seed {sampling.seed}")
    penalties = (
        ("repetition", sampling.repetition_penalty, 1),
        ("presence", sampling.presence_penalty, 0),
        ("frequency", sampling.frequency_penalty, 0),
    )
    words += [f"{kind} penalty {value:g}" for kind, value, none in penalties if value != none]
    if sampling.logit_bias:
        words.append(f"a bias for {count(len(sampling.logit_bias), 'token')}")
    if sampling.min_tokens:
        words.append(f"at least {count(sampling.min_tokens, 'token')}")
    if sampling.ignore_eos:
        words.append("end of sequence ignored")
    return ", ".join(words)


def preemption_in_words(event: RequestPreempted, names: Names) -> str:
    """Why a request was preempted, and what it cost; without its name."""
    if event.reason == "cache_reset":
        why = "for a cache reset"
    elif event.reason == "session_reclaimed" and event.for_handle is None:
        why = "while idle, for a cache reset"
    elif event.reason == "isolated":
        why = "while others are tried for killing the worker"
    else:
        whom = "itself" if event.for_handle in (None, event.handle) else safe(names[event.for_handle])
        why = f"for {whom}: needed {count(event.needed_blocks, 'block')}, {event.free_blocks} free"
    words = f"{why}; released {count(len(event.released_block_ids), 'block')} with "
    words += count(event.num_computed_tokens, "computed token")
    if event.num_stale_output_tokens:
        words += f"; {count(event.num_stale_output_tokens, 'scheduled token')} in flight turned stale, "
        words += f"policy {event.stale_policy}"
    return words


def _named(handles: Iterable[int], names: Names) -> str:
    return listed([safe(names[handle]) for handle in handles])


def _engine_opened(event: EngineOpened, names: Names) -> str:  # noqa: ARG001
    config = event.config
    return (
        f"engine {event.engine_epoch} opened by refold {safe(event.refold_version)}: model {safe(config.model)}, "
        f"{count(config.num_blocks, 'block')} of {count(config.block_size, 'token')}, "
        f"up to {count(config.max_num_seqs, 'request')} and {count(config.max_num_batched_tokens, 'token')} a step, "
        f"window {config.max_in_flight_steps}, {config.policy}"
    )


def _engine_closed(event: EngineClosed, names: Names) -> str:  # noqa: ARG001
    return f"engine {event.engine_epoch} closed: {safe(event.reason)}"


def _worker_started(event: WorkerStarted, names: Names) -> str:  # noqa: ARG001
    environment = [f"{safe(key)} {safe(value)}" for key, value in event.environment.items()]
    return (
        f"worker {event.generation} started ({safe(event.kind)}): {listed(environment, 6) or 'nothing said of itself'}"
    )


CLOSED = "its engine was closed"
"""The reason of a worker's end that was nobody's loss."""


def _worker_lost(event: WorkerLost, names: Names) -> str:
    if event.reason == CLOSED and not event.steps:
        words = f"worker {event.generation} had ended with its engine, which was closed"
        return words + (f"; {_named(event.handles, names)} will be computed again" if event.handles else "")
    steps = f"steps {listed([str(s) for s in event.steps])} went with it" if event.steps else "no step was in flight"
    words = f"worker {event.generation} lost: {safe(event.reason)}; {steps}"
    if event.handles:
        words += f"; {_named(event.handles, names)} will compute again"
    return words


def _request_submitted(event: RequestSubmitted, names: Names) -> str:  # noqa: ARG001
    words = (
        f"{safe(event.request_id)} submitted: {count(len(event.prompt_token_ids), 'prompt token')}, "
        f"up to {count(event.sampling.max_tokens, 'more', 'more')}, {sampling_in_words(event.sampling)}"
    )
    return words + (f", priority {event.priority}" if event.priority else "")


def _step_scheduled(event: StepScheduled, names: Names) -> str:
    words = f"step {event.step} scheduled: {count(sum(event.num_tokens), 'token')} of "
    words += count(len(event.handles), "request")
    if event.chunk_entries:
        words += f", {count(len(event.chunk_entries), 'chunk')} of a longer prompt"
    if event.admissions:
        admitted = []
        for admission in event.admissions:
            hit = f" (shares {count(len(admission.hit_block_ids), 'block')})" if admission.hit_block_ids else ""
            admitted.append(safe(names[event.handles[admission.entry]]) + hit)
        words += f"; admitted {listed(admitted)}"
    if event.num_drafts:
        words += f"; {count(sum(event.num_drafts), 'draft')} to verify"
    if event.encoder_inputs:
        words += f"; {count(len(event.encoder_inputs), 'media input')}"
    new_blocks = sum(len(a.block_ids) for a in event.allocations)
    if new_blocks:
        words += f"; {count(new_blocks, 'new block')}"
    if event.evicted_block_ids:
        words += f", {len(event.evicted_block_ids)} of them evicted from the cache"
    return words


def _request_preempted(event: RequestPreempted, names: Names) -> str:
    return f"{safe(names[event.handle])} preempted {preemption_in_words(event, names)}"


def _output_delivered(event: OutputDelivered, names: Names) -> str:  # noqa: ARG001
    return f"step {event.step} came back: {count(len(event.token_ids), 'token')} for {count(len(event.handles), 'request')}"


def _stale_output_consumed(event: StaleOutputConsumed, names: Names) -> str:
    words, offset = [], 0
    for i, handle in enumerate(event.handles):
        fate = "delivered" if event.delivered[i] else "dropped"
        tokens = event.token_ids[offset : offset + event.counts[i]]
        offset += event.counts[i]
        scheduled = count(event.num_tokens[i], "scheduled token")
        output = f"{count(len(tokens), 'output')} {fate}" if tokens else "nothing sampled"
        words.append(f"{safe(names[handle])} ({scheduled}, {output})")
    return f"step {event.step} came back stale for {listed(words)}"


def _logprobs_delivered(event: LogprobsDelivered, names: Names) -> str:
    words = f"step {event.step} came back with {count(sum(event.counts), 'log-probability', 'log-probabilities')} for "
    return words + _named(event.handles, names)


def _prompt_logprobs_delivered(event: PromptLogprobsDelivered, names: Names) -> str:
    words = count(event.count, "log-probability", "log-probabilities")
    return f"{safe(names[event.handle])} has {words} of its prompt"


def _logits_recorded(event: LogitsRecorded, names: Names) -> str:  # noqa: ARG001
    return f"step {event.step} came back with {count(len(event.handles), 'digest')} of logits"


def _request_quarantined(event: RequestQuarantined, names: Names) -> str:
    killed = f"{safe(names[event.handle])} was there when {count(event.num_lost_workers, 'worker')} died, the last time alone"
    return f"{killed}: its content is quarantined"


def _quarantine_lifted(event: QuarantineLifted, names: Names) -> str:
    return f"the content of {safe(names[event.handle])} is quarantined no longer"


def _request_finished(event: RequestFinished, names: Names) -> str:
    words = f"{safe(names[event.handle])} finished: {event.reason} after {count(event.num_output_tokens, 'token')}"
    if event.stop_token_id is not None:
        words += f" (stop token {event.stop_token_id})"
    return words + (f": {safe(event.message)}" if event.message else "")


def _request_aborted(event: RequestAborted, names: Names) -> str:
    return f"{safe(names[event.handle])} aborted by {safe(event.cause)}"


def _grammar_ready(event: GrammarReady, names: Names) -> str:
    return f"{safe(names[event.handle])} has its grammar"


def _session_extended(event: SessionExtended, names: Names) -> str:
    words = f"{safe(names[event.handle])} extended by {count(len(event.token_ids), 'token')}, "
    return words + f"up to {count(event.sampling.max_tokens, 'more', 'more')}, {sampling_in_words(event.sampling)}"


def _session_closed(event: SessionClosed, names: Names) -> str:
    return f"{safe(names[event.handle])} closed: no more input"


def _session_turn_ended(event: SessionTurnEnded, names: Names) -> str:
    words = f"{safe(names[event.handle])} ended a turn: {event.reason} after {count(event.num_output_tokens, 'token')}"
    return words + ("" if event.stop_token_id is None else f" (stop token {event.stop_token_id})")


def _drafts_proposed(event: DraftsProposed, names: Names) -> str:
    return f"{safe(names[event.handle])} has {count(len(event.token_ids), 'draft')} to verify"


def _engine_paused(event: EnginePaused, names: Names) -> str:  # noqa: ARG001
    held = {"new": "nobody new comes in", "all": "no step is scheduled", "drain": "nobody new comes in or is accepted"}
    return f"engine paused: {held[event.mode]}"


def _engine_resumed(event: EngineResumed, names: Names) -> str:  # noqa: ARG001
    return "engine resumed"


def _cache_reset(event: CacheReset, names: Names) -> str:  # noqa: ARG001
    return "prefix cache reset" + (", what ran was preempted first" if event.reset_running else "")


def _content_redacted(event: ContentRedacted, names: Names) -> str:
    who = listed([safe(names[handle]) for handle in event.handles])
    why = f": {safe(event.reason)}" if event.reason else ""
    return f"what {who} said and was told is erased from {count(len(event.positions), 'record')}{why}"


def _state_digest(event: StateDigest, names: Names) -> str:  # noqa: ARG001
    return f"state digest {safe(event.digest[:16]) or 'erased: it told of erased tokens'}"


_SENTENCES: dict[type[Event], Callable[[Any, Names], str]] = {
    EngineOpened: _engine_opened,
    EngineClosed: _engine_closed,
    WorkerStarted: _worker_started,
    WorkerLost: _worker_lost,
    RequestSubmitted: _request_submitted,
    StepScheduled: _step_scheduled,
    RequestPreempted: _request_preempted,
    OutputDelivered: _output_delivered,
    StaleOutputConsumed: _stale_output_consumed,
    LogprobsDelivered: _logprobs_delivered,
    PromptLogprobsDelivered: _prompt_logprobs_delivered,
    LogitsRecorded: _logits_recorded,
    RequestQuarantined: _request_quarantined,
    QuarantineLifted: _quarantine_lifted,
    RequestFinished: _request_finished,
    RequestAborted: _request_aborted,
    CacheReset: _cache_reset,
    GrammarReady: _grammar_ready,
    SessionExtended: _session_extended,
    SessionClosed: _session_closed,
    SessionTurnEnded: _session_turn_ended,
    DraftsProposed: _drafts_proposed,
    EnginePaused: _engine_paused,
    EngineResumed: _engine_resumed,
    ContentRedacted: _content_redacted,
    StateDigest: _state_digest,
}
