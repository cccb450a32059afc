"""The delivery and its trail by themselves: who is rung, for what, and what becomes of whom if something fails."""

from collections.abc import Callable

import pytest

from refold.engine.delivery import Delivery, Reader, Trail
from refold.engine.messages import Ask
from refold.journal.errors import JournalError
from refold.journal.events import OutputDelivered, RequestFinished, RequestSubmitted, Sampling
from refold.projections.outbox import Outbox
from refold.scheduler.commands import CloseEngine


def delivery_with(request_id: str) -> Delivery:
    delivery = Delivery(Outbox())
    sampling = Sampling(seed=0, max_tokens=9)
    delivery.deliver(
        0, [RequestSubmitted(handle=1, request_id=request_id, prompt_token_ids=[1], sampling=sampling, arrival_ns=0)]
    )
    return delivery


def attach(delivery: Delivery, ring: Callable[[Reader], None]) -> Reader:
    output = delivery.find("a")
    assert output is not None
    return delivery.attach(output, 0, ring)


def token(index: int) -> OutputDelivered:
    return OutputDelivered(step=index, handles=[1], token_ids=[index + 50], first_output_indices=[index])


def test_who_comes_looks_before_it_waits_and_is_not_rung_for_what_it_finds() -> None:
    delivery, rings = delivery_with("a"), []
    reader = attach(delivery, rings.append)
    delivery.deliver(1, [token(0)])
    assert rings == []
    chunk = delivery.take(reader)
    assert chunk is not None
    assert chunk.token_ids == [50]
    delivery.deliver(2, [token(1)])
    assert rings == [reader]


def test_a_reader_is_rung_once_until_it_looks() -> None:
    delivery, rings = delivery_with("a"), []
    reader = attach(delivery, rings.append)
    delivery.take(reader)
    for index in range(5):
        delivery.deliver(1, [token(index)])
    assert len(rings) == 1
    chunk = delivery.take(reader)
    assert chunk is not None
    assert (chunk.index, chunk.token_ids) == (0, [50, 51, 52, 53, 54])
    assert delivery.take(reader) is None


def test_a_reader_that_finds_tokens_and_the_engine_s_end_at_one_ring_hears_of_both() -> None:
    delivery, rings = delivery_with("a"), []
    reader = attach(delivery, rings.append)
    assert delivery.take(reader) is None
    delivery.deliver(1, [token(0)])
    delivery.fail(JournalError("the disk is full"))
    assert len(rings) == 1
    assert delivery.take(reader) is not None
    assert len(rings) == 2
    with pytest.raises(JournalError, match="the disk is full"):
        delivery.take(reader)


def test_a_ring_that_fails_loses_its_reader_and_no_other() -> None:
    def fails(reader: Reader) -> None:
        raise RuntimeError("Event loop is closed")

    delivery, rings = delivery_with("a"), []
    lost, reader = attach(delivery, fails), attach(delivery, rings.append)
    for each in (lost, reader):
        assert delivery.take(each) is None
    delivery.deliver(1, [token(0)])
    assert rings == [reader]
    delivery.take(reader)
    delivery.deliver(2, [token(1)])
    assert rings == [reader, reader]


def asked(request_id: str) -> Ask:
    return Ask(lambda _: CloseEngine(reason="not obeyed here"), request_id)


def test_a_client_that_gets_its_reply_finds_all_that_arrived_with_it() -> None:
    delivery, ask, seen = delivery_with("a"), asked("a"), list[int]()
    ask.reply.add_done_callback(lambda reply: seen.extend(reply.result().token_ids))
    trail = Trail(delivery, is_synced=True)
    trail.add(1, [token(0)], ask)
    trail.add(2, [token(1)], None)
    trail.add(3, [token(2)], None)
    trail.became_durable(3)
    assert seen == [50, 51]


def test_a_client_whose_record_can_t_be_delivered_is_still_waiting() -> None:
    delivery, first, second = delivery_with("a"), asked("a"), asked("a")
    trail = Trail(delivery, is_synced=True)
    trail.add(1, [token(0)], first)
    trail.add(2, [token(7)], second)
    with pytest.raises(AssertionError, match="index 7, expected 1"):
        trail.became_durable(3)
    assert first.reply.done()
    assert trail.asks() == [second]


def test_the_outbox_refuses_a_gap_a_repeat_and_a_token_after_the_end() -> None:
    for index in (1, -1):
        with pytest.raises(AssertionError):
            delivery_with("a").deliver(1, [token(index)])
    delivery = delivery_with("a")
    delivery.deliver(1, [token(0)])
    with pytest.raises(AssertionError, match="index 0, expected 1"):
        delivery.deliver(1, [token(0)])
    delivery.deliver(1, [RequestFinished(handle=1, reason="stop", num_output_tokens=1)])
    with pytest.raises(AssertionError, match="after its end"):
        delivery.deliver(1, [token(1)])
