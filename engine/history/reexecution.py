"""Re-execution: the recorded schedule runs again on a new worker, and every token is compared with the recorded one.

The journal holds the schedule whole: who was in which batch, in which order, in which blocks. With the state that it folds to,
each work order can be made again as it was (`refold.engine.work_orders`); nothing else goes in. On the machine that recorded
it, with the same build, the same threads and the same weights, each row of logits has the bits that it had, whatever the
batch was, so each token is the recorded one, and so is each digest of a row where digests were recorded.

On another machine it may well be otherwise, and that would be nobody's fault. So what the numbers depend on, as the recorded worker
told it, is compared first, and a difference there is refused (`OtherEnvironment`), or carried along as a label.

What can be compared is what came back. Each worker of the journal gets one of its own here, with empty slots and blocks; what was
in flight when a worker was lost never came back, and isn't computed. Requests whose tokens were erased leave their batches
(see `erased_orders`), where the worker's arithmetic lets the others stay; where it doesn't, that worker's rest is left out.
Nothing is written.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from refold.engine.history.came_back import CameBack, Said, came_back
from refold.engine.history.erased_orders import Remaining
from refold.engine.history.relations import Names
from refold.engine.history.replay import replay, unheard
from refold.engine.work_orders import OrderBook
from refold.gpu.batch import StepOutput, Worker, WorkOrder
from refold.journal.content import is_placeholder
from refold.journal.errors import InvariantViolation, RefoldError, Rejected, WorkerLost
from refold.journal.events import EngineConfig, EngineOpened, Event, RequestSubmitted, WorkerStarted
from refold.journal.events import WorkerLost as WorkerLostEvent
from refold.journal.record import Head
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.scheduler.state import State

MakeSuccessor = Callable[[EngineConfig, Mapping[str, str]], Worker]
"""Makes a worker for a configuration, as like as can be to one of which the environment is told."""


class OtherEnvironment(Rejected):
    """This worker isn't like the recorded one, so equal numbers can't be expected.

    Attributes:
        differences: what differs: name -> recorded, here. Empty where one of them doesn't say.
    """

    def __init__(self, generation: int, differences: dict[str, tuple[str, str]]) -> None:
        words = ", ".join(
            f"{name} was {was or 'not told'}, is {now or 'not told'}" for name, (was, now) in differences.items()
        )
        super().__init__(f"worker {generation} of the journal can't be had here: {words}")
        self.differences = differences


class Difference(NamedTuple):
    """The first thing that isn't what was recorded. `what`: `token`, `count` of tokens or `logits`.

    `place` is the record in which the step came back; `position` counts the request's prompt and outputs from 0.
    """

    what: str
    place: int
    step: int
    entry: int
    request_id: str
    position: int
    recorded: int
    found: int


class Reexecuted(NamedTuple):
    """What was compared. `first` is None if all of it was equal; behind a token that differs nothing is compared."""

    num_workers: int
    num_steps: int
    num_tokens: int
    num_rows: int
    num_rows_different: int
    num_steps_lost: int
    num_steps_left_out: int
    num_tokens_erased: int
    first: Difference | None
    environment: dict[str, str]
    differences: dict[str, tuple[str, str]]
    num_records: int


def reexecute(
    reader: JournalReader,
    make_worker: MakeSuccessor,
    stream: str = DEFAULT_STREAM,
    stop: int | None = None,
    expect: Head | None = None,
    on_record: Callable[[], object] = unheard,
    *,
    any_environment: bool = False,
) -> Reexecuted:
    """Execute the schedule of the records before `stop` again, up to the first token that differs. They must reach `expect`.

    Raises:
        OtherEnvironment: the new worker isn't like the recorded one, and `any_environment` isn't given.
        Rejected: a worker can't be made.
        WorkerLost: a worker fails at an order that the recorded one obeyed.
        JournalCorrupt, Contradiction: a record isn't sound.
    """
    run = _Run(make_worker, any_environment=any_environment)
    try:
        for record, events, state in replay(reader, stream, stop, expect=expect):
            run.observe(record.position, events, state)
            on_record()
            if run.has_parted:
                break
    finally:
        run.dismiss()
    return run.result()


class _Run:
    """The state of a re-execution. `has_parted`: tokens differ, so what follows can't be compared."""

    def __init__(self, make_worker: MakeSuccessor, *, any_environment: bool) -> None:
        self.has_parted = False
        self._make_worker = make_worker
        self._any_environment = any_environment
        self._names = Names()
        self._book = OrderBook()
        self._pending: deque[WorkOrder] = deque()
        self._hired: tuple[WorkerStarted, EngineConfig] | None = None
        self._worker: Worker | None = None
        self._remaining = Remaining()
        self._is_left_out = False
        self._counts: Counter[str] = Counter()
        self._first: Difference | None = None
        self._environment: dict[str, str] = {}
        self._differences: dict[str, tuple[str, str]] = {}
        self._released: list[int] = []

    def observe(self, position: int, events: list[Event], state: State) -> None:
        """Follow one record, which is folded already."""
        self._counts["records"] += 1
        for event in events:
            if isinstance(event, RequestSubmitted):
                self._names.observe(event)
            elif isinstance(event, EngineOpened | WorkerLostEvent):
                self.dismiss()
            elif isinstance(event, WorkerStarted):
                self.dismiss()
                self._hired = event, state.config
            elif (order := self._book.order(state, event)) is not None:
                self._pending.append(order)
        if (answer := came_back(events)) is not None:
            self._execute(position, answer)

    def dismiss(self) -> None:
        """The worker's time is over, and with it what was in flight."""
        self._counts["steps lost"] += len(self._pending)
        self._pending.clear()
        self._book.forget()
        self._remaining, self._is_left_out, self._released = Remaining(), False, []
        worker, self._worker, self._hired = self._worker, None, None
        if worker is not None:
            worker.close()

    def result(self) -> Reexecuted:
        """What was compared so far."""
        counts = self._counts
        return Reexecuted(
            num_workers=counts["workers"],
            num_steps=counts["steps"],
            num_tokens=counts["tokens"],
            num_rows=counts["rows"],
            num_rows_different=counts["rows different"],
            num_steps_lost=counts["steps lost"],
            num_steps_left_out=counts["steps left out"],
            num_tokens_erased=counts["tokens erased"],
            first=self._first,
            environment=self._environment,
            differences=self._differences,
            num_records=counts["records"],
        )

    def _execute(self, position: int, answer: CameBack) -> None:
        order = self._pending.popleft()
        if order.scheduled.step != answer.step:
            raise InvariantViolation(f"step {answer.step} came back, {order.scheduled.step} is the oldest in flight")
        order = replace(order, released=[*self._released, *order.released])
        left = self._left_of(order)
        gone = answer.said.keys() - set(left.scheduled.handles if left is not None else ())
        self._counts["tokens erased"] += sum(answer.said[handle].num_tokens for handle in gone)
        if left is None:
            self._counts["steps left out"] += 1
            self._released = order.released
            return
        self._released = []
        output = self._answer(left, position)
        self._counts["steps"] += 1
        for difference in self._differences_of(position, left, output, answer):
            self._first = self._first or difference
            self.has_parted |= difference.what != "logits"
            if self.has_parted:
                return

    def _left_of(self, order: WorkOrder) -> WorkOrder | None:
        """What of an order can be computed; None for nothing, and for nothing more of this worker's."""
        assert self._hired is not None, "an order for a worker"
        left = self._remaining.of(order)
        if left is not order and self._hired[0].environment.get("batch_invariant", "yes") != "yes":
            self._is_left_out = True
        return None if self._is_left_out else left

    def _answer(self, order: WorkOrder, position: int) -> StepOutput:
        if self._worker is None:
            self._worker = self._hire()
        try:
            return self._worker.execute(order)
        except RefoldError:
            raise
        except Exception as error:
            raise WorkerLost(
                f"step {order.scheduled.step} (record {position}) was answered when it was recorded; now the worker failed with "
                f"{type(error).__name__}: {error}"
            ) from error

    def _hire(self) -> Worker:
        """A worker like the recorded one."""
        assert self._hired is not None, "an order for a worker"
        started, config = self._hired
        worker = self._make_worker(config, started.environment)
        self._counts["workers"] += 1
        self._environment = worker.environment()
        differences = differences_between(started, worker)
        if differences and not self._any_environment:
            worker.close()
            raise OtherEnvironment(started.generation, differences)
        self._differences |= differences
        return worker

    def _differences_of(
        self, position: int, order: WorkOrder, output: StepOutput, answer: CameBack
    ) -> Iterator[Difference]:
        """Compare a step, entry by entry."""
        offset = 0
        for entry, handle in enumerate(order.scheduled.handles):
            count = output.counts[entry]
            tokens, digests = (column[offset : offset + count] for column in (output.token_ids, output.digests))
            offset += count
            place = (position, answer.step, entry, self._names[handle])
            yield from self._compare(place, output.positions[entry], answer.said[handle], Said(count, tokens, digests))

    def _compare(
        self, place: tuple[int, int, int, str], position: int, recorded: Said, found: Said
    ) -> Iterator[Difference]:
        """Compare an entry: the logits that come first decide what comes after."""
        for index, (was, now) in enumerate(zip(recorded.digests, found.digests, strict=False)):
            if is_placeholder(was):
                continue
            self._counts["rows"] += 1
            if was != now:
                self._counts["rows different"] += 1
                yield Difference("logits", *place, position + index, was, now)
        for index, (was, now) in enumerate(zip(recorded.token_ids, found.token_ids, strict=False)):
            self._counts["tokens"] += 1
            if was != now:
                yield Difference("token", *place, position + index, was, now)
        if recorded.num_tokens != found.num_tokens:
            yield Difference("count", *place, position, recorded.num_tokens, found.num_tokens)


def differences_between(started: WorkerStarted, worker: Worker) -> dict[str, tuple[str, str]]:
    """What tells a worker from the recorded one: name -> recorded, here."""
    was, now = {"kind": started.kind, **started.environment}, {"kind": worker.kind, **worker.environment()}
    return {
        name: (was.get(name, ""), now.get(name, "")) for name in sorted({*was, *now}) if was.get(name) != now.get(name)
    }
