"""What became of an append is found out, never guessed: connections cut at every place, servers that crash, locks, deadlocks."""

import itertools
import threading
import time

import pytest

from refold.journal.errors import Fenced, JournalError
from refold.journal.record import EMPTY_HEAD
from refold.journal.stores import open_reader
from refold.journal.stores.sql import SqlStore
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream
from tests.kit.cutting_proxy import ANSWERED, SENT, CuttingProxy, message_ends


@pytest.fixture
def proxy(postgres_server):
    proxy = CuttingProxy(f"{postgres_server.socket_folder}/.s.PGSQL.5432")
    yield proxy
    proxy.close()


@pytest.fixture
def cut_url(proxy, postgres_url):
    schema = postgres_url.rpartition("options=")[2]
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable&options={schema}"


@pytest.fixture
def store(cut_url):
    store = SqlStore(cut_url)
    yield store
    store.close()


@pytest.fixture
def foreign(postgres_server, postgres_url):
    with postgres_server.connect(postgres_url) as connection:
        yield connection


@pytest.fixture
def waiting(postgres_server, postgres_url):
    """The server processes that wait for a lock. Asked outside any transaction: inside one, the answer stands still."""
    with postgres_server.connect(postgres_url) as watcher:
        sql = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        yield lambda: [pid for (pid,) in watcher.execute(sql)]


def measured(store, proxy, head, count):
    """One append on a new connection: the head after it, and what both sides said."""
    store._database.drop_writer()
    store._database.writing()
    with proxy.counting() as counted:
        head = store.append("main", make_records(head, count))
        return head, {side: bytes(passed) for side, passed in counted.items()}


def places(said, direction, stride):
    """Where to cut: around the end of every message, and every so many bytes."""
    size = len(said[direction])
    near = {end + off for end in [0, *message_ends(said[direction])] for off in (-1, 0, 1)}
    return sorted(place for place in near | set(range(0, size, stride)) if 0 <= place < size)


@pytest.mark.parametrize("count", [1, 3])
def test_cut_anywhere_in_the_request_or_the_answer_nothing_is_lost_and_nothing_twice(store, proxy, postgres_url, count):
    head, said = measured(store, proxy, store.open_stream(), count)
    cuts = [(SENT, place) for place in places(said, SENT, 53 if count == 1 else 149)]
    cuts += [(ANSWERED, place) for place in places(said, ANSWERED, 1 if count == 1 else 7)]
    reader = open_reader(postgres_url)
    for number, (direction, place) in enumerate(cuts, 1):
        store._database.drop_writer()
        store._database.writing()
        records = make_records(head, count)
        proxy.arm(direction, place)
        head = store.append("main", records)
        assert proxy.num_cuts == number, f"nothing was cut at byte {place} {direction}"
        assert list(reader.read(start=records[0].position)) == records
    assert len(cuts) > 20
    assert verify_stream(reader) == head
    assert head.position == count * (len(cuts) + 1)
    reader.close()


def test_every_cut_while_a_stream_is_opened_leaves_a_stream_that_can_be_opened(proxy, cut_url, postgres_url):
    first = SqlStore(postgres_url)
    head = first.append("main", make_records(first.open_stream(), 2))
    first.close()
    store = SqlStore(cut_url)
    store._database.writing()
    with proxy.counting() as counted:
        epochs = [store.open_stream().engine_epoch]
        said = {side: bytes(passed) for side, passed in counted.items()}
    store.close()
    assert b"COMMIT" in said[SENT]
    commit = said[SENT].index(b"COMMIT")
    cuts = [(SENT, place) for place in range(commit - 10, len(said[SENT]), 3)]
    cuts += [(ANSWERED, place) for place in range(len(said[ANSWERED]) - 24, len(said[ANSWERED]), 3)]
    for number, (direction, place) in enumerate(cuts, 1):
        store = SqlStore(cut_url)
        store._database.writing()
        proxy.arm(direction, place)
        with pytest.raises(JournalError, match=r"check that the server runs"):
            store.open_stream()
        assert proxy.num_cuts == number
        epochs.append(store.open_stream().engine_epoch)
        assert 1 <= epochs[-1] - epochs[-2] <= 2
        store.close()
    assert {later - earlier for earlier, later in itertools.pairwise(epochs)} == {1, 2}, "no cut fell around the commit"
    assert verify_stream(open_reader(postgres_url)) == head


def test_a_statement_whose_client_is_gone_may_still_get_in_and_counts_once(
    store, proxy, foreign, waiting, postgres_url
):
    """The server works on while we ask again: both attempts wait for the same row, and the first one makes it."""
    head = store.append("main", make_records(store.open_stream(), 1))
    foreign.execute("BEGIN")
    foreign.execute("SELECT FROM journal_streams FOR UPDATE")
    records, answers = make_records(head, 2), []
    appender = threading.Thread(target=lambda: answers.append(store.append("main", records)))
    appender.start()
    wait_until(waiting)
    (ghost,) = waiting()
    proxy.cut_clients()
    wait_until(lambda: len(waiting()) == 2)
    assert ghost in waiting()
    foreign.execute("COMMIT")
    appender.join(20)
    assert [answer.position for answer in answers] == [3]
    reader = open_reader(postgres_url)
    assert list(reader.read(start=1)) == records
    after = store.append("main", make_records(answers[0], 1))
    assert verify_stream(reader) == after
    assert after.position == 4


def wait_until(holds, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_a_server_that_crashes_and_comes_back_costs_a_wait_and_nothing_else(postgres_server, postgres_url):
    store = SqlStore(postgres_url)
    heads, failures, enough = [store.open_stream()], [], threading.Event()

    def work():
        try:
            while not enough.is_set():
                heads.append(store.append("main", make_records(heads[-1], 1 + len(heads) % 3)))
        except JournalError as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(3):
        seen = len(heads)
        wait_until(lambda seen=seen: len(heads) > seen + 20)
        postgres_server.stop("immediate")
        postgres_server.start()
    seen = len(heads)
    wait_until(lambda: len(heads) > seen + 20, 20)
    enough.set()
    worker.join()
    assert failures == []
    reader = open_reader(postgres_url)
    assert verify_stream(reader, expect=heads[-1]) == heads[-1]
    store.close()
    assert SqlStore(postgres_url).open_stream().engine_epoch == 2


def test_a_server_that_stays_away_is_an_error_that_says_what_nobody_knows(proxy, cut_url, postgres_url):
    store = SqlStore(cut_url, patience_s=0.3)
    head = store.open_stream()
    proxy.arm(ANSWERED, 0)
    proxy.refusing = True
    with pytest.raises(JournalError, match=r"records 0 to 1 may or may not be in.*open the journal again"):
        store.append("main", make_records(head, 2))
    proxy.refusing = False
    again = SqlStore(postgres_url, exclusive=False)
    assert again.open_stream().position == 2, "the server had got the whole request"
    with pytest.raises(Fenced):
        store.append("main", make_records(head, 1))
    store.close()


def test_without_a_server_nothing_was_sent_and_that_is_said(proxy, cut_url):
    store = SqlStore(cut_url, patience_s=0.2)
    head = store.open_stream()
    store._database.drop_writer()
    proxy.refusing = True
    with pytest.raises(JournalError, match="check that the server runs") as caught:
        store.append("main", make_records(head, 2))
    assert "may or may not" not in str(caught.value)
    proxy.refusing = False
    assert store.append("main", make_records(head, 2)).position == 2
    store.close()


def test_a_lock_that_is_held_for_a_second_is_waited_for(postgres_url, foreign):
    store = SqlStore(postgres_url, busy_timeout_s=0.3)
    head = store.open_stream()
    foreign.execute("BEGIN")
    foreign.execute("SELECT FROM journal_streams FOR UPDATE")
    timer = threading.Timer(1.0, foreign.execute, ["COMMIT"])
    timer.start()
    began = time.monotonic()
    assert store.append("main", make_records(head, 1)).position == 1
    assert time.monotonic() - began > 0.8
    timer.join()
    store.close()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("before", [0, 8])  # with a plan of its own, and with the one for all values
def test_an_append_that_waits_while_the_stream_is_taken_over_is_fenced(postgres_url, foreign, waiting, before, count):
    store = SqlStore(postgres_url)
    head = store.open_stream()
    for _ in range(before):
        head = store.append("main", make_records(head, count))
    foreign.execute("BEGIN")
    foreign.execute("UPDATE journal_streams SET engine_epoch = engine_epoch + 1")
    errors = []

    def append():
        with pytest.raises(Fenced) as caught:
            store.append("main", make_records(head, count))
        errors.append(caught.value)

    appender = threading.Thread(target=append)
    appender.start()
    wait_until(waiting)
    foreign.execute("COMMIT")
    appender.join(10)
    assert len(errors) == 1
    assert store.head() == head._replace(engine_epoch=2), "and nothing of it is in"
    store.close()


@pytest.mark.parametrize("count", [1, 2])
def test_records_that_are_gone_from_the_end_stop_the_next_append(postgres_url, foreign, count):
    store = SqlStore(postgres_url)
    head = store.append("main", make_records(store.open_stream(), 3))
    foreign.execute("DELETE FROM journal_records WHERE position = 2")
    with pytest.raises(JournalError):
        store.append("main", make_records(head, count))
    assert foreign.execute("SELECT max(position) FROM journal_records").fetchone() == (1,)
    store.close()


def test_a_lock_that_outlasts_the_patience_is_an_error_with_a_remedy_and_then_over(postgres_url, foreign):
    store = SqlStore(postgres_url, busy_timeout_s=0.1, patience_s=0.3)
    head = store.open_stream()
    foreign.execute("BEGIN")
    foreign.execute("LOCK TABLE journal_records IN EXCLUSIVE MODE")
    with pytest.raises(JournalError, match=r"lock timeout.*another transaction holds") as caught:
        store.append("main", make_records(head, 1))
    assert "may or may not" not in str(caught.value)
    assert store.head() == head, "a reader is stopped by nobody"
    foreign.execute("COMMIT")
    assert store.append("main", make_records(head, 1)).position == 1
    store.close()


def test_a_deadlock_with_another_program_is_tried_again(postgres_url, foreign, waiting):
    store = SqlStore(postgres_url)
    head = store.open_stream()
    foreign.execute("SET deadlock_timeout = '60s'")
    foreign.execute("BEGIN")
    foreign.execute("SELECT FROM journal_streams FOR UPDATE")
    answers = []
    appender = threading.Thread(target=lambda: answers.append(store.append("main", make_records(head, 1))))
    appender.start()
    wait_until(waiting)
    foreign.execute(
        "LOCK TABLE journal_records IN EXCLUSIVE MODE"
    )  # waits for us; the server ends our statement for it
    foreign.execute("COMMIT")
    appender.join(10)
    assert [answer.position for answer in answers] == [1]
    store.close()


def test_a_serialization_failure_is_tried_again(postgres_url, foreign, waiting):
    store = SqlStore(postgres_url)
    head = store.open_stream()
    store._database.writing().exec_driver_sql("SET default_transaction_isolation = 'repeatable read'")
    foreign.execute("BEGIN")
    foreign.execute("UPDATE journal_streams SET name = name")
    answers = []
    appender = threading.Thread(target=lambda: answers.append(store.append("main", make_records(head, 1))))
    appender.start()
    wait_until(waiting)
    foreign.execute("COMMIT")
    appender.join(10)
    assert [answer.position for answer in answers] == [1]
    store.close()


def test_an_error_that_is_final_is_raised_at_once_and_nothing_is_in(postgres_url, foreign):
    store = SqlStore(postgres_url)
    head = store.append("main", make_records(store.open_stream(), 1))
    foreign.execute("ALTER TABLE journal_records ADD CONSTRAINT full_disk CHECK (position < 1) NOT VALID")
    began = time.monotonic()
    with pytest.raises(JournalError, match="full_disk"):
        store.append("main", make_records(head, 1))
    assert time.monotonic() - began < 1
    assert store.head() == head
    foreign.execute("ALTER TABLE journal_records DROP CONSTRAINT full_disk")
    assert store.append("main", make_records(head, 1)).position == 2
    store.close()
    assert verify_stream(open_reader(postgres_url)) != EMPTY_HEAD
