"""The life of one request: what happened to it, when, and why, told from its events alone.

Times are the journal's record times, so they hold for a request that outlived three engines. Runs of ordinary decode steps
are told as one moment; whatever interrupts them (a preemption, a lost worker, a chunk) is a moment of its own.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from refold.engine.history.relations import Names, handles_of
from refold.engine.history.words import preemption_in_words
from refold.journal.events import (
    ContentRedacted,
    DraftsProposed,
    EngineClosed,
    EngineOpened,
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
    StepScheduled,
    WorkerLost,
)
from refold.journal.record import Record
from refold.journal.surprisals import TokenLogprobs, numbers_per_token, token_logprobs


class Moment(msgspec.Struct, omit_defaults=True):
    """Something that happened. `position` is the record that says so; `facts` are named numbers and words."""

    position: int
    time_ns: int
    engine_epoch: int
    kind: str
    facts: dict[str, Any] = {}


class Life(msgspec.Struct):
    """A request from submission to its end, or to the end of the journal. Durations are None until they are known.

    `logprobs` are by output index, where the request asked for them.
    """

    request_id: str
    handle: int
    model: str
    num_prompt_tokens: int
    sampling: Sampling
    priority: int
    status: str = "waiting"
    finish_reason: str | None = None
    is_redacted: bool = False
    num_preemptions: int = 0
    num_workers_lost: int = 0
    num_stale_tokens_delivered: int = 0
    num_stale_tokens_dropped: int = 0
    queued_ns: int | None = None
    time_to_first_token_ns: int | None = None
    mean_inter_token_ns: int | None = None
    total_ns: int | None = None
    output_token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    moments: list[Moment] = []


class LifeStory:
    """Follows a journal and keeps the life of the last request with a given client id.

    `is_open` says whether the engine had closed at the last record.

    `observe` every record in order; then `life` is the story, or None if there was no such request. `num_namesakes` counts
    earlier requests with the same id.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.names = Names()
        self.life: Life | None = None
        self.num_namesakes = 0
        self._handle = 0
        self._block_size = 1
        self._model = ""
        self._in_flight: dict[int, int] = {}
        self._submitted_ns = self._first_token_ns = self._last_token_ns = 0
        self._record: Record | None = None
        self._closed_epoch = 0
        self.is_open = False

    def observe(self, record: Record, events: Iterable[Event]) -> None:
        """Follow one record."""
        self._record = record
        for event in events:
            if isinstance(event, EngineOpened):
                self._block_size, self._model, self.is_open = event.config.block_size, event.config.model, True
            elif isinstance(event, EngineClosed):
                self._closed_epoch, self.is_open = event.engine_epoch, False
            elif isinstance(event, RequestSubmitted):
                self.names.observe(event)
                if event.request_id == self.request_id:
                    self._submitted(event)
            elif self.life is not None and self._handle in handles_of(event):
                _TELLERS[type(event)](self, self.life, event)

    @property
    def position(self) -> int:
        """Of the last record that was observed; -1 before the first."""
        return -1 if self._record is None else self._record.position

    # -- one teller per event -----------------------------------------------------------------------------------------

    def _submitted(self, event: RequestSubmitted) -> None:
        assert self._record is not None
        self.num_namesakes += self.life is not None
        self._handle, self._in_flight = event.handle, {}
        self._submitted_ns, self._first_token_ns = self._record.time_ns, 0
        self.life = Life(
            request_id=event.request_id,
            handle=event.handle,
            model=self._model,
            num_prompt_tokens=len(event.prompt_token_ids),
            prompt_token_ids=event.prompt_token_ids,
            sampling=event.sampling,
            priority=event.priority,
        )
        self._tell("submitted", num_prompt_tokens=len(event.prompt_token_ids))

    def _scheduled(self, life: Life, event: StepScheduled) -> None:
        entry = event.handles.index(self._handle)
        n, first = event.num_tokens[entry], event.first_positions[entry]
        self._in_flight[event.step] = n
        num_drafts = event.num_drafts[entry] if event.num_drafts else 0
        for admission in event.admissions:
            if admission.entry == entry:
                self._admitted(life, event.step, len(admission.hit_block_ids) * self._block_size)
        if entry in event.chunk_entries:
            self._tell("chunk", step=event.step, num_tokens=n, first_position=first)
        elif n - num_drafts > 1:
            self._tell("prompt_end", step=event.step, num_tokens=n, first_position=first)

    def _admitted(self, life: Life, step: int, num_hit_tokens: int) -> None:
        assert self._record is not None
        again = life.status == "preempted"
        if life.queued_ns is None:
            life.queued_ns = self._record.time_ns - self._submitted_ns
        life.status = "running"
        self._tell("resumed" if again else "admitted", step=step, num_hit_tokens=num_hit_tokens)

    def _preempted(self, life: Life, event: RequestPreempted) -> None:
        if event.handle != self._handle:
            self._tell("took_blocks_of", victim=self.names[event.handle], needed_blocks=event.needed_blocks)
            return
        if life.status == "running":
            life.status = "preempted"
        life.num_preemptions += 1
        for_id = None if event.for_handle is None else self.names[event.for_handle]
        self._tell(
            "preempted",
            reason=event.reason,
            for_request_id=for_id,
            needed_blocks=event.needed_blocks,
            free_blocks=event.free_blocks,
            num_released_blocks=len(event.released_block_ids),
            num_computed_tokens=event.num_computed_tokens,
            num_stale_output_tokens=event.num_stale_output_tokens,
            stale_policy=event.stale_policy,
            words=preemption_in_words(event, self.names),
        )

    def _output(self, life: Life, event: OutputDelivered) -> None:
        self._in_flight.pop(event.step, None)
        entry = event.handles.index(self._handle)
        counts = event.counts or [1] * len(event.handles)
        start = sum(counts[:entry])
        self._append(life, event.step, event.token_ids[start : start + counts[entry]])

    def _stale(self, life: Life, event: StaleOutputConsumed) -> None:
        self._in_flight.pop(event.step, None)
        entry = event.handles.index(self._handle)
        start = sum(event.counts[:entry])
        tokens = event.token_ids[start : start + event.counts[entry]]
        facts = {"step": event.step, "num_scheduled_tokens": event.num_tokens[entry], "num_tokens": len(tokens)}
        if event.delivered[entry]:
            life.num_stale_tokens_delivered += len(tokens)
            self._tell("stale_delivered", **facts, first_index=len(life.output_token_ids))
            self._count_tokens(life, tokens)
        else:
            life.num_stale_tokens_dropped += len(tokens)
            self._tell("stale_dropped", **facts)

    def _logprobs(self, life: Life, event: LogprobsDelivered) -> None:
        entry = event.handles.index(self._handle)
        sizes = [count * numbers_per_token(top) for count, top in zip(event.counts, event.num_top, strict=True)]
        start, first = sum(sizes[:entry]), event.first_output_indices[entry]
        numbers = event.surprisals[start : start + sizes[entry]]
        told = token_logprobs(life.output_token_ids[first:], numbers, event.num_top[entry])
        life.logprobs |= dict(zip(range(first, first + event.counts[entry]), told, strict=False))

    def _prompt_logprobs(self, life: Life, event: PromptLogprobsDelivered) -> None:
        told = token_logprobs(life.prompt_token_ids[1:], event.surprisals, event.num_top)
        life.prompt_logprobs = [None, *told]

    def _logits_recorded(self, life: Life, event: LogitsRecorded) -> None:
        """Digests say nothing to people."""

    def _append(self, life: Life, step: int, tokens: list[int]) -> None:
        if not tokens:
            return
        index = len(life.output_token_ids)
        self._count_tokens(life, tokens)
        if index == 0:
            self._tell("first_token", step=step, output_index=0)
        elif life.moments[-1].kind == "output":
            moment = life.moments[-1]
            assert self._record is not None
            moment.facts |= {"last_index": index + len(tokens) - 1, "last_step": step, "until_ns": self._record.time_ns}
        else:
            last = index + len(tokens) - 1
            self._tell("output", first_index=index, last_index=last, first_step=step, last_step=step)

    def _count_tokens(self, life: Life, tokens: list[int]) -> None:
        assert self._record is not None
        if tokens and not life.output_token_ids:
            self._first_token_ns = self._record.time_ns
            life.time_to_first_token_ns = self._first_token_ns - self._submitted_ns
        life.output_token_ids += tokens
        self._last_token_ns = self._record.time_ns
        if len(life.output_token_ids) > 1:
            life.mean_inter_token_ns = (self._last_token_ns - self._first_token_ns) // (len(life.output_token_ids) - 1)

    def _worker_lost(self, life: Life, event: WorkerLost) -> None:
        lost = sum(n for step, n in self._in_flight.items() if step in event.steps)
        self._in_flight.clear()
        if life.status == "running":
            life.status = "preempted"
        if not self.is_open:  # its engine closed in good order, and the worker ended with it
            self._tell("engine_closed", engine_epoch=self._closed_epoch)
            return
        life.num_workers_lost += 1
        self._tell("worker_lost", reason=event.reason, generation=event.generation, num_lost_tokens=lost)

    def _turn_ended(self, life: Life, event: SessionTurnEnded) -> None:
        life.status = "idle"
        facts = {"reason": event.reason, "num_output_tokens": event.num_output_tokens}
        self._tell("turn_ended", **facts, stop_token_id=event.stop_token_id)

    def _extended(self, life: Life, event: SessionExtended) -> None:
        if life.status == "idle":
            life.status = "waiting"
        self._tell("extended", num_tokens=len(event.token_ids))

    def _input_closed(self, life: Life, event: SessionClosed) -> None:  # noqa: ARG002
        self._tell("input_closed")

    def _grammar_ready(self, life: Life, event: GrammarReady) -> None:  # noqa: ARG002
        self._tell("grammar_ready")

    def _drafts_proposed(self, life: Life, event: DraftsProposed) -> None:  # noqa: ARG002
        self._tell("drafts_proposed", num_tokens=len(event.token_ids))

    def _aborted(self, life: Life, event: RequestAborted) -> None:  # noqa: ARG002
        self._tell("aborted", cause=event.cause)

    def _quarantined(self, life: Life, event: RequestQuarantined) -> None:  # noqa: ARG002
        self._tell("quarantined", num_lost_workers=event.num_lost_workers)

    def _quarantine_lifted(self, life: Life, event: QuarantineLifted) -> None:  # noqa: ARG002
        self._tell("quarantine_lifted")

    def _finished(self, life: Life, event: RequestFinished) -> None:
        assert self._record is not None
        life.status, life.finish_reason = "finished", event.reason
        life.total_ns = self._record.time_ns - self._submitted_ns
        self._tell(
            "finished",
            reason=event.reason,
            num_output_tokens=event.num_output_tokens,
            stop_token_id=event.stop_token_id,
            message=event.message,
        )

    def _redacted(self, life: Life, event: ContentRedacted) -> None:
        life.is_redacted = True
        life.prompt_token_ids, life.output_token_ids = [], []
        life.logprobs, life.prompt_logprobs = {}, None
        self._tell("redacted", reason=event.reason)

    def _tell(self, kind: str, **facts: object) -> None:
        assert self._record is not None
        assert self.life is not None
        record = self._record
        self.life.moments.append(Moment(record.position, record.time_ns, record.engine_epoch, kind, facts))


_TELLERS: dict[type[Event], Callable[[LifeStory, Life, Any], None]] = {
    StepScheduled: LifeStory._scheduled,  # noqa: SLF001 - the table of this module's own methods
    RequestPreempted: LifeStory._preempted,  # noqa: SLF001
    OutputDelivered: LifeStory._output,  # noqa: SLF001
    StaleOutputConsumed: LifeStory._stale,  # noqa: SLF001
    LogprobsDelivered: LifeStory._logprobs,  # noqa: SLF001
    PromptLogprobsDelivered: LifeStory._prompt_logprobs,  # noqa: SLF001
    LogitsRecorded: LifeStory._logits_recorded,  # noqa: SLF001
    WorkerLost: LifeStory._worker_lost,  # noqa: SLF001
    SessionTurnEnded: LifeStory._turn_ended,  # noqa: SLF001
    SessionExtended: LifeStory._extended,  # noqa: SLF001
    SessionClosed: LifeStory._input_closed,  # noqa: SLF001
    GrammarReady: LifeStory._grammar_ready,  # noqa: SLF001
    DraftsProposed: LifeStory._drafts_proposed,  # noqa: SLF001
    RequestAborted: LifeStory._aborted,  # noqa: SLF001
    RequestQuarantined: LifeStory._quarantined,  # noqa: SLF001
    QuarantineLifted: LifeStory._quarantine_lifted,  # noqa: SLF001
    RequestFinished: LifeStory._finished,  # noqa: SLF001
    ContentRedacted: LifeStory._redacted,  # noqa: SLF001
}
