"""The orders of one worker, in turn.

A worker that computes in a process of its own would wait between two steps for its answer to be read, the next order to be
looked for, and sent: half a millisecond, which at a batch of one is a few percent of a step. So whoever puts an order here gives it to
such a worker at once if all orders before it are given too and no waiting is needed; the socket keeps it until its turn. An order
that couldn't be given ahead is given when it is due.

A worker gets a copy. The event in an order is the journal's, which may not have written it yet, and the state's.
"""

import threading
from collections import deque

from refold.gpu.batch import TakesAhead, Worker, WorkOrder, unshared


class OrderQueue:
    """`put` and `close` are for the engine's thread and never wait; `serve`, `take` and `done` for the worker's."""

    def __init__(self) -> None:
        self._orders: deque[WorkOrder] = deque()
        self._num_given = 0  # of the first ones
        self._ahead: TakesAhead | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._giving = threading.Lock()

    def serve(self, worker: Worker) -> None:
        """The orders are this worker's."""
        with self._changed:
            self._ahead = worker if isinstance(worker, TakesAhead) else None
            if self._ahead is not None:
                self._orders = deque(map(unshared, self._orders))

    def put(self, order: WorkOrder) -> None:
        """Queue an order, and give it ahead if it can be."""
        with self._changed:
            self._orders.append(order if self._ahead is None else unshared(order))
            self._changed.notify()
        if self._ahead is not None and self._giving.acquire(blocking=False):
            try:
                self._offer(self._ahead)
            finally:
                self._giving.release()

    def close(self) -> None:
        """No order is due any more, whatever is queued. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self) -> WorkOrder | None:
        """Wait for the order that is due; None if the queue is closed. What the worker raises goes on to the caller."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders or self._is_closed)
            if self._is_closed:
                return None
            order = self._orders[0]
        if self._ahead is not None:
            with self._giving:
                self._ahead.hand_over(order)
                self._num_given = self._num_given or 1
                self._offer(self._ahead)
            return order
        return unshared(order)

    def done(self) -> None:
        """The order that was taken is executed."""
        with self._giving:
            self._orders.popleft()
            if self._ahead is not None:
                self._num_given -= 1

    def _offer(self, worker: TakesAhead) -> None:
        while self._num_given < len(self._orders) and worker.offer(self._orders[self._num_given]):
            self._num_given += 1
