"""A worker in a thread of its own: built there, fed orders in turn, closed there.

Everything a worker says comes back as a message in the engine's inbox, and each message names the thread it came from, so
that a worker given up on can't be mistaken for its successor. One order, one answer: a worker that answers another step
than it was asked, or with something that isn't an answer, is lost like one that raised.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from refold.engine.checked import short
from refold.engine.history.plain import is_unicode
from refold.engine.logs import get_logger
from refold.engine.messages import StepDone, WorkerFailed, WorkerMessage, WorkerReady
from refold.engine.order_queue import OrderQueue
from refold.gpu.batch import StepOutput, Worker, WorkOrder
from refold.journal.errors import WorkerLost
from refold.journal.surprisals import EntrySurprisals

CLOSE_PATIENCE_S = 30.0


class WorkerThread:
    """Builds a worker and executes orders in the order given. Every method returns at once, except `join`."""

    def __init__(
        self,
        make: Callable[[], Worker],
        post: Callable[[WorkerMessage], object],
        after: "WorkerThread | None" = None,
        control: Callable[[Worker], None] | None = None,
    ) -> None:
        """Start the thread. It waits for the end of `after`, so that two workers never share a device.

        `control`: what a worker must get through before it is ready (`refold.engine.control`).
        """
        self._make = make
        self._control = control
        self._post = post
        self._after = after
        self._orders = OrderQueue()
        self._thread = threading.Thread(target=self._run, name="refold-worker", daemon=True)
        self._thread.start()

    def send(self, order: WorkOrder) -> None:
        """Queue an order."""
        self._orders.put(order)

    def stop(self) -> None:
        """End after the step that runs now, if one does; orders still queued are not executed. Idempotent."""
        self._orders.close()

    def join(self, timeout_s: float = CLOSE_PATIENCE_S) -> bool:
        """Wait for the end of a stopped worker; False if it didn't come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        worker: Worker | None = None
        try:
            if self._after is not None and not self._after.join():
                get_logger().warning("worker_hangs", patience_s=CLOSE_PATIENCE_S)
            self._after = None
            worker = self._make()
            if self._control is not None:
                self._control(worker)
            self._post(WorkerReady(self, *introduction(worker)))
            self._orders.serve(worker)
            while (order := self._orders.take()) is not None:
                self._post(StepDone(answer(worker, order)))
                self._orders.done()
        except BaseException as error:  # noqa: BLE001 - whatever ends a worker, the engine must hear of it
            self._post(WorkerFailed(self, error))
        finally:
            if worker is not None:
                _close(worker)


def introduction(worker: Worker) -> tuple[str, dict[str, str]]:
    """The worker's kind and environment, which are journaled.

    Raises:
        WorkerLost: they aren't texts.
    """
    kind, environment = worker.kind, worker.environment()
    if not _is_text(kind):
        raise WorkerLost(f"the worker's kind is {short(kind)}: make it a text")
    if not isinstance(environment, Mapping):
        raise WorkerLost(f"the worker's environment() is a {type(environment).__name__}: return a dict of texts")
    for name, fact in environment.items():
        if not (_is_text(name) and _is_text(fact)):
            raise WorkerLost(f"the worker's environment() has {short(name)}: {short(fact)}: make both of them texts")
    return kind, dict(environment)


def _is_text(value: object) -> bool:
    """Whether it can be journaled as a text."""
    return isinstance(value, str) and is_unicode(value)


def answer(worker: Worker, order: WorkOrder) -> StepOutput:
    """The worker's answer to an order.

    Raises:
        WorkerLost: it isn't one. What it says is judged by the scheduler; here, only whether it is an answer at all.
    """
    output = worker.execute(order)
    if not isinstance(output, StepOutput):
        raise WorkerLost(f"worker answered step {order.scheduled.step} with a {type(output).__name__}, no StepOutput")
    if output.step != order.scheduled.step or output.generation != order.generation:
        raise WorkerLost(
            f"worker answered with step {output.step} of generation {output.generation}; "
            f"step {order.scheduled.step} of generation {order.generation} was asked"
        )
    output = _with_own_columns(output)
    for column in (output.counts, output.token_ids, output.positions, output.digests):
        if type(column) is not list or not set(map(type, column)) <= {int}:
            raise WorkerLost(f"worker answered step {output.step} with columns that are no lists of integers")
    for told in (output.logprobs, output.prompt_logprobs):
        if type(told) is not list or not all(map(_are_numbers, told)):
            raise WorkerLost(f"worker answered step {output.step} with log-probabilities that are no EntrySurprisals")
    if len(output.digests) not in {0, len(output.token_ids)}:
        raise WorkerLost(
            f"worker answered step {output.step} with {len(output.digests)} digests for {len(output.token_ids)} tokens"
        )
    return _with_own_numbers(output) if output.logprobs or output.prompt_logprobs else output


def _are_numbers(told: object) -> bool:
    return (
        type(told) is EntrySurprisals
        and {type(told.entry), type(told.num_top)} == {int}
        and type(told.surprisals) is list
        and set(map(type, told.surprisals)) <= {int}
    )


def _with_own_columns(output: StepOutput) -> StepOutput:
    """The answer with lists that the worker doesn't hold: what was checked is what is delivered and recorded later."""
    columns = {name: getattr(output, name) for name in output.__struct_fields__}
    own: dict[str, Any] = {name: column[:] for name, column in columns.items() if type(column) is list}
    return msgspec.structs.replace(output, **own)


def _with_own_numbers(output: StepOutput) -> StepOutput:
    """The same for what is inside of log-probabilities."""
    logprobs, prompt_logprobs = (
        [msgspec.structs.replace(told, surprisals=told.surprisals[:]) for told in column]
        for column in (output.logprobs, output.prompt_logprobs)
    )
    return msgspec.structs.replace(output, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _close(worker: Worker) -> None:
    try:
        worker.close()
    except Exception as error:  # noqa: BLE001 - it is gone either way
        get_logger().warning("worker_close_failed", error=repr(error))
