"""The feed: every record of every stream, once, in each stream's order, whoever else has a transaction open."""

import random
import threading
import time

import pytest

from refold import migrations
from refold.journal.codec import encode
from refold.journal.events import RequestAborted
from refold.journal.feed import Feed
from refold.journal.record import seal
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.memory import MemoryStore
from refold.journal.stores.sql import SqlStore
from refold.journal.testing import make_records


@pytest.fixture(params=["sqlite", "segments", "postgresql"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    url = f"{tmp_path}/{'journal.db' if request.param == 'sqlite' else 'journal/'}"
    migrations.ensure(url)
    return url


def positions(items):
    seen = {}
    for stream, record in items:
        seen.setdefault(stream, []).append(record.position)
    return seen


def test_it_yields_what_is_there_and_then_what_is_new():
    store = MemoryStore()
    feed = Feed(store)
    assert list(feed.poll()) == []
    a, b = store.open_stream("a"), store.open_stream("b")
    a = store.append("a", make_records(a, 3))
    b = store.append("b", make_records(b, 2))
    assert positions(feed.poll()) == {"a": [0, 1, 2], "b": [0, 1]}
    assert list(feed.poll()) == []
    store.append("b", make_records(b, 1))
    c = store.append("c", make_records(store.open_stream("c"), 1))
    assert positions(feed.poll()) == {"b": [2], "c": [0]}
    assert feed.cursor == {"a": 3, "b": 3, "c": 1}
    store.append("c", make_records(c, 1))
    assert positions(Feed(store, feed.cursor).poll()) == {"c": [1]}


def test_what_one_poll_finds_comes_in_the_order_of_the_clocks_and_a_streams_never_runs_backwards():
    store = MemoryStore()
    times = {"a": [10, 40, 20], "b": [5, 30, 50]}
    for stream, moments in times.items():
        head = store.open_stream(stream)
        for time_ns in moments:
            head = store.append(stream, [seal(head, time_ns, *encode([RequestAborted(handle=0, cause="x")]))])
    order = [(stream, record.time_ns) for stream, record in Feed(store).poll()]
    assert order == [("b", 5), ("a", 10), ("b", 30), ("a", 40), ("a", 20), ("b", 50)]


def test_a_reader_that_stops_anywhere_resumes_without_gap_or_repeat(url):
    store = open_store(url)
    for stream in "abc":
        store.append(stream, make_records(store.open_stream(stream), 300, time_ns=ord(stream)))
    store.close()
    reader, chance, cursor, seen = open_reader(url), random.Random(3), {}, []
    while len(seen) < 900:
        feed, stop = Feed(reader, cursor), chance.randrange(1, 200)
        for item in feed.poll():
            seen.append(item)
            stop -= 1
            if not stop:
                break
        cursor = feed.cursor
    assert positions(seen) == {stream: list(range(300)) for stream in "abc"}
    reader.close()


class Appender(threading.Thread):
    """An engine on a stream of its own; notes when each append had returned."""

    def __init__(self, url, stream, appends):
        super().__init__()
        self.store = SqlStore(url, exclusive=url.startswith("postgres"), busy_timeout_s=30)
        self.stream, self.appends = stream, appends
        self.durable = 0

    def run(self):
        chance, head = random.Random(self.stream), self.store.open_stream(self.stream)
        for _ in range(self.appends):
            head = self.store.append(self.stream, make_records(head, chance.randrange(1, 4)))
            self.durable = head.position
        self.store.close()


def follow(reader, appenders):
    """Poll until all is written; everything that was durable before a poll must be in it."""
    feed, seen = Feed(reader), []
    while True:
        alive = any(appender.is_alive() for appender in appenders)
        before = {appender.stream: appender.durable for appender in appenders}
        seen += feed.poll()
        for stream, durable in before.items():
            assert feed.cursor.get(stream, 0) >= durable, (
                f"{stream} stalled at {feed.cursor.get(stream, 0)} of {durable}"
            )
        if not alive:
            return positions(seen)


def test_sixteen_appenders_and_a_forgotten_transaction_on_postgresql(postgres_url, postgres_server):
    with postgres_server.connect(postgres_url) as forgotten:
        forgotten.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        forgotten.execute("INSERT INTO journal_streams VALUES (9999, 'forgotten', 0, '', 1)")
        assert forgotten.execute("SELECT pg_current_xact_id_if_assigned() IS NOT NULL").fetchone() == (True,)
        appenders = [Appender(postgres_url, f"engine-{number}", 40) for number in range(16)]
        for appender in appenders:
            appender.start()
        seen = follow(open_reader(postgres_url), appenders)
        forgotten.execute("ROLLBACK")
    assert seen == {appender.stream: list(range(appender.durable)) for appender in appenders}
    assert min(map(len, seen.values())) >= 40


def test_four_appenders_and_a_forgotten_reader_on_sqlite(tmp_path):
    import sqlite3

    path = str(tmp_path / "journal.db")
    migrations.ensure(path)
    forgotten = sqlite3.connect(path, isolation_level=None)
    forgotten.execute("BEGIN")
    forgotten.execute("SELECT count(*) FROM journal_records").fetchone()
    appenders = [Appender(path, f"engine-{number}", 25) for number in range(4)]
    for appender in appenders:
        appender.start()
    seen = follow(open_reader(path), appenders)
    forgotten.close()
    assert seen == {appender.stream: list(range(appender.durable)) for appender in appenders}


def test_sixteen_writers_of_one_stream_never_fork_it(postgres_url):
    """Each takes the stream from the others: one writes, the rest are fenced, and the chain is one."""
    from refold.journal.errors import Fenced, PositionConflict
    from refold.journal.verify import verify_stream

    counts, deadline = [], time.monotonic() + 30

    def work():
        store, done, lost = SqlStore(postgres_url, exclusive=False), 0, 0
        while done < 2 and time.monotonic() < deadline:
            try:
                head = store.open_stream()
                for _ in range(2):
                    head = store.append("main", make_records(head, 1))
                    done += 1
            except (Fenced, PositionConflict):
                lost += 1
        counts.append((done, lost))
        store.close()

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = open_reader(postgres_url)
    assert verify_stream(reader).position == sum(done for done, _ in counts) >= 32
    assert sum(lost for _, lost in counts) > 0, "they never met: the test proved nothing"
    assert reader.head().engine_epoch >= 16
