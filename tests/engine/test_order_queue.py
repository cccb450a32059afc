"""Orders in turn, given ahead where the worker takes them."""

import threading
import time

import pytest

from refold.engine.order_queue import OrderQueue
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.simulated import SimulatedWorker
from refold.journal.errors import WorkerLost
from refold.journal.events import StepScheduled
from tests.kit.worker_contract import config_for


class Foresighted(SimulatedWorker):
    """A worker of one's own that takes orders ahead, as many as it has room for."""

    def __init__(self, room: int) -> None:
        super().__init__(config_for())
        self.room = room
        self.given: list[int] = []

    def offer(self, order: WorkOrder) -> bool:
        if len(self.given) >= self.room:
            return False
        self.given.append(order.scheduled.step)
        return True

    def hand_over(self, order: WorkOrder) -> None:
        if order.scheduled.step not in self.given:
            self.given.append(order.scheduled.step)

    def execute(self, order: WorkOrder) -> StepOutput:
        assert self.given.pop(0) == order.scheduled.step, "orders come in turn"
        return StepOutput(step=order.scheduled.step, generation=1, counts=[], token_ids=[], positions=[])


def order(step: int) -> WorkOrder:
    scheduled = StepScheduled(step=step, handles=[0], num_tokens=[1], first_positions=[0])
    return WorkOrder(scheduled=scheduled, generation=1, admitted=[], released=[])


def test_given_a_worker_that_looks_ahead_when_orders_are_put_then_it_has_them_at_once():
    orders, worker = OrderQueue(), Foresighted(room=8)
    orders.serve(worker)
    for step in range(3):
        orders.put(order(step))
    assert worker.given == [0, 1, 2]
    for step in range(3):
        taken = orders.take()
        assert worker.execute(taken).step == step
        orders.done()


class Keeper(Foresighted):
    """A worker that keeps what it was given ahead, and knows it again."""

    def __init__(self) -> None:
        super().__init__(room=8)
        self.kept: list[WorkOrder] = []

    def offer(self, order: WorkOrder) -> bool:
        self.kept.append(order)
        return super().offer(order)


def test_a_worker_is_given_copies_and_in_its_turn_the_one_that_it_was_given_ahead():
    originals = [order(step) for step in range(4)]
    plain = OrderQueue()
    plain.put(originals[0])
    taken = plain.take()
    assert taken == originals[0]
    assert taken.scheduled.handles is not originals[0].scheduled.handles
    orders, worker = OrderQueue(), Keeper()
    for original in originals[:2]:  # before there is a worker
        orders.put(original)
    orders.serve(worker)
    for original in originals[2:]:
        orders.put(original)
    taken_in_turn = []
    for _ in originals:
        taken_in_turn.append(orders.take())
        orders.done()
    assert taken_in_turn == originals
    assert worker.kept
    for kept in worker.kept:
        assert any(kept is taken for taken in taken_in_turn)
    for taken, original in zip(taken_in_turn, originals, strict=True):
        assert taken.scheduled.handles is not original.scheduled.handles


@pytest.mark.parametrize("room", [0, 1, 2])
def test_given_too_little_room_then_orders_are_given_when_they_are_due_and_in_turn(room):
    orders, worker = OrderQueue(), Foresighted(room)
    orders.serve(worker)
    for step in range(5):
        orders.put(order(step))
    assert len(worker.given) == room
    for step in range(5):
        assert worker.execute(orders.take()).step == step
        orders.done()


def test_given_orders_from_before_there_was_a_worker_then_they_are_given_with_the_first():
    orders, worker = OrderQueue(), Foresighted(room=8)
    orders.put(order(0))
    orders.put(order(1))
    orders.serve(worker)
    assert orders.take().scheduled.step == 0
    assert worker.given == [0, 1]


def test_given_a_closed_queue_then_nothing_is_due_whatever_waits():
    orders = OrderQueue()
    orders.put(order(0))
    orders.close()
    orders.close()
    assert orders.take() is None


def test_given_nobody_who_puts_an_order_then_closing_ends_the_wait():
    orders = OrderQueue()
    threading.Timer(0.1, orders.close).start()
    assert orders.take() is None


def test_given_a_worker_that_takes_nothing_more_then_who_takes_the_order_hears_of_it_and_who_puts_one_does_not():
    class Gone(Foresighted):
        def hand_over(self, order: WorkOrder) -> None:
            raise WorkerLost("gone")

    orders = OrderQueue()
    orders.serve(Gone(room=0))
    orders.put(order(0))
    with pytest.raises(WorkerLost, match="gone"):
        orders.take()


def test_given_a_worker_slow_to_take_an_order_then_who_puts_the_next_does_not_wait():
    is_taking = threading.Event()

    class Slow(Foresighted):
        def hand_over(self, order: WorkOrder) -> None:
            is_taking.set()
            time.sleep(1.0)
            super().hand_over(order)

    orders, worker = OrderQueue(), Slow(room=0)
    orders.serve(worker)
    orders.put(order(0))
    taker = threading.Thread(target=orders.take)
    taker.start()
    is_taking.wait()
    start = time.monotonic()
    orders.put(order(1))
    assert time.monotonic() - start < 0.5
    taker.join()
