"""Orders: a history as a list of what was asked, that can be played again by today's code.

    play(ORDERS, SAID)      # raises at the first thing that is wrong

An order is a command of the scheduler's, or `Answer`: the worker comes back with its oldest step. Orders are tolerant: one that
is refused, or has nothing to act on, does nothing, so any part of a list is a list that can be played. That is what
shrinking needs. `SAID` is what the model says: (client's id, length of the turn's prompt) -> tokens; a token that isn't there is a
filler that stops nothing.

Every event is judged by the law book, each decision is taken twice, and at the end everything must come to its end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from refold.engine.history.recall import Forgotten, command_of
from refold.engine.history.recording import Recording
from refold.engine.history.replay import fold_event, unheard
from refold.engine.history.rerun import ModelledWorker
from refold.journal.codec import decode
from refold.journal.errors import InvariantViolation, Rejected, WorkerLost
from refold.journal.events import Event, StepScheduled
from refold.journal.events import WorkerLost as WorkerLostEvent
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import verified_part
from refold.projections.requests import Request
from refold.scheduler.commands import (
    CloseEngine,
    CloseSession,
    Command,
    CompleteStep,
    LoseWorker,
    ReadyGrammar,
    RecordDigest,
    ResumeEngine,
    ScheduleStep,
    StartWorker,
)
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State

MAX_QUIET_TURNS = 20_000
Said = Mapping[tuple[str, int], Sequence[int]]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worker's oldest step comes back. `refuse`: grammars refuse the tokens of their requests."""

    refuse: bool = False


Order = Answer | Command


class SpokenOracle:
    """Says what it is told to say; see the module's text."""

    def __init__(self, said: Said) -> None:
        self._said = said

    def token(self, request: Request, position: int) -> int:
        """See `Oracle`."""
        said = self._said.get((request.request_id, request.num_prompt_tokens), ())
        at = position - request.num_prompt_tokens
        if 0 <= at < len(said):
            return said[at]
        return next((token for token in range(1 << 16) if token not in request.stop_ids), 0)

    def num_accepted(self, request: Request, position: int, drafts: list[int] | None, num_drafts: int) -> int:
        """The worker's own drafts are right as often as not; given ones are compared."""
        if drafts is None:
            return (position + num_drafts) % (num_drafts + 1)
        right = 0
        while right < len(drafts) and drafts[right] == self.token(request, position + right):
            right += 1
        return right


class OrderPlayer:
    """An engine that obeys orders, and is judged. `num_events` counts what it has recorded."""

    def __init__(self, said: Said) -> None:
        self.state = State()
        self.book = LawBook()
        self.num_events = 0
        self.num_begun = 0
        self._worker = ModelledWorker(SpokenOracle(said))

    def obey(self, order: Order) -> None:
        """Obey one order.

        Raises:
            InvariantViolation: a law is broken.
            Exception: whatever else goes wrong in the scheduler.
        """
        self.num_begun += 1
        if isinstance(order, Answer):
            self._answer(refuse=order.refuse)
        else:
            self._do(order)

    def settle(self) -> None:
        """Nothing is held back any more, and all comes to its end."""
        if not self.state.is_open:
            return
        self._do(ResumeEngine())
        if not self.state.worker_alive:
            self._do(StartWorker(kind="modelled", environment={}))
        for request in self.state.requests.live():
            self._do(ReadyGrammar(request_id=request.request_id))
            self._do(CloseSession(request_id=request.request_id))
        for _ in range(MAX_QUIET_TURNS):
            while self._do(ScheduleStep()):
                pass
            if not len(self._worker):
                break
            self._answer(refuse=False)
        live = [request.request_id for request in self.state.requests.live()]
        if not self.state.is_quiescent:
            raise InvariantViolation(f"END broken: {live[:8]} live with nothing to do, or have no end")

    def _answer(self, *, refuse: bool) -> None:
        if not len(self._worker) or not self.state.window.in_flight:
            return
        answer = self._worker.answer(self.state, self.num_begun, refuse=refuse)
        try:
            self._do(answer)
        except WorkerLost as lost:
            raise InvariantViolation(f"ANSWER broken: a right answer is taken for a wrong one: {lost}") from lost

    def _do(self, command: Command) -> list[Event]:
        try:
            events = decide(self.state, command)
        except Rejected:
            return []
        if decide(self.state, command) != events:
            raise InvariantViolation(f"L12 broken: {type(command).__name__} is decided in two ways")
        for event in events:
            fold(self.state, event)
            self.num_events += 1
            self.book.observe(self.state, event)
            if isinstance(event, WorkerLostEvent):
                self._worker.forget()
        for event in events:
            if isinstance(event, StepScheduled):
                self._worker.take(self.state, event)
        return events


def play(orders: Iterable[Order], said: Said | None = None) -> OrderPlayer:
    """Obey all orders, and let everything end.

    Raises:
        InvariantViolation: a law is broken.
        Exception: whatever else goes wrong in the scheduler.
    """
    player = OrderPlayer(said or {})
    for order in orders:
        player.obey(order)
    player.settle()
    return player


class Heard:
    """A journal as orders. `said` is what its model said; `num_events` how many facts it holds."""

    def __init__(self, orders: list[Order], said: dict[tuple[str, int], list[int]], num_events: int) -> None:
        self.orders = orders
        self.said = said
        self.num_events = num_events


def orders_of(reader: JournalReader, stream: str = DEFAULT_STREAM, on_record: Callable[[], object] = unheard) -> Heard:
    """The orders that led to a journal, as far as its records can be folded; what is behind that isn't told.

    Raises:
        JournalCorrupt: a record doesn't follow from the one before.
    """
    state, recording, orders, num_events = State(), Recording(), list[Order](), 0
    for record in verified_part(reader, stream):
        events = decode(record)
        num_events += len(events)
        try:
            command = command_of(events, state)
        except Forgotten:
            command = None
        if command is not None and not isinstance(command, RecordDigest | CloseEngine):
            orders.append(_order(command))
        recording.observe(record, events, state)
        try:
            for index, event in enumerate(events):
                fold_event(state, event, record.position, index)
        except InvariantViolation:
            break
        on_record()
    return Heard(orders, recording.oracle.said, num_events)


def _order(command: Command) -> Order:
    if isinstance(command, CompleteStep):
        return Answer(refuse=bool(command.refused_entries))
    if isinstance(command, LoseWorker):
        return LoseWorker(reason="lost", by_step=command.by_step)
    return command
