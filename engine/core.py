"""The turn loop: one thread, one inbox, and every decision made in it.

A turn (`turns.py`) obeys one command: `decide` gives the events, the journal's writer queues them (it never waits for the
disk), the fold applies them, and each event's effect goes out: a work order to the worker, a reply to a client.

    inbox ──▶ command ──▶ decide ──▶ append ──▶ fold ──▶ effects
      ▲                                │                   │
      ├── "durable up to N" ◀── disk ◀─┘    worker ◀───────┘
      └── step outputs ◀────────────────────┘

Delivery trails: a record's events reach the outbox, and so the clients, when the writer has said that the record is
durable (`synced`), or when it is queued (`buffered`). Compute runs ahead of the disk, delivery doesn't.

What fails, fails alone. A client's command that can't be obeyed fails that client's reply; a lost worker is replaced and its
requests compute again; only a failed journal, a worker that dies again and again, or a broken law stops the engine.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from refold.engine.delivery import Delivery, Trail
from refold.engine.idleness import IdleLimit
from refold.engine.inbox import Inbox
from refold.engine.logs import get_logger
from refold.engine.messages import (
    CLOSED,
    Ask,
    Durable,
    EngineStopped,
    JournalFailed,
    Look,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerReady,
    one_line,
    violation,
    worker_lost,
)
from refold.engine.slow_step import why_slow
from refold.engine.stall import stall
from refold.engine.turns import FoldBroken, Turns
from refold.engine.worker_seat import WorkerSeat
from refold.gpu.batch import Worker
from refold.journal.errors import JournalError, RefoldError, Rejected, WorkerLost
from refold.journal.writer import JournalWriter
from refold.projections.outbox import Output
from refold.projections.totals import Totals
from refold.scheduler.commands import (
    CloseEngine,
    Command,
    CompleteStep,
    FailRequest,
    LoseWorker,
    RecordDigest,
    ScheduleStep,
    StartWorker,
)
from refold.scheduler.state import State

DIGEST_EVERY_RECORDS = 256
CLOSE_PATIENCE_S = 60.0

Durability = Literal["synced", "buffered"]
T = TypeVar("T")


class EngineCore:
    """The engine's thread and all that it owns: state, journal writer, worker.

    Built and started by one thread; from then on only the engine's thread changes the state.

    Attributes:
        ready: done when the first worker is, or with the error that kept it from that.
        cause: why the engine has failed; None while it hasn't.
    """

    def __init__(
        self,
        state: State,
        delivery: Delivery,
        totals: Totals,
        make_worker: Callable[[], Worker],
        durability: Durability = "synced",
        session_idle_s: float | None = None,
        journal: str = "memory:",
    ) -> None:
        self.state = state
        self.totals = totals
        self.delivery = delivery
        self.ready: Future[None] = Future()
        self.cause: RefoldError | None = None
        self._inbox = Inbox()
        self._seat = WorkerSeat(make_worker, self._inbox.put)
        self._trail = Trail(delivery, is_synced=durability == "synced")
        self._turns = Turns(state, totals, self._seat, self._trail)
        self._first_handle = 0
        self._idle_limit = IdleLimit(session_idle_s, time.time_ns())
        self._closing_until_s: float | None = None
        self._close_reason = CLOSED
        self._log = get_logger(journal=journal)
        self._thread = threading.Thread(target=self._run, name="refold-engine", daemon=True)
        self._receivers: dict[type, Callable[[Any], None]] = {
            Ask: self._asked,
            Look: self._looked,
            Durable: self._became_durable,
            JournalFailed: self._journal_failed,
            Stop: self._stop_asked,
            WorkerReady: self._worker_ready,
            StepDone: self._step_done,
            WorkerFailed: self._worker_failed,
        }

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self, writer: JournalWriter, opening: list[Command]) -> None:
        """Obey the `opening` commands in the caller's thread, then go live.

        Raises:
            Rejected: an opening command can't be obeyed; the writer is still the caller's to close.
            JournalError: the writer failed.
        """
        self._turns.begin(writer)
        for command in opening:
            self._turns.take(command)
        self._first_handle = self.state.requests.next_handle
        self._seat.fill(self.state)
        self._thread.start()

    def ask(self, ask: Ask) -> "Future[Output | None]":
        """Put a client's command into the inbox.

        Raises:
            RefoldError: the engine has stopped, and this is why.
        """
        if not self._inbox.put(ask):
            raise self.why_stopped()
        return ask.reply

    def look(self, read: Callable[[State], T]) -> "Future[T]":
        """Put a client's question about the state into the inbox. Raises as `ask`."""
        look = Look(read)
        if not self._inbox.put(look):
            raise self.why_stopped()
        return look.reply

    def on_durable(self, position: int) -> None:
        """The writer's callback."""
        self._inbox.put(Durable(position))

    def on_journal_failed(self, cause: JournalError) -> None:
        """The writer's callback."""
        self._inbox.put(JournalFailed(cause))

    def stop(self, reason: str) -> None:
        """Ask the engine to finish what is in flight and to close. Idempotent: the first reason counts."""
        self._inbox.put(Stop(reason))

    def join(self) -> None:
        """Wait for the end of the engine's thread."""
        assert threading.current_thread() is not self._thread, "the engine would wait for itself"
        self._thread.join()

    @property
    def durable_position(self) -> int:
        """Every record before this position is on disk."""
        return self._writer.durable_position

    def catch_up(self) -> int:
        """Wait, in a client's thread, until the outbox has all that is decided now, and the disk; returns that position.

        The durable position alone doesn't tell what the outbox has: it learns of a record a moment after the disk has it.

        Raises:
            RefoldError: the engine stopped before that.
        """
        position = self._writer.next_position
        self.delivery.reach(position)
        self.settle()
        return position

    def settle(self) -> int:
        """Wait until all that was decided is on disk; returns the durable position.

        Raises:
            JournalError: it never will be.
        """
        return self._writer.flush()

    @property
    def erasure_left(self) -> str:
        """Where the bytes of the last erasure may still be; empty if they are gone."""
        return self._writer.erasure_left

    def why_stopped(self) -> RefoldError:
        """What to tell whoever asks an engine that has stopped."""
        if self.cause is not None:
            return self.cause.with_traceback(None)
        return EngineStopped("the engine is closed: open the journal again; what was unfinished continues then")

    # -- turns --------------------------------------------------------------------------------------------------------

    @property
    def _writer(self) -> JournalWriter:
        return self._turns.writer

    def _run(self) -> None:
        try:
            self._obey_until_done()
            self._close_in_order()
        except RefoldError as error:
            self.cause = error
        except FoldBroken as broken:
            self.cause = broken.found
        except Exception as error:  # noqa: BLE001 - whatever it is, every client must hear of it
            self.cause = violation("the engine's loop", error)
        finally:
            self._end()

    def _obey_until_done(self) -> None:
        """Turn after turn. Where a worker can't be had the state is sound: the journal is told why the engine ends."""
        try:
            while not self._is_done():
                for message in self._inbox.wait(self._wake_at_s()):
                    self._receivers[type(message)](message)
                self._schedule()
        except (WorkerLost, Rejected) as error:
            self._turns.take(CloseEngine(reason=one_line(error)))
            raise

    def _wake_at_s(self) -> float | None:
        """When to go on though nobody writes, on the clock of `time.monotonic`; None for never."""
        if self._closing_until_s is not None:
            return self._closing_until_s
        left_s = self._idle_limit.seconds_left(self.state, time.time_ns())
        return None if left_s is None else time.monotonic() + left_s

    def _schedule(self) -> None:
        """Close idle sessions and fill the window, unless the disk is too far behind or the engine is closing."""
        if self._closing_until_s is not None:
            return
        if (command := self._idle_limit.overdue(self.state, time.time_ns())) is not None:
            self._turns.take(command)
        while self._writer.has_room:
            if self._turns.take_lawful(ScheduleStep()) is None:
                if (report := stall(self.state)) is not None:
                    raise report
                break
        if self._turns.records_since_digest >= DIGEST_EVERY_RECORDS:
            self._turns.take(RecordDigest())

    # -- messages -----------------------------------------------------------------------------------------------------

    def _asked(self, ask: Ask) -> None:
        """Obey a client. Only its own reply hears of what goes wrong before anything is recorded."""
        if self._closing_until_s is not None:
            ask.reply.set_exception(self.why_stopped())
            return
        try:
            if self._turns.take(ask.make(self.state), ask) is None:
                self._trail.reply(ask)
        except (JournalError, FoldBroken) as error:
            if not ask.reply.done():
                ask.reply.set_exception(error if isinstance(error, JournalError) else error.found)
            raise
        except RefoldError as error:
            ask.reply.set_exception(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours in one command is not everybody's end
            self._log.exception("command_failed", request=ask.request_id)
            ask.reply.set_exception(violation("this command", error))

    def _looked(self, look: Look) -> None:
        """Answer a client's question; one that fails is nobody else's."""
        if self._closing_until_s is not None:
            look.reply.set_exception(self.why_stopped())
            return
        try:
            look.reply.set_result(look.read(self.state))
        except Exception as error:  # noqa: BLE001 - a bug of ours in one answer is not everybody's end
            look.reply.set_exception(violation("this question", error))

    def _became_durable(self, message: Durable) -> None:
        self._trail.became_durable(message.position)

    def _journal_failed(self, message: JournalFailed) -> None:
        raise message.cause

    def _stop_asked(self, message: Stop) -> None:
        if self._closing_until_s is None:
            self._closing_until_s, self._close_reason = time.monotonic() + CLOSE_PATIENCE_S, message.reason

    def _worker_ready(self, message: WorkerReady) -> None:
        if not self._seat.sits(message.thread):
            return
        self._turns.take(StartWorker(kind=message.kind, environment=message.environment))
        if not self.ready.done():
            self._tell_if_slow(message.environment)
            self.ready.set_result(None)

    def _tell_if_slow(self, environment: Mapping[str, str]) -> None:
        if (slow := why_slow(environment)) is not None:
            self._log.warning("worker_slow", reason=slow[0], hint=slow[1])

    def _step_done(self, message: StepDone) -> None:
        output = message.output
        command = CompleteStep(
            step=output.step,
            generation=output.generation,
            counts=output.counts,
            token_ids=output.token_ids,
            positions=output.positions,
            time_ns=time.time_ns(),
            digests=output.digests,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
        )
        try:
            self._turns.take_lawful(command)
        except Rejected as refused:
            self._log.info("output_refused", step=output.step, reason=str(refused))
        except WorkerLost as lost:
            self._lose_worker(lost)
        else:
            self._seat.completed()

    def _worker_failed(self, message: WorkerFailed) -> None:
        if not self._seat.sits(message.thread):
            return
        lost = worker_lost(message.cause)
        if self.ready.done():
            self._lose_worker(lost)
            return
        if self._closing_until_s is not None:  # nobody wants it any more, and so it was ended
            return
        if isinstance(lost, Rejected):
            self._refuse_newcomers(lost)
        raise lost

    def _refuse_newcomers(self, cause: Rejected) -> None:
        """The model is unfit: what was submitted while it was loaded ends here. Older requests wait for a model that is fit."""
        for request in self.state.requests.live():
            if request.handle >= self._first_handle:
                self._turns.take(FailRequest(request_id=request.request_id, message=one_line(cause)))

    def _lose_worker(self, cause: RefoldError) -> None:
        """Journal the loss, and give the seat to a successor."""
        steps, num_quarantined = (
            [step.step for step in self.state.window.in_flight],
            len(self.state.suspicion.quarantined),
        )
        position = self._turns.take(LoseWorker(reason=one_line(cause), by_step=True))
        if position is None:  # it held nothing yet: there is nothing to record but that another is tried
            self._log.warning("worker_not_started", reason=one_line(cause))
        else:
            self._log.warning("worker_lost", reason=one_line(cause), steps=steps, position=position)
        is_found = len(self.state.suspicion.quarantined) > num_quarantined
        self._seat.replace(self.state, cause, died_at_work=bool(steps), is_found=is_found)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        if self._closing_until_s is None:
            return False
        if self.state.window.in_flight and time.monotonic() >= self._closing_until_s:
            self._turns.take(LoseWorker(reason=f"no answer for {CLOSE_PATIENCE_S:.0f} s while the engine was closing"))
        return not self.state.window.in_flight

    def _close_in_order(self) -> None:
        self._turns.take(RecordDigest())
        self._turns.take(CloseEngine(reason=self._close_reason))
        self._writer.flush()

    def _end(self) -> None:
        """The thread's last act: what is durable goes out, everyone who waits is told, everything owned is freed."""
        self._seat.stop()
        try:
            self._trail.became_durable(self._writer.close())
        except Exception as error:  # noqa: BLE001 - the others must still be told
            self.cause = self.cause or violation("the last delivery", error)
        replies = [ask.reply for ask in self._trail.asks()]
        replies += [message.reply for message in self._inbox.close() if isinstance(message, Ask | Look)]
        cause = self.why_stopped()
        if self.cause is not None:
            self._log.error("engine_stopped", reason=one_line(cause), position=self._writer.durable_position)
        self.delivery.fail(cause)
        for reply in replies:
            reply.set_exception(cause)
        if not self.ready.done():
            self.ready.set_exception(cause)
        self._seat.join()
