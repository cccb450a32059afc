"""The group-commit writer: positions at once, durability in groups, one failure for everybody."""

import threading
import time

import pytest

from refold import migrations
from refold.journal.codec import decode, encode
from refold.journal.errors import Fenced, JournalError
from refold.journal.events import (
    OutputDelivered,
    RequestAborted,
    RequestFinished,
    RequestSubmitted,
    Sampling,
    StepScheduled,
)
from refold.journal.queued import Queued
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.stores.sql import SqlStore
from refold.journal.verify import verify_stream
from refold.journal.writer import MAX_GROUP_RECORDS, MAX_UNENCODED_RECORDS, JournalWriter
from tests.kit.engines import eventually


class GatedStore(MemoryStore):
    """A store whose disk is as slow as the test wants: an append waits for its gate."""

    def __init__(self, journal=None):
        super().__init__(journal)
        self.gate = threading.Event()
        self.gate.set()
        self.groups = []
        self.entered = threading.Event()

    def append(self, stream, records):
        self.entered.set()
        assert self.gate.wait(10)
        after = super().append(stream, records)
        self.groups.append(len(records))
        return after


def event(number, cause="test"):
    return [RequestAborted(handle=number, cause=cause)]


def written(store, **options):
    return JournalWriter(store, "main", store.open_stream(), **options)


def test_positions_are_given_at_once_and_durability_is_reported_in_order():
    store, durable = MemoryStore(), []
    writer = written(store, on_durable=durable.append)
    assert [writer.append(event(n), time_ns=100 + n) for n in range(50)] == list(range(50))
    assert writer.flush() == 50
    assert writer.close() == 50
    assert durable == sorted(durable)
    assert durable[-1] == 50 == writer.durable_position == writer.next_position
    assert verify_stream(store).position == 50
    assert [(decode(record), record.time_ns) for record in store.read()] == [(event(n), 100 + n) for n in range(50)]


def test_nothing_is_durable_before_the_store_says_so_and_what_piles_up_is_one_group():
    store, durable = GatedStore(), []
    writer = written(store, on_durable=durable.append, max_pending_records=100)
    store.gate.clear()
    writer.append(event(0), 1)
    assert store.entered.wait(10)
    began = time.perf_counter()
    for number in range(1, 100):
        assert writer.has_room
        writer.append(event(number), 1)
    assert time.perf_counter() - began < 1, "append waited for the disk"
    assert not writer.has_room
    assert (writer.pending, writer.durable_position, writer.next_position, durable) == (100, 0, 100, [])
    with pytest.raises(JournalError, match=r"100 records are not on disk after 0.01 s"):
        writer.flush(timeout_s=0.01)
    store.gate.set()
    assert writer.flush() == 100
    assert store.groups == [1, 99]
    assert (writer.pending, writer.has_room) == (0, True)
    writer.close()


def test_few_large_records_fill_the_room_as_well():
    store = GatedStore()
    writer = written(store, max_pending_bytes=100_000)
    store.gate.clear()
    for number in range(10):
        assert writer.has_room, f"{number} records of 10,000 bytes leave room"
        writer.append([RequestAborted(handle=number, cause="x" * 10_000)], 1)
    assert not writer.has_room
    store.gate.set()
    writer.flush()
    assert writer.has_room
    writer.close()


def test_a_clock_before_1970_is_a_clock():
    store = GatedStore()
    writer = written(store)
    writer.append(event(0), -5_000_000_000)
    writer.close()
    assert [record.time_ns for record in store.read()] == [-5_000_000_000]


def test_groups_are_bounded():
    store = GatedStore()
    writer = written(store)
    store.gate.clear()
    for number in range(2 * MAX_GROUP_RECORDS + 10):
        writer.append(event(number), 1)
    store.gate.set()
    assert writer.close() == 2 * MAX_GROUP_RECORDS + 10
    assert max(store.groups) <= MAX_GROUP_RECORDS
    assert verify_stream(store).position == sum(store.groups) == 2 * MAX_GROUP_RECORDS + 10


def test_it_carries_on_where_the_stream_ends():
    journal = MemoryJournal()
    for life in range(3):
        store = MemoryStore(journal)
        writer = written(store)
        assert writer.append(event(life), 1) == life
        writer.close()
    assert [record.engine_epoch for record in MemoryStore(journal).read()] == [1, 2, 3]
    assert verify_stream(MemoryStore(journal)).position == 3


def test_the_first_failure_is_everybodys_and_nothing_after_it_is_durable():
    journal = MemoryJournal()
    store, durable, failures = MemoryStore(journal), [], []
    writer = written(store, on_durable=durable.append, on_failed=failures.append)
    writer.append(event(0), 1)
    writer.flush()
    MemoryStore(journal).open_stream()
    writer.append(event(1), 1)
    with pytest.raises(Fenced) as caught:
        writer.flush()
    with pytest.raises(Fenced) as again:
        writer.append(event(2), 1)
    assert caught.value is again.value is writer.failure
    assert writer.close() == 1
    assert failures == [caught.value]
    assert durable == [1]
    assert verify_stream(MemoryStore(journal)).position == 1


def test_someone_who_waits_when_the_store_fails_is_told():
    journal = MemoryJournal()
    store = GatedStore(journal)
    writer = written(store)
    store.gate.clear()
    writer.append(event(0), 1)
    told = []

    def wait():
        try:
            writer.flush(timeout_s=10)
        except JournalError as error:
            told.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    MemoryStore(journal).open_stream()
    store.gate.set()
    waiter.join(10)
    assert [type(error) for error in told] == [Fenced]
    writer.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_stops_the_writer_with_its_reason():
    def broken(position):
        raise ValueError("from the callback")

    writer = written(MemoryStore(), on_durable=broken)
    writer.append(event(0), 1)
    writer.close()
    with pytest.raises(JournalError, match="from the callback") as caught:
        writer.append(event(1), 1)
    assert isinstance(caught.value.__cause__, ValueError)


def test_events_that_can_not_be_encoded_harm_nobody():
    store = MemoryStore()
    writer = written(store)
    writer.append(event(0), 1)
    with pytest.raises(UnicodeEncodeError):
        writer.append(event(1, cause="lone \ud800 surrogate"), 1)
    assert writer.append(event(1, cause="NUL \0 is fine"), 1) == 1
    assert writer.close() == 2
    assert [decode(record)[0].cause for record in store.read()] == ["test", "NUL \0 is fine"]


def test_a_prompt_is_recorded_as_it_was_when_it_was_appended():
    store, prompt = GatedStore(), [5, 6]
    writer = written(store)
    store.gate.clear()
    submitted = RequestSubmitted(
        handle=1, request_id="r", prompt_token_ids=prompt, sampling=Sampling(seed=1, max_tokens=4), arrival_ns=0
    )
    writer.append([submitted], 1)
    prompt.append(7)
    store.gate.set()
    writer.close()
    (record,) = store.read()
    assert decode(record)[0].prompt_token_ids == [5, 6]


STEP = StepScheduled(step=0, handles=[1], num_tokens=[1], first_positions=[0])


@pytest.mark.parametrize(
    "events",
    [
        [STEP],
        [OutputDelivered(step=0, handles=[1], token_ids=[7], first_output_indices=[0])],
        [RequestFinished(handle=1, reason="length", num_output_tokens=1)],
        [RequestFinished(handle=1, reason="error", num_output_tokens=1, message="NUL \0 is fine")],
        [STEP, *event(1)],
    ],
)
def test_a_record_is_the_same_whichever_thread_encodes_it(events):
    store = MemoryStore()
    writer = written(store)
    queued = Queued(events, 5)
    writer.append(events, 5)
    writer.close()
    (record,) = store.read()
    assert decode(record) == events
    assert record.body == queued.encoded().body == encode(events).body


def test_a_message_that_cannot_be_encoded_fails_where_it_is_appended():
    writer = written(MemoryStore())
    with pytest.raises(UnicodeEncodeError):
        writer.append([STEP, RequestFinished(handle=1, reason="error", num_output_tokens=1, message="\ud800")], 1)
    assert writer.append([STEP], 1) == 0
    assert writer.close() == 1


def test_a_writer_that_lags_behind_gets_records_that_are_encoded():
    store = GatedStore()
    writer = written(store)
    store.gate.clear()
    writer.append(event(0), 1)
    assert store.entered.wait(10), "from here on the thread waits for its store, and takes nothing"
    handles = [[1] for _ in range(MAX_UNENCODED_RECORDS + 100)]
    for column in handles:
        writer.append([StepScheduled(step=0, handles=column, num_tokens=[1], first_positions=[0])], 1)
    for column in handles[-30:]:
        column.append(2)  # what nobody may do, to see what was encoded before
    store.gate.set()
    writer.close()
    assert [decode(record)[0].handles for record in list(store.read())[-30:]] == [[1]] * 30


def test_records_of_steps_fill_the_room_that_there_is_before_they_are_encoded():
    store = GatedStore()
    writer = written(store, max_pending_bytes=10_000)
    store.gate.clear()
    wide = StepScheduled(step=0, handles=list(range(1, 201)), num_tokens=[1] * 200, first_positions=[0] * 200)
    writer.append([wide], 1)
    assert writer.has_room
    writer.append([wide], 1)
    writer.append([wide], 1)
    assert not writer.has_room
    store.gate.set()
    writer.flush()
    assert writer.has_room
    writer.close()


def test_closing_is_final_and_idempotent():
    store = MemoryStore()
    writer = written(store)
    assert writer.close() == writer.close() == 0
    with pytest.raises(JournalError, match="closed"):
        writer.append(event(0), 1)
    assert writer.flush() == 0
    assert "refold-journal" not in {thread.name for thread in threading.enumerate()}


def test_many_threads_append_to_one_chain():
    store = MemoryStore()
    writer = written(store)
    positions = [[] for _ in range(4)]

    def work(mine):
        for _ in range(500):
            mine.append(writer.append(event(0), 1))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in positions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close() == 2000
    assert sorted(position for mine in positions for position in mine) == list(range(2000))
    assert all(mine == sorted(mine) for mine in positions)
    assert verify_stream(store).position == 2000


def test_a_live_sqlite_journal_verifies_at_any_moment(tmp_path):
    path = str(tmp_path / "journal.db")
    migrations.ensure(path)
    store = SqlStore(path)
    durable = []
    writer = written(store, on_durable=durable.append)
    reader = open_reader(path)
    stop = time.monotonic() + 0.5
    checks = 0
    while time.monotonic() < stop:
        for _ in range(20):
            writer.append(event(0, cause="x" * 500), 1)
        known = durable[-1] if durable else 0
        assert verify_stream(reader).position >= known
        checks += 1
    end = writer.close()
    store.close()
    assert checks >= 3
    assert verify_stream(reader).position == end == durable[-1]


def test_a_busy_writer_keeps_the_wal_small(tmp_path):
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    store = SqlStore(str(path))
    writer = written(store)
    largest = 0
    for number in range(300):
        writer.append(event(number, cause="x" * 100_000), 1)
        if number % 10 == 9:
            writer.flush()
            largest = max(largest, path.with_name("journal.db-wal").stat().st_size)
    writer.close()
    store.close()
    assert path.stat().st_size > 30_000_000
    assert largest < 16_000_000


def test_an_idle_writer_empties_the_wal(tmp_path):
    path = tmp_path / "journal.db"
    migrations.ensure(str(path))
    store = SqlStore(str(path))
    writer = written(store)
    for _ in range(50):
        writer.append(event(0, cause="x" * 3000), 1)
    writer.flush()
    before = path.stat().st_size
    deadline = time.monotonic() + 10
    while path.stat().st_size < before + 150_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.stat().st_size >= before + 150_000
    assert writer.append(event(0), 1) == 50
    assert writer.close() == 51
    store.close()


def test_a_record_that_nobody_waits_for_goes_with_the_next_that_somebody_does(monkeypatch):
    monkeypatch.setattr("refold.journal.writer.MAX_PATIENCE_S", 30.0)
    store = GatedStore()
    writer = written(store)
    writer.append(event(0), 1, is_awaited=False)
    writer.append(event(1), 1, is_awaited=False)
    time.sleep(0.05)
    assert (writer.durable_position, store.groups) == (0, [])
    writer.append(event(2), 1)
    eventually(lambda: writer.durable_position == 3)
    writer.append(event(3), 1, is_awaited=False)
    assert writer.flush(timeout_s=10) == 4, "a flush is somebody who waits"
    assert store.groups == [3, 1]
    writer.append(event(4), 1, is_awaited=False)
    assert writer.close() == 5


def test_a_record_that_nobody_waits_for_doesn_t_wait_for_long():
    store = GatedStore()
    writer = written(store)
    writer.append(event(0), 1, is_awaited=False)
    eventually(lambda: writer.durable_position == 1)
    writer.close()
