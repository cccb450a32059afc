"""The player: obeys a list of orders, and remembers them. The same list is the same life.

An order is a command of the scheduler's, or something that happens outside of it: the worker works, its answer arrives (in
time, twice, too early, garbled), the process dies and another one opens what is left of the journal. Orders are tolerant:
one that has nothing to act on does nothing, so any part of a list is a list that can be played. That is what shrinking
needs.

Every event is judged by the law book, by conduct and, at the end, by the transcript and by a second engine that decides the
whole journal again.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any, Literal

import msgspec

from refold.gpu.batch import StepOutput, WorkOrder
from refold.journal.codec import Encoded, decode, encode
from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import SCHEMA_VERSION, EngineConfig, Event, RequestQuarantined, RequestSubmitted
from refold.journal.events import WorkerLost as WorkerLostEvent
from refold.journal.record import Record
from refold.projections.requests import Request
from refold.scheduler.commands import (
    CloseEngine,
    CloseSession,
    Command,
    LoseWorker,
    ReadyGrammar,
    ResumeEngine,
    ScheduleStep,
    StartWorker,
    SubmitRequest,
)
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold, fold_all
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State, digest
from tests.kit.conduct import Conduct
from tests.kit.drive import Drive
from tests.kit.transcript import Transcript

MAX_QUIET_TURNS = 3000
POISON = "poison at "


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happens outside of the scheduler."""


class Work(Order, frozen=True):
    """The worker executes its oldest order; the answer is on its way."""


class Answer(Order, frozen=True):
    """The oldest answer on its way arrives. `refuse`: grammars refuse the tokens of their requests."""

    refuse: bool = False


class AnswerAgain(Order, frozen=True):
    """An answer that arrived before, or was lost with its worker, arrives `back` before the last: it must be refused."""

    back: int = 0


class AnswerAhead(Order, frozen=True):
    """The second answer on its way arrives before the first: the worker is given up."""


class AnswerWrong(Order, frozen=True):
    """The oldest answer arrives garbled: the worker is given up."""

    how: Literal["counts", "extra", "token", "position"] = "counts"


class LoseTheWorker(Order, frozen=True):
    """The worker dies, and another starts. `by_step`: it may have been for a request in its step; here it never is."""

    by_step: bool = False


class Reopen(Order, frozen=True):
    """The engine's process ends, in good order or not, and the next one opens the journal.

    Its last `lost` records never reached the disk. `changes` are fields of the next life's configuration.
    """

    lost: int = 0
    in_order: bool = False
    changes: dict[str, Any] = {}


class Settle(Order, frozen=True):
    """Nothing is held back any more (no pause, no grammar outstanding, no session open), and all comes to its end."""


class Player(Drive):
    """A drive that obeys orders. `orders_given` are those that it was given."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.orders_given: list[Order | Command] = []
        self.conduct = Conduct()
        self.bytes: list[Encoded] = []  # of each record
        self.answers: deque[StepOutput] = deque()
        self.past: deque[StepOutput] = deque(maxlen=8)
        self.num_accidents = 0  # losses that look as if a request were to blame
        self.has_poison = False

    # -- orders -------------------------------------------------------------------------------------------------------

    def obey(self, order: Order | Command) -> None:
        """Obey one order."""
        self.orders_given.append(order)
        obey = _OBEY.get(type(order))
        if obey is not None:
            obey(self, order)
            return
        assert isinstance(order, Command), order
        with suppress(Rejected):
            self.do(order)
        self.conduct.obeyed(self.state, order)

    def do(self, command: Command) -> list[Event]:
        """Decide, keep, fold, judge, and look after the worker."""
        state, book, conduct = self.state, self.book, self.conduct
        events = decide(state, command)
        conduct.plan(state, command, events)
        if type(command) is SubmitRequest:
            self.has_poison = self.has_poison or is_poison(command)
        if events:
            self.records.append(events)
            self.bytes.append(encode(events))
            self.commands.append(command)
        for event in events:
            conduct.before(state, event)
            fold(state, event)
            if book is not None:
                book.observe(state, event)
            conduct.after(state, event)
            self._serve(event)
            if type(event) is WorkerLostEvent:
                self.past.extend(self.answers)
                self.answers.clear()
        return events

    def _work(self, order: Work) -> None:
        if not self.orders:
            return
        if not (self.has_poison and self._is_deadly(self.orders[0])):
            self.answers.append(self.run_worker())
            return
        while self.answers:
            self._answer(Answer())
        self._lose_worker("simulated death", by_step=True)

    def _is_deadly(self, order: WorkOrder) -> bool:
        """Whether a step computes the position that a poisonous request kills its worker at: its adapter says which."""
        scheduled, by_handle = order.scheduled, self.state.requests.by_handle
        for handle, n, first in zip(scheduled.handles, scheduled.num_tokens, scheduled.first_positions, strict=True):
            request = by_handle.get(handle)
            if request is not None and is_poison(request) and first + n > int(request.adapter.removeprefix(POISON)):
                return True
        return False

    def _answer(self, order: Answer) -> None:
        if not self.answers:
            return
        answer = self.answers.popleft()
        self.past.append(answer)
        refused = []
        if order.refuse:
            requests = self.state.window.in_flight[0].requests
            refused = [i for i, r in enumerate(requests) if r.grammar and answer.counts[i]]
        self.deliver(answer, refused, time_ns=len(self.orders_given))

    def _answer_again(self, order: AnswerAgain) -> None:
        if not self.past:
            return
        before = digest(self.state)
        try:
            self.deliver(self.past[-1 - order.back % len(self.past)])
        except Rejected:
            assert digest(self.state) == before, "a refused answer changed the state"
            return
        raise AssertionError("an answer was accepted twice")

    def _answer_ahead(self, order: AnswerAhead) -> None:
        if len(self.answers) >= 2:
            self._deliver_wrong(self.answers[1])

    def _answer_wrong(self, order: AnswerWrong) -> None:
        if not self.answers:
            return
        answer, step = self.answers[0], self.state.window.in_flight[0]
        wrong: dict[str, object] = {}
        if order.how == "counts":
            wrong = {"counts": answer.counts[:-1]}
        elif order.how == "extra":
            wrong = {"token_ids": [*answer.token_ids, 0]}
        elif order.how == "token" and answer.token_ids:
            wrong = {"token_ids": [*answer.token_ids[:-1], self.config.vocab_size]}
        elif order.how == "position":
            read = [i for i, count in enumerate(answer.counts) if count and step.stale.get(i) != "drop"]
            if read:
                wrong = {"positions": [p + (i == read[-1]) for i, p in enumerate(answer.positions)]}
        if wrong:
            self._deliver_wrong(msgspec.structs.replace(answer, **wrong))

    def _deliver_wrong(self, answer: StepOutput) -> None:
        try:
            self.deliver(answer)
        except WorkerLost as lost:
            self._accident(str(lost), by_step=True)
            return
        raise AssertionError("a wrong answer was accepted")

    def _lose_the_worker(self, order: LoseTheWorker) -> None:
        self._accident("simulated loss", by_step=order.by_step)

    def _accident(self, reason: str, *, by_step: bool) -> None:
        self.num_accidents += by_step
        self._lose_worker(reason, by_step=by_step)

    def _lose_worker(self, reason: str, *, by_step: bool) -> None:
        if self.do(LoseWorker(reason=reason, by_step=by_step)):
            self.do(StartWorker(kind="simulated", environment={}))

    def _reopen(self, order: Reopen) -> None:
        """What the journal's bytes say is all that is left."""
        if order.in_order:
            self.do(CloseEngine(reason="simulated"))
        before = digest(self.state)
        self.worker = None
        self.orders.clear()
        self.released.clear()
        lost = min(order.lost, len(self.records))
        if lost:
            del self.records[-lost:], self.bytes[-lost:], self.commands[-lost:]
            self.past.clear()
            self.answers.clear()
            self.book, self.conduct = LawBook(), Conduct()
            self.state = refolded(self.bytes, self.book, self.conduct)
        else:
            self.state = refolded(self.bytes)
            assert digest(self.state) == before, "the journal folds to another state than the engine had"
        self.open(msgspec.structs.replace(self.config, **order.changes))

    @classmethod
    def left_with(cls, config: EngineConfig, records: list[list[Event]], commands: list[Command]) -> "Player":
        """The engine that opens what another left behind: the first records of its journal, and the commands of them."""
        player = cls(config)
        player.records, player.commands = list(records), list(commands)
        player.bytes = [encode(events) for events in records]
        player.has_poison = any(type(event) is RequestSubmitted and is_poison(event) for event in chain(*records))
        player.state = refolded(player.bytes, player.book, player.conduct)
        player.open()
        return player

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """See `Settle`."""
        self.do(ResumeEngine())
        if not self.state.worker_alive:
            self.do(StartWorker(kind="simulated", environment={}))
        for request in self.state.requests.live():
            self.do(ReadyGrammar(request_id=request.request_id))
            self.do(CloseSession(request_id=request.request_id))
        for _ in range(MAX_QUIET_TURNS):
            while self.do(ScheduleStep()):
                pass
            if self.answers:
                self._answer(Answer())
            elif self.orders:
                self._work(Work())
            else:
                break
        live = [request.request_id for request in self.state.requests.live()]
        assert self.state.is_quiescent, f"{live} live with nothing to do, or no end after {MAX_QUIET_TURNS} turns"

    def judge(self) -> str:
        """Judge the whole journal: who was given what, and whether it would be decided again. SHA-256 (hex) of its bytes."""
        self._judge_verdicts()
        transcript = Transcript()
        for events in self.records:
            for event in events:
                transcript.observe(event)
        assert not transcript.unfinished, f"handles {sorted(transcript.unfinished)} never finished"
        assert digest(decided_again(self.commands, self.bytes)) == digest(self.state), "folded to another state"
        return hashlib.sha256(b"".join(chain.from_iterable(self.bytes))).hexdigest()

    def _judge_verdicts(self) -> None:
        """Who was found out is what kills workers; only an accident to whoever is tried can look the same."""
        poisons: dict[int, bool] = {}
        for event in chain.from_iterable(self.records):
            if type(event) is RequestSubmitted:
                poisons[event.handle] = is_poison(event)
            elif type(event) is RequestQuarantined and not self.num_accidents:
                assert poisons[event.handle], f"handle {event.handle} is quarantined and harmless"


def is_poison(request: Request | RequestSubmitted | SubmitRequest) -> bool:
    """Whether a simulated worker dies of a request."""
    return request.adapter.startswith(POISON)


_OBEY: dict[type, Callable[[Player, Any], None]] = {
    Work: Player._work,
    Answer: Player._answer,
    AnswerAgain: Player._answer_again,
    AnswerAhead: Player._answer_ahead,
    AnswerWrong: Player._answer_wrong,
    LoseTheWorker: Player._lose_the_worker,
    Reopen: Player._reopen,
    Settle: lambda player, _: player.settle(),
}


def play(config: EngineConfig, orders: Iterable[Order | Command]) -> Player:
    """Open an engine, obey all orders, let everything end, and judge it."""
    player = Player(config)
    player.open()
    for order in orders:
        player.obey(order)
    player.settle()
    player.judge()
    return player


def refolded(journal: Iterable[Encoded], book: LawBook | None = None, conduct: Conduct | None = None) -> State:
    """A fresh fold of the journal's bytes; a new book and a new conduct read along."""
    state = State()
    for encoded in journal:
        for event in from_bytes(encoded):
            if conduct is not None:
                conduct.before(state, event)
            fold(state, event)
            if book is not None:
                book.follow(state, event)
            if conduct is not None:
                conduct.after(state, event)
    if book is not None:
        book.check(state)
    return state


def decided_again(commands: Iterable[Command], bodies: Iterable[Encoded]) -> State:
    """Decide every command again on a fold of the bytes so far: the facts must be the same, byte for byte (law L12)."""
    state = State()
    for command, body in zip(commands, bodies, strict=True):
        again = encode(decide(state, command))
        assert again == body, f"L12 broken: {type(command).__name__} was decided otherwise: {again[:300]!r}"
        fold_all(state, from_bytes(body))
    return state


def from_bytes(encoded: Encoded) -> list[Event]:
    """The events of a record's body and content."""
    return decode(Record(0, 1, SCHEMA_VERSION, 0, *encoded, b"", b""))
