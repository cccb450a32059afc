"""The turn loop: one thread, one inbox, and every decision made in it.

A turn obeys one command: `decide` gives the events, the journal's writer queues them (it never waits for the disk), the fold
applies them, and each event's effect goes out: a work order to the worker, a reply to a client. Append before apply: if the
append fails, nothing has happened.

    inbox ──▶ command ──▶ decide ──▶ append ──▶ fold ──▶ effects
      ▲                                │                   │
      ├── "durable up to N" ◀── disk ◀─┘    worker ◀───────┘
      └── step outputs ◀────────────────────┘

Delivery trails: a record's events reach the outbox, and so the clients, when the writer has said that the record is
durable (`synced`), or when it is queued (`buffered`). Compute runs ahead of the disk, delivery doesn't.

What fails, fails alone. A client's command that can't be obeyed fails that client's reply; a lost worker is replaced and its
requests compute again; only a failed journal, a worker that dies again and again, or a broken law stops the engine.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, NamedTuple

import structlog

from refold.engine.delivery import Delivery
from refold.engine.messages import Ask, Durable, EngineStopped, JournalFailed, Stop, one_line, violation, worker_lost
from refold.engine.orders import Orders
from refold.engine.worker_thread import StepDone, WorkerFailed, WorkerReady, WorkerThread
from refold.gpu.batch import Worker
from refold.journal.errors import InvariantViolation, JournalError, RefoldError, Rejected, WorkerLost
from refold.journal.events import Event, StepScheduled
from refold.journal.writer import JournalWriter
from refold.projections.outbox import Output
from refold.projections.totals import Totals
from refold.scheduler.commands import (
    CloseEngine,
    Command,
    CompleteStep,
    LoseWorker,
    RecordDigest,
    ScheduleStep,
    StartWorker,
)
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State

log = structlog.get_logger("refold")

DIGEST_EVERY_RECORDS = 256
MAX_WORKER_LOSSES = 3
"""Workers lost one after the other, without a completed step between them, before the engine gives up."""

CLOSE_PATIENCE_S = 60.0

Durability = Literal["synced", "buffered"]


class _Trailing(NamedTuple):
    """A record that isn't known to be durable, and the client that waits for it."""

    position: int
    events: list[Event]
    ask: Ask | None


class _FoldBroken(Exception):
    """What was recorded can't be folded: the state is of no use any more, and no command may be tried on it."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(where)
        self.found = violation(where, error)


class EngineCore:
    """The engine's thread and all that it owns: state, journal writer, worker.

    Built and started by one thread; from then on only the engine's thread changes the state.
    """

    def __init__(
        self,
        state: State,
        delivery: Delivery,
        totals: Totals,
        make_worker: Callable[[], Worker],
        durability: Durability = "synced",
    ) -> None:
        self.state = state
        self.totals = totals
        self.delivery = delivery
        self.ready: Future[None] = Future()
        self.cause: RefoldError | None = None
        self._make_worker = make_worker
        self._durability = durability
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between `_put` and the end of the thread: no message is left unread
        self._is_over = False
        self._writer: JournalWriter | None = None
        self._worker: WorkerThread | None = None
        self._orders = Orders()
        self._trailing: deque[_Trailing] = deque()
        self._records_since_digest = 0
        self._losses: list[RefoldError] = []
        self._closing_until_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="refold-engine", daemon=True)
        self._receivers: dict[type, Callable[[Any], None]] = {
            Ask: self._asked,
            Durable: self._became_durable,
            JournalFailed: self._journal_failed,
            Stop: self._stop_asked,
            WorkerReady: self._worker_ready,
            StepDone: self._step_done,
            WorkerFailed: self._worker_failed,
        }

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self, writer: JournalWriter, opening: list[Command]) -> None:
        """Obey the `opening` commands in the caller's thread, then go live. `ready` is set when the first worker is.

        Raises:
            Rejected: an opening command can't be obeyed; the writer is still the caller's to close.
            JournalError: the writer failed.
        """
        self._writer = writer
        for command in opening:
            self._turn(command)
        self._worker = WorkerThread(self._make_worker, self._put)
        self._thread.start()

    def ask(self, ask: Ask) -> "Future[Output | None]":
        """Put a client's command into the inbox.

        Raises:
            RefoldError: the engine has stopped, and this is why.
        """
        if not self._put(ask):
            raise self._why_stopped()
        return ask.reply

    def on_durable(self, position: int) -> None:
        """The writer's callback."""
        self._put(Durable(position))

    def on_journal_failed(self, cause: JournalError) -> None:
        """The writer's callback."""
        self._put(JournalFailed(cause))

    def stop(self) -> None:
        """Ask the engine to finish what is in flight and to close. Idempotent."""
        self._put(Stop())

    def join(self) -> None:
        """Wait for the end of the engine's thread."""
        assert threading.current_thread() is not self._thread, "the engine would wait for itself"
        self._thread.join()

    @property
    def durable_position(self) -> int:
        """Every record before this position is on disk."""
        return 0 if self._writer is None else self._writer.durable_position

    def _put(self, message: object) -> bool:
        with self._lock:
            if not self._is_over:
                self._inbox.put(message)
            return not self._is_over

    def _why_stopped(self) -> RefoldError:
        if self.cause is not None:
            return self.cause.with_traceback(None)
        return EngineStopped("the engine is closed: open the journal again; what was unfinished continues then")

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._receive()
                self._schedule()
            self._close_in_order()
        except RefoldError as error:
            self.cause = error
        except _FoldBroken as broken:
            self.cause = broken.found
        except Exception as error:  # noqa: BLE001 - whatever it is, every client must hear of it
            self.cause = violation("the engine's loop", error)
        finally:
            self._end()

    def _receive(self) -> None:
        """Wait for a message, then take what else is there by now."""
        try:
            message = self._inbox.get(timeout=self._patience_s())
        except queue.Empty:
            return
        self._receivers[type(message)](message)
        for _ in range(self._inbox.qsize()):
            message = self._inbox.get_nowait()
            self._receivers[type(message)](message)

    def _schedule(self) -> None:
        """Fill the window, unless the disk is too far behind or the engine is closing."""
        assert self._writer is not None
        if self._closing_until_s is not None:
            return
        while self._writer.has_room:
            if self._guarded_turn(ScheduleStep()) is None:
                self._check_progress()
                break
        if self._records_since_digest >= DIGEST_EVERY_RECORDS:
            self._turn(RecordDigest())

    def _turn(self, command: Command, ask: Ask | None = None) -> int | None:
        """Obey one command; returns the position of its record, None if there was nothing to do."""
        events = decide(self.state, command)
        if not events:
            return None
        assert self._writer is not None
        position = self._writer.append(events, time.time_ns())
        self._apply(command, _Trailing(position, events, ask))
        return position

    def _apply(self, command: Command, record: _Trailing) -> None:
        try:
            fold_all(self.state, record.events)
        except Exception as error:
            raise _FoldBroken(f"record {record.position} ({type(command).__name__})", error) from error
        self._records_since_digest = 0 if isinstance(command, RecordDigest) else self._records_since_digest + 1
        self.totals.observe_all(record.events)
        for event in record.events:
            self._orders.observe(event)
            if isinstance(event, StepScheduled):
                assert self._worker is not None, "a step is scheduled for a worker"
                self._worker.send(self._orders.order(self.state, event))
        if self._durability == "buffered":
            self._hand_out(record)
        else:
            self._trailing.append(record)

    def _guarded_turn(self, command: Command) -> int | None:
        """A turn in which an exception of `decide` is a broken law: the engine closes its journal in order and stops."""
        try:
            return self._turn(command)
        except (RefoldError, _FoldBroken):
            raise
        except Exception as error:
            found = violation(type(command).__name__, error)
            self._turn(CloseEngine(reason=one_line(found)))
            raise found from error

    def _hand_out(self, record: _Trailing) -> None:
        self.delivery.deliver(record.events)
        if record.ask is not None:
            self._reply(record.ask)

    def _reply(self, ask: Ask) -> None:
        ask.reply.set_result(None if ask.request_id is None else self.delivery.find(ask.request_id))

    def _check_progress(self) -> None:
        """Nothing in flight, someone waits, nobody could be scheduled: nothing would ever happen. Say so."""
        state = self.state
        if state.window.in_flight or not state.worker_alive:
            return
        for request in (*state.queues.running, *state.queues.waiting):
            raise InvariantViolation(
                f"no step can be scheduled: request {request.request_id!r} has {len(request.tokens)} tokens, "
                f"{state.pool.num_free} of {state.pool.num_blocks} blocks are free; "
                "this is a bug of refold: keep the journal and report it"
            )

    # -- messages -----------------------------------------------------------------------------------------------------

    def _asked(self, ask: Ask) -> None:
        """Obey a client. Only its own reply hears of what goes wrong before anything is recorded."""
        if self._closing_until_s is not None:
            ask.reply.set_exception(self._why_stopped())
            return
        try:
            if self._turn(ask.make(self.state), ask) is None:
                self._reply(ask)
        except (JournalError, _FoldBroken) as error:
            ask.reply.set_exception(error if isinstance(error, JournalError) else error.found)
            raise
        except RefoldError as error:
            ask.reply.set_exception(error)
        except Exception as error:
            log.exception("command_failed", request=ask.request_id)
            ask.reply.set_exception(violation("this command", error))

    def _became_durable(self, message: Durable) -> None:
        trailing = self._trailing
        while trailing and trailing[0].position < message.position:
            self._hand_out(trailing.popleft())

    def _journal_failed(self, message: JournalFailed) -> None:
        raise message.cause

    def _stop_asked(self, message: Stop) -> None:  # noqa: ARG002
        if self._closing_until_s is None:
            self._closing_until_s = time.monotonic() + CLOSE_PATIENCE_S

    def _worker_ready(self, message: WorkerReady) -> None:
        if message.thread is not self._worker:
            return
        self._turn(StartWorker(kind=message.kind, environment=message.environment))
        if not self.ready.done():
            self.ready.set_result(None)

    def _step_done(self, message: StepDone) -> None:
        output = message.output
        command = CompleteStep(
            step=output.step,
            generation=output.generation,
            counts=output.counts,
            token_ids=output.token_ids,
            positions=output.positions,
        )
        try:
            self._guarded_turn(command)
        except Rejected as refused:
            log.info("output_refused", step=output.step, reason=str(refused))
        except WorkerLost as lost:
            self._lose_worker(lost)
        else:
            self._losses.clear()

    def _worker_failed(self, message: WorkerFailed) -> None:
        if message.thread is not self._worker:
            return
        lost = worker_lost(message.cause)
        if not self.ready.done():
            raise lost
        self._lose_worker(lost)

    def _lose_worker(self, cause: RefoldError) -> None:
        """Journal the loss and start a successor, unless this happens again and again."""
        log.warning("worker_lost", reason=str(cause), steps=[step.step for step in self.state.window.in_flight])
        assert self._worker is not None
        self._turn(LoseWorker(reason=one_line(cause)))
        self._worker.stop()
        self._orders.forget()
        self._losses.append(cause)
        if len(self._losses) >= MAX_WORKER_LOSSES:
            raise self._losses[0]
        self._worker = WorkerThread(self._make_worker, self._put, after=self._worker)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        if self._closing_until_s is None:
            return False
        if self.state.window.in_flight and time.monotonic() >= self._closing_until_s:
            self._turn(LoseWorker(reason=f"no answer for {CLOSE_PATIENCE_S:.0f} s while the engine was closing"))
        return not self.state.window.in_flight

    def _patience_s(self) -> float | None:
        if self._closing_until_s is None:
            return None
        return max(0.0, self._closing_until_s - time.monotonic())

    def _close_in_order(self) -> None:
        assert self._writer is not None
        self._turn(RecordDigest())
        self._turn(CloseEngine(reason="closed"))
        self._writer.flush()

    def _end(self) -> None:
        """The thread's last act: what is durable goes out, everyone who waits is told, everything owned is freed."""
        assert self._writer is not None
        assert self._worker is not None
        with self._lock:
            self._is_over = True
        self._worker.stop()
        try:
            self._became_durable(Durable(self._writer.close()))
        except Exception as error:  # noqa: BLE001 - the others must still be told
            self.cause = self.cause or violation("the last delivery", error)
        cause = self._why_stopped()
        if self.cause is not None:
            log.error("engine_stopped", reason=str(cause), position=self._writer.durable_position)
        self.delivery.fail(cause)
        left = [record.ask for record in self._trailing if record.ask is not None]
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, Ask):
                left.append(message)
        for ask in left:
            ask.reply.set_exception(cause)
        if not self.ready.done():
            self.ready.set_exception(cause)
        self._worker.join()
