"""Why: the causal chains behind one request's delays, preemptions and stale tokens.

Each chain is a list of links, earliest first, each a record that anyone can look up. A delay begins with what made the request
wait (it came, it was preempted, its worker died), says what it lacked and who had it, and ends with what gave it to
it. A preemption says whose need it was and why that one needed, and what became of what was in flight. A stale token says
which step made it, what ended its epoch meanwhile, and where it went.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from refold.engine.history.plain import count, listed, safe
from refold.engine.history.replay import unheard
from refold.engine.history.request_story import RequestStory, told
from refold.engine.history.waits import Wait, Waits
from refold.engine.history.words import preemption_in_words, sentence
from refold.journal.events import (
    Event,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    SessionTurnEnded,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)
from refold.journal.record import Record
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.scheduler.state import State

MIN_DELAY_NS = 1


class Link(msgspec.Struct, frozen=True):
    """One cause: the record that says so, and what it says."""

    position: int
    time_ns: int
    words: str


class Chain(msgspec.Struct):
    """What led to what. `duration_ns` of a delay or a preemption; 0 where it isn't known."""

    kind: Literal["delay", "preemption", "stale"]
    title: str
    position: int
    links: list[Link]
    duration_ns: int = 0


class _Stale(msgspec.Struct):
    """Work in flight whose epoch is over."""

    step: int
    num_tokens: int
    planned: Link
    ended: Link


class WhyStory(RequestStory):
    """Follows a journal and keeps the chains of the last request with a client's id. `waits` are all its waits."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.chains: list[Chain] = []
        self.waits: list[Wait] = []
        self._follower = Waits(request_id)
        self._cause: Link | None = None
        self._in_flight: dict[int, tuple[int, Link]] = {}
        self._stale: dict[int, _Stale] = {}
        self._preemption: Chain | None = None
        self._said: dict[int, Link] = {}

    def observe(self, record: Record, events: Sequence[Event], state: State) -> None:
        """Follow one record; the state is the one behind it."""
        for event in events:
            if isinstance(event, RequestSubmitted):
                if self._is_begun_by(event):
                    self._begin(record, event)
            elif self.is_known:
                self._look(record, event, state)
        self._remember(record, events)
        for wait in self._follower.observe(record, events, state):
            self._waited(record, wait)

    def end(self) -> None:
        """The journal has ended."""
        for wait in self._follower.rest():
            self._waited(None, wait)

    # -- what happens to it -------------------------------------------------------------------------------------------

    def _begin(self, record: Record, event: RequestSubmitted) -> None:
        self.chains, self.waits = [], []
        self._in_flight, self._stale, self._preemption = {}, {}, None
        self._cause = self._link(record, sentence(event, self.names))

    def _look(self, record: Record, event: Event, state: State) -> None:
        handle = self._handle
        if isinstance(event, StepScheduled) and handle in event.handles:
            entry = event.handles.index(handle)
            n, first = event.num_tokens[entry], event.first_positions[entry]
            words = f"step {event.step} planned: {count(n, 'token')} of it from position {first} on"
            self._in_flight[event.step] = (n, self._link(record, words))
            if any(admission.entry == entry for admission in event.admissions):
                self._came_in(record, event, entry)
        elif isinstance(event, RequestPreempted) and event.handle == handle:
            self._preempted(record, event, state)
        elif isinstance(event, SessionTurnEnded | RequestFinished) and event.handle == handle:
            self._epoch_over(self._link(record, sentence(event, self.names)))
        elif isinstance(event, WorkerLost) and handle in event.handles:
            self._cause = self._link(record, sentence(event, self.names))
            self._in_flight.clear()
            self._stale.clear()
        elif isinstance(event, StaleOutputConsumed) and handle in event.handles:
            self._stale_came_back(record, event)
        elif getattr(event, "step", None) in self._in_flight and handle in getattr(event, "handles", ()):
            del self._in_flight[event.step]  # type: ignore[attr-defined]

    def _preempted(self, record: Record, event: RequestPreempted, state: State) -> None:
        link = self._link(record, f"preempted {preemption_in_words(event, self.names)}")
        self._cause = link
        links = [link]
        need = self._need(record, event, state)
        if need is not None:
            links.insert(0, need)
        if self._in_flight:
            steps = listed([str(step) for step in self._in_flight])
            links.append(
                self._link(record, f"in flight then: steps {steps}, stale from here on ({event.stale_policy})")
            )
        self._preemption = Chain("preemption", f"preempted at {record.position}", record.position, links)
        self.chains.append(self._preemption)
        self._epoch_over(link)

    def _need(self, record: Record, event: RequestPreempted, state: State) -> Link | None:
        """Why the one who took the blocks needed them."""
        taker = state.requests.by_handle.get(event.for_handle if event.for_handle is not None else -1)
        if taker is None or event.reason == "cache_reset":
            return None
        whom = "it" if taker.handle == self._handle else safe(taker.request_id)
        words = (
            f"{whom} had {count(len(taker.tokens), 'token')} known and {taker.num_output_placeholders} in flight, blocks of "
            f"{state.pool.block_size}: {count(event.needed_blocks, 'block')} more needed, {event.free_blocks} free"
        )
        return self._link(record, words)

    def _epoch_over(self, ended: Link) -> None:
        for step, (n, planned) in self._in_flight.items():
            self._stale[step] = _Stale(step, n, planned, ended)
        self._in_flight = {}

    def _stale_came_back(self, record: Record, event: StaleOutputConsumed) -> None:
        stale = self._stale.pop(event.step, None)
        at = event.handles.index(self._handle)
        number = event.counts[at]
        fate = "delivered" if event.delivered[at] else "dropped"
        link = self._link(record, f"step {event.step} came back: {count(number, 'output')} {fate}")
        links = [stale.planned, stale.ended, link] if stale is not None else [link]
        title = f"{count(event.num_tokens[at], 'scheduled token')} of step {event.step} came back stale, {fate}"
        self.chains.append(Chain("stale", title, record.position, links, record.time_ns - links[0].time_ns))
        if self._preemption is not None:
            self._preemption.links.append(link)

    def _came_in(self, record: Record, event: StepScheduled, entry: int) -> None:
        if self._preemption is None:
            return
        words = f"came in again with step {event.step}, from position {event.first_positions[entry]} on"
        self._preemption.links.append(self._link(record, words))
        self._preemption.duration_ns = record.time_ns - self._preemption.links[0].time_ns
        self._preemption = None

    # -- delays -------------------------------------------------------------------------------------------------------

    def _waited(self, record: Record | None, wait: Wait) -> None:
        if wait.handle != self._handle:
            return
        self.waits.append(wait)
        if wait.duration_ns < MIN_DELAY_NS:
            return
        links = [self._cause] if self._cause is not None and self._cause.position <= wait.start else []
        links.append(Link(wait.start, wait.start_ns, f"waits for {wait.words}"))
        if wait.ended_by is not None and wait.ended_by in self._said:
            links.append(self._said[wait.ended_by])
        if record is not None:
            links.append(self._link(record, "the wait is over"))
        self.chains.append(Chain("delay", f"waited for {wait.words}", wait.start, links, wait.duration_ns))

    def _remember(self, record: Record, events: Sequence[Event]) -> None:
        """What each of the last records said that may end a wait."""
        told = [sentence(event, self.names) for event in events if not isinstance(event, StepScheduled)]
        if told:
            self._said[record.position] = self._link(record, "; ".join(told[:3]))
        if len(self._said) > 4096:
            for position in list(self._said)[:2048]:
                del self._said[position]

    @staticmethod
    def _link(record: Record, words: str) -> Link:
        return Link(record.position, record.time_ns, words)


def why(
    reader: JournalReader,
    request_id: str,
    stream: str = DEFAULT_STREAM,
    on_record: Callable[[], object] = unheard,
) -> WhyStory:
    """Follow a whole journal. Raises as `replay`."""
    story = told(WhyStory(request_id), reader, stream, on_record)
    story.end()
    return story
