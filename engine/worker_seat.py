"""The worker's seat: one worker sits in it at a time, and gets the orders.

Orders follow from events (`work_orders.py`). A worker that is lost gives the seat up to a new one, which starts with empty
slots; too many lost one after the other, and the first of their causes is the engine's end.
"""

from collections.abc import Callable

from refold.engine.control import ControlFailed, control_for
from refold.engine.messages import WorkerMessage
from refold.engine.work_orders import OrderBook
from refold.engine.worker_thread import WorkerThread
from refold.gpu.batch import Worker
from refold.journal.errors import RefoldError
from refold.journal.events import Event
from refold.scheduler.state import State

MAX_LOSSES = 3
"""Workers lost one after the other, without a completed step between them, before the engine gives up: of those that died
with nothing to do."""

MAX_LOSSES_AT_WORK = 16
"""Of those that died at a step: as many as it may take to find the request that kills them."""

MAX_VERDICTS = 4
"""Requests found to kill the worker, one after the other, without a completed step between them, though whoever was above
suspicion ran in between: then it's the device."""


class WorkerSeat:
    """Used by the engine's thread only."""

    __slots__ = ("_losses", "_make", "_num_idle_losses", "_num_verdicts", "_orders", "_post", "_thread")

    def __init__(self, make: Callable[[], Worker], post: Callable[[WorkerMessage], object]) -> None:
        self._make = make
        self._post = post
        self._thread: WorkerThread | None = None
        self._orders = OrderBook()
        self._losses: list[RefoldError] = []
        self._num_idle_losses = 0
        self._num_verdicts = 0

    def fill(self, state: State) -> None:
        """Start a worker; one that had the seat before is stopped first. `WorkerReady` or `WorkerFailed` will come.

        If somebody is on trial, it must get through a made-up step first.
        """
        if self._thread is not None:
            self._thread.stop()
        self._orders.forget()
        self._thread = WorkerThread(self._make, self._post, after=self._thread, control=control_for(state))

    def sits(self, thread: object) -> bool:
        """Whether this is the thread of the worker that has the seat now."""
        return thread is self._thread

    def observe(self, state: State, event: Event) -> None:
        """Send the order that follows from an event, if one does. The event's whole record is folded already."""
        order = self._orders.order(state, event)
        if order is not None:
            assert self._thread is not None, "a step is scheduled for a worker"
            self._thread.send(order)

    def completed(self) -> None:
        """The worker has completed a step: it is no hopeless case."""
        self._losses.clear()
        self._num_idle_losses = self._num_verdicts = 0

    def replace(self, state: State, cause: RefoldError, *, died_at_work: bool, is_found: bool) -> None:
        """The worker is lost: start another. `is_found`: what killed it was found out just now, and won't again.

        Raises:
            RefoldError: the first cause, or that it fails whatever it is given, if this has happened too often.
        """
        self._losses.append(cause)
        self._num_idle_losses += not died_at_work
        self._num_verdicts += is_found
        is_hopeless = self._num_idle_losses >= MAX_LOSSES or self._num_verdicts >= MAX_VERDICTS
        if is_hopeless or len(self._losses) >= MAX_LOSSES_AT_WORK:
            raise cause if isinstance(cause, ControlFailed) else self._losses[0]
        self.fill(state)

    def stop(self) -> None:
        """Let the worker end after the step that it is at."""
        if self._thread is not None:
            self._thread.stop()

    def join(self) -> None:
        """Wait for a stopped worker, for as long as one waits."""
        if self._thread is not None:
            self._thread.join()
