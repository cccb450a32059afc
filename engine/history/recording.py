"""A recording: what a journal says of the world outside the scheduler, so that another scheduler can be put into it.

Who asked for what and when (arrivals), what the model said (the tokens of each request, turn by turn), and how long the
worker took for its steps.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from refold.engine.history.recall import Forgotten, command_of
from refold.engine.history.replay import replay, unheard
from refold.engine.history.rerun import Arrival, LinearTiming
from refold.journal.errors import Rejected
from refold.journal.events import Event, OutputDelivered, StaleOutputConsumed, StepScheduled, WorkerLost
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.projections.requests import Request
from refold.scheduler.commands import (
    AbortRequest,
    CloseSession,
    Command,
    CompleteStep,
    ExpireSessions,
    ExtendSession,
    FailRequest,
    PauseEngine,
    ProposeDrafts,
    ReadyGrammar,
    ResetCache,
    ResumeEngine,
    SubmitRequest,
)
from refold.scheduler.state import State

FILLER_TOKEN = 0
_FROM_OUTSIDE = (
    SubmitRequest,
    AbortRequest,
    FailRequest,
    ResetCache,
    ReadyGrammar,
    ProposeDrafts,
    ExtendSession,
    CloseSession,
    ExpireSessions,
    PauseEngine,
    ResumeEngine,
)


class Step(NamedTuple):
    """A step that came back: its number, its tokens, and how long the worker was at it."""

    step: int
    num_tokens: int
    worker_ns: int


class RecordedOracle:
    """Says again what the model said. Behind the end of what it said there is a filler token that stops nothing.

    A request's tokens are found by its client's id, the length of its turn's prompt and the position.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[str, int], list[int]] = {}
        self._accepted: dict[tuple[str, int, int], int] = {}
        self.num_drafts = 0
        self.num_accepted_drafts = 0

    def heard(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        """The model said these tokens from `position` of the context on."""
        said = self._turns.setdefault((request.request_id, request.num_prompt_tokens), [])
        at = position - request.num_prompt_tokens
        said[at : at + len(token_ids)] = token_ids
        if len(token_ids) > 1:
            self._accepted[request.request_id, request.num_prompt_tokens, position] = len(token_ids) - 1

    @property
    def said(self) -> dict[tuple[str, int], list[int]]:
        """All that it said, by client's id and length of the turn's prompt."""
        return self._turns

    def token(self, request: Request, position: int) -> int:
        """See `Oracle`."""
        said = self._turns.get((request.request_id, request.num_prompt_tokens), ())
        at = position - request.num_prompt_tokens
        if 0 <= at < len(said) and said[at] >= 0:
            return said[at]
        return next(token for token in range(FILLER_TOKEN, 1 << 30) if token not in request.stop_ids)

    def num_accepted(self, request: Request, position: int, drafts: list[int] | None, num_drafts: int) -> int:
        """See `Oracle`. The worker's own drafts are as good as they were on the whole."""
        if drafts is None:
            known = self._accepted.get((request.request_id, request.num_prompt_tokens, position))
            if known is not None:
                return min(known, num_drafts)
            rate = self.num_accepted_drafts / self.num_drafts if self.num_drafts else 0.6
            return min(int(num_drafts * rate + 0.5), num_drafts)
        right = 0
        while right < len(drafts) and drafts[right] == self.token(request, position + right):
            right += 1
        return right


class Recording:
    """What was outside. `arrivals` in order, `steps` that came back, `oracle`, and how the records went on (`facts`)."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.commands: list[Command] = []
        self.steps: list[Step] = []
        self.oracle = RecordedOracle()
        self.num_forgotten = 0
        self._planned: dict[int, tuple[int, int]] = {}
        self._free_at_ns = 0

    def observe(self, record: Record, events: Sequence[Event], state: State) -> None:
        """Follow one record. The state is the one BEFORE it."""
        try:
            command = command_of(events, state)
        except Forgotten:
            self.num_forgotten += 1
        else:
            self.commands.append(command)
            if isinstance(command, _FROM_OUTSIDE):
                self.arrivals.append(Arrival(record.time_ns, command))
            if isinstance(command, CompleteStep):
                self._heard(state, command)
        for event in events:
            if isinstance(event, StepScheduled):
                self._planned[event.step] = (record.time_ns, sum(event.num_tokens))
                self.oracle.num_drafts += sum(event.num_drafts)
            elif isinstance(event, OutputDelivered | StaleOutputConsumed):
                self.oracle.num_accepted_drafts += sum(event.accepted_drafts)
                self._came_back(record, event.step)
            elif isinstance(event, WorkerLost):
                self._planned.clear()

    def _heard(self, state: State, command: CompleteStep) -> None:
        step, offset = state.window.in_flight[0], 0
        for entry, (request, count) in enumerate(zip(step.requests, command.counts, strict=True)):
            tokens = command.token_ids[offset : offset + count]
            offset += count
            if count and step.stale.get(entry) != "drop":
                self.oracle.heard(request, command.positions[entry], tokens)

    def _came_back(self, record: Record, step: int) -> None:
        planned_ns, num_tokens = self._planned.pop(step, (0, 0))
        if not num_tokens:
            return
        began_ns = max(planned_ns, self._free_at_ns)
        self._free_at_ns = record.time_ns
        self.steps.append(Step(step, num_tokens, max(record.time_ns - began_ns, 1)))


class RecordedTiming:
    """A step takes as long as the recorded one of its number, if that had as many tokens; else what the fit says."""

    def __init__(self, steps: Sequence[Step], fit: LinearTiming) -> None:
        self.fit = fit
        self._by_step = {step.step: step for step in steps}

    def step_ns(self, step: StepScheduled) -> int:
        """See `Timing`."""
        recorded = self._by_step.get(step.step)
        if recorded is not None and recorded.num_tokens == sum(step.num_tokens):
            return recorded.worker_ns
        return self.fit.step_ns(step)


def fitted(steps: Sequence[Step]) -> LinearTiming:
    """What a step takes, and each token in it: least squares through the recorded steps, the slowest hundredth left out.

    Raises:
        Rejected: no step came back, so there is nothing to learn from.
    """
    if not steps:
        raise Rejected("no step came back in this journal: give the worker's timing with --step-time and --token-time")
    kept = sorted(steps, key=lambda step: step.worker_ns)[: max(1, len(steps) - len(steps) // 100)]
    n = len(kept)
    mean_tokens = sum(step.num_tokens for step in kept) / n
    mean_ns = sum(step.worker_ns for step in kept) / n
    spread = sum((step.num_tokens - mean_tokens) ** 2 for step in kept)
    together = sum((step.num_tokens - mean_tokens) * (step.worker_ns - mean_ns) for step in kept)
    token_ns = max(together / spread, 0.0) if spread else 0.0
    base_ns = mean_ns - token_ns * mean_tokens
    if base_ns < 0:
        token_ns, base_ns = mean_ns / mean_tokens, 0.0
    return LinearTiming(round(base_ns), round(token_ns))


def recorded(
    reader: JournalReader, stream: str = DEFAULT_STREAM, on_record: Callable[[], object] = unheard
) -> Iterator[tuple[Record, list[Event], State, Recording]]:
    """Every record with the state behind it, and what was outside so far. Raises as `replay`."""
    recording = Recording()
    for record, events, state in replay(reader, stream, expect=reader.head(stream), before=recording.observe):
        on_record()
        yield record, events, state, recording
