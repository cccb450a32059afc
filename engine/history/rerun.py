"""Running an engine again, in virtual time: recorded arrivals, another configuration, a modelled worker.

There is no clock, no thread and no model in it. Time jumps from one thing that happens to the next: somebody asks for something,
or the worker has finished a step. The worker executes one step after the other, as the real one does; how long a step takes
is for a `Timing` to say. Which token comes out is for an `Oracle`: what was recorded for that place, so that requests end
where they did.

Every decision is today's `decide` on a folded state, as in a live engine.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol

from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Event, StepScheduled
from refold.journal.surprisals import EntrySurprisals, blank
from refold.projections.requests import Request
from refold.projections.steps import InFlightStep
from refold.scheduler.commands import Command, CompleteStep, LoseWorker, OpenEngine, ScheduleStep, StartWorker
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State


class Arrival(NamedTuple):
    """What somebody outside asked for, and when."""

    time_ns: int
    command: Command


class Fact(NamedTuple):
    """One record of the run: when, and what was decided."""

    time_ns: int
    command: Command
    events: list[Event]


class Timing(Protocol):
    """How long the worker takes."""

    def step_ns(self, step: StepScheduled) -> int:
        """Nanoseconds of the worker's time for this step, at least 1."""
        ...


class Oracle(Protocol):
    """What comes out."""

    def token(self, request: Request, position: int) -> int:
        """The token that `request` has at `position` of its context."""
        ...

    def num_accepted(self, request: Request, position: int, drafts: list[int] | None, num_drafts: int) -> int:
        """How many of the drafts for `position` and on are right; `drafts` None: they are the worker's own."""
        ...


class LinearTiming(NamedTuple):
    """A step takes `base_ns`, and `token_ns` for each token in it."""

    base_ns: int
    token_ns: int

    def step_ns(self, step: StepScheduled) -> int:
        """See `Timing`."""
        return max(1, self.base_ns + self.token_ns * sum(step.num_tokens))


class _Order(NamedTuple):
    """A step on its way, and how many tokens those have that come in with it."""

    event: StepScheduled
    known: dict[int, int]


class ModelledWorker:
    """Says what the oracle says, step after step. It rolls each request's length forward by its own samples."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self._orders: deque[_Order] = deque()
        self._known: dict[int, int] = {}

    def __len__(self) -> int:
        """How many steps it has not answered."""
        return len(self._orders)

    def take(self, state: State, event: StepScheduled) -> None:
        """Take a step over; the state is the one behind it."""
        handles = [event.handles[admission.entry] for admission in event.admissions]
        known = {handle: len(state.requests.by_handle[handle].tokens) for handle in handles}
        self._orders.append(_Order(event, known))

    def forget(self) -> None:
        """It is lost, and all that it was at."""
        self._orders.clear()
        self._known.clear()

    def answer(self, state: State, time_ns: int, *, refuse: bool = False) -> CompleteStep:
        """What it says to its oldest step. `refuse`: grammars refuse the tokens of their requests."""
        event, known = self._orders.popleft()
        self._known |= known
        step = state.window.in_flight[0]
        given = {drafts.entry: drafts.token_ids for drafts in event.drafts}
        counts: list[int] = []
        token_ids: list[int] = []
        positions: list[int] = []
        for entry, request in enumerate(step.requests):
            if entry in step.chunk_entries:
                counts.append(0)
                positions.append(-1)
                continue
            start = self._known[request.handle]
            num_drafts = event.num_drafts[entry] if event.num_drafts else 0
            accepted = self.oracle.num_accepted(request, start, given.get(entry), num_drafts) if num_drafts else 0
            token_ids += [self.oracle.token(request, position) for position in range(start, start + accepted + 1)]
            counts.append(accepted + 1)
            positions.append(start)
            self._known[request.handle] = start + accepted + 1
        return CompleteStep(
            step=event.step,
            generation=state.worker_generation,
            counts=counts,
            token_ids=token_ids,
            positions=positions,
            logprobs=_blank_logprobs(step, counts, state.config.vocab_size),
            prompt_logprobs=_blank_prompt_logprobs(step, positions, state.config.vocab_size),
            refused_entries=[i for i, r in enumerate(step.requests) if refuse and r.grammar and counts[i]],
            time_ns=time_ns,
        )


def _blank_logprobs(step: InFlightStep, counts: list[int], vocab_size: int) -> list[EntrySurprisals]:
    """Where somebody asks, there is an answer; a model of a worker has no opinion on tokens."""
    asked = [(entry, r.sampling.logprobs) for entry, r in enumerate(step.requests) if counts[entry]]
    wanted = [(entry, min(top, vocab_size)) for entry, top in asked if top is not None]
    return [EntrySurprisals(entry=e, num_top=top, surprisals=blank(counts[e], top)) for e, top in wanted]


def _blank_prompt_logprobs(step: InFlightStep, positions: list[int], vocab_size: int) -> list[EntrySurprisals]:
    wanted = [
        (entry, min(request.sampling.prompt_logprobs, vocab_size), request.num_prompt_tokens - 1)
        for entry, request in enumerate(step.requests)
        if request.sampling.prompt_logprobs is not None and positions[entry] == request.num_prompt_tokens
    ]
    return [EntrySurprisals(entry=e, num_top=top, surprisals=blank(count, top)) for e, top, count in wanted]


class Rerun:
    """An engine in virtual time. `facts` yields what it records, in order.

    `state` is where it starts, and changes as it runs; `now_ns` is the time there.
    """

    def __init__(self, state: State, now_ns: int, timing: Timing, oracle: Oracle) -> None:
        self.state = state
        self.now_ns = now_ns
        self.num_refused = 0
        self._timing = timing
        self._worker = ModelledWorker(oracle)
        self._done_ns: deque[int] = deque()
        self._free_at_ns = now_ns

    def open(self, config: EngineConfig, environment: Mapping[str, str] | None = None) -> Iterator[Fact]:
        """Begin a life: what was in flight is lost, the engine opens under `config`, a worker starts."""
        epoch = self.state.engine_epoch + 1
        yield from self._obey(LoseWorker(reason="the history forks here"))
        yield from self._obey(OpenEngine(engine_epoch=epoch, refold_version="fork", root_seed=0, config=config))
        yield from self._obey(StartWorker(kind="modelled", environment=dict(environment or {})))

    def facts(self, arrivals: Iterable[Arrival]) -> Iterator[Fact]:
        """Run until every arrival was obeyed and nothing is left to do."""
        waiting = iter(arrivals)
        arrival = next(waiting, None)
        while True:
            while facts := list(self._obey(ScheduleStep())):
                yield from facts
            done_ns = self._done_ns[0] if self._done_ns else None
            if arrival is not None and (done_ns is None or arrival.time_ns <= done_ns):
                self.now_ns = max(self.now_ns, arrival.time_ns)
                yield from self._obey(arrival.command)
                arrival = next(waiting, None)
            elif done_ns is not None:
                self.now_ns = max(self.now_ns, self._done_ns.popleft())
                yield from self._obey(self._worker.answer(self.state, self.now_ns))
            else:
                return

    def _obey(self, command: Command) -> Iterator[Fact]:
        events: list[Event] = []
        try:
            events = decide(self.state, command)
        except Rejected:
            self.num_refused += 1
        if not events:
            return
        fold_all(self.state, events)
        for event in events:
            if type(event) is StepScheduled:
                begins_ns = max(self.now_ns, self._free_at_ns)
                self._free_at_ns = begins_ns + self._timing.step_ns(event)
                self._done_ns.append(self._free_at_ns)
                self._worker.take(self.state, event)
        yield Fact(self.now_ns, command, events)
