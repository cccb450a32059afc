"""Copies between any two stores are byte for byte the same, whatever interrupts them, and never hide that they aren't."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from refold import migrations
from refold.journal import copying
from refold.journal.copying import check_beginning, copy_on, copy_stream, verify_copy
from refold.journal.errors import Fenced, JournalCorrupt, JournalOwned, Rejected
from refold.journal.record import EMPTY_HEAD, head_after, in_groups
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.memory import MemoryStore
from refold.journal.testing import make_records
from refold.journal.testing_extras import lives
from refold.journal.verify import verify_stream
from tests.history.journals import eventful_lives, sealed

ROOT = Path(__file__).parents[2]
KINDS = ("sqlite", "segments", "postgresql")


@pytest.fixture
def urls(request, tmp_path):
    """A function that gives a new journal's URL for a kind of store."""
    numbers = itertools.count()

    def make(kind):
        url = {
            "sqlite": lambda: f"sqlite:///{tmp_path}/{next(numbers)}.db",
            "segments": lambda: f"segments:///{tmp_path}/{next(numbers)}",
            "postgresql": lambda: request.getfixturevalue("postgres_server").journal(),
        }[kind]()
        migrations.ensure(url)
        return url

    return make


def filled(url, records):
    store = open_store(url)
    store.open_replica()
    store.append("main", records)
    store.close()


RECORDS = sealed(eventful_lives()[0])


@pytest.mark.parametrize(("source", "target"), list(itertools.product(KINDS, KINDS)))
def test_a_copy_is_the_same_byte_for_byte_from_any_store_to_any(urls, source, target):
    ours, theirs = urls(source), urls(target)
    filled(ours, RECORDS)
    reader, store = open_reader(ours), open_store(theirs)
    copied = copy_stream(reader, store, "main")
    assert copied == (reader.head(), 0, None)
    assert list(store.read()) == RECORDS
    verify_copy(store, "main", copied.head)
    store.close()
    engine = open_store(theirs)
    opened = engine.open_stream()
    assert opened == reader.head()._replace(engine_epoch=reader.head().engine_epoch + 1)
    engine.append("main", make_records(opened, 2))
    assert verify_stream(engine) == engine.head()
    engine.close()
    reader.close()


@pytest.mark.parametrize("target", KINDS)
def test_a_copy_goes_on_from_wherever_it_was_interrupted(urls, target, monkeypatch):
    monkeypatch.setattr(copying, "BATCH_RECORDS", 7)
    source, url = MemoryStore(), urls(target)
    source.open_replica()
    source.append("main", RECORDS)
    for stop in (0, 1, 6, 7, 20, len(RECORDS) - 1):
        store = open_store(url)
        start = store.open_replica()
        if stop > start.position:
            copy_on(source, store, "main", start, head_after(RECORDS[stop - 1]))
        store.close()
        assert open_reader(url).head().position == stop
    store = open_store(url)
    counted = []
    copied = copy_stream(source, store, "main", on_records=counted.append)
    assert copied.num_found == len(RECORDS) - 1
    assert sum(counted) == len(RECORDS)
    assert list(store.read()) == RECORDS
    assert copy_stream(source, store, "main").num_found == len(RECORDS)
    store.close()


def test_what_the_engine_appends_meanwhile_comes_with_the_next_copy(urls):
    source, target = open_store(urls("sqlite")), open_store(urls("segments"))
    head = source.append("main", make_records(source.open_stream(), 50))
    stop, appended = threading.Event(), []

    def write():
        ours = head
        while not stop.is_set():
            ours = source.append("main", make_records(ours, 3))
            appended.append(ours)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            copied = copy_stream(source, target, "main")
            verify_copy(target, "main", copied.head)
            time.sleep(0.02)
    finally:
        stop.set()
        writer.join()
    assert copied.head.position > 50
    assert copy_stream(source, target, "main").head == appended[-1] == source.head()
    assert list(target.read()) == list(source.read())
    source.close()
    target.close()


def refused(source, target, error=Rejected):
    before = list(target.read())
    with pytest.raises(error) as caught:
        copy_stream(source, target, "main")
    assert list(target.read()) == before
    return str(caught.value)


def store_with(records):
    store = MemoryStore()
    store.open_replica()
    if records:
        store.append("main", records)
    return store


def test_a_target_that_is_something_else_is_refused():
    source = store_with(lives(5, 5))
    assert "another one" in refused(source, store_with(make_records(EMPTY_HEAD._replace(engine_epoch=1), 4)))
    assert "the source 10" in refused(source, store_with(lives(5, 6)))
    assert "record 6" in refused(source, store_with([*lives(5), *make_records(head_after(lives(5)[-1]), 2)]))


def test_a_target_that_an_engine_went_on_with_is_refused():
    source, target = store_with(lives(3)), store_with(lives(3))
    target.append("main", make_records(target.open_stream(), 1))
    assert "the source 3" in refused(source, target)
    source = store_with(lives(3, 3))
    assert "another one" in refused(source, target)


def test_a_target_that_an_engine_only_opened_is_refused_if_older_records_would_come():
    source, target = store_with(lives(3)), store_with(lives(2))
    target.open_stream()
    assert "an engine has opened it" in refused(source, target, Fenced)
    assert "an engine has opened it" in refused(source, target, Fenced)


def test_a_target_that_a_live_engine_owns_is_refused(urls):
    source, url = store_with(lives(3)), urls("sqlite")
    engine, target = open_store(url), open_store(url)
    engine.open_stream()
    with pytest.raises(JournalOwned):
        copy_stream(source, target, "main")
    engine.close()


def test_damage_of_the_source_stops_the_copy_before_it(urls, monkeypatch):
    monkeypatch.setattr(copying, "BATCH_RECORDS", 4)
    records = lives(20)
    source = MemoryStore()
    source.open_replica()
    source.append("main", records)
    source._journal.records["main"][13] = records[13]._replace(time_ns=7)
    target = open_store(urls("sqlite"))
    with pytest.raises(JournalCorrupt) as caught:
        copy_stream(source, target, "main")
    assert caught.value.position == 13
    assert list(target.read()) == records[:13]
    source._journal.records["main"][13] = records[13]
    assert copy_stream(source, target, "main").num_found == 13
    target.close()


def test_a_copy_that_was_changed_afterwards_does_not_verify(urls):
    target = store_with(lives(5))
    head = target.head()
    target._journal.records["main"][2] = lives(5)[2]._replace(time_ns=7)
    with pytest.raises(JournalCorrupt):
        verify_copy(target, "main", head)
    with pytest.raises(JournalCorrupt):
        verify_copy(store_with(lives(4)), "main", head)
    with pytest.raises(JournalCorrupt):
        verify_copy(store_with(lives(6)), "main", head)


def test_check_beginning_reads_one_record():
    class Counting(MemoryStore):
        reads = 0

        def read(self, *args, **kwargs):
            for record in super().read(*args, **kwargs):
                type(self).reads += 1
                yield record

    source = Counting()
    source.open_replica()
    source.append("main", lives(100))
    check_beginning(source, "main", head_after(lives(100)[59]), source.head())
    assert Counting.reads == 1


def test_groups_are_bounded_by_count_and_by_bytes():
    records = lives(10)
    assert [len(group) for group in in_groups(records, 4, 1 << 20)] == [4, 4, 2]
    assert [len(group) for group in in_groups(records, 4, 1)] == [1] * 10
    assert list(in_groups([], 4, 1)) == []


COPY = """
import sys
from refold.journal import copying
from refold.journal.stores import open_reader, open_store
copying.BATCH_RECORDS = 3
source, target = open_reader(sys.argv[1]), open_store(sys.argv[2])
print("begin", flush=True)
copying.copy_stream(source, target, "main", on_records=lambda n: print(n, flush=True))
"""


@pytest.mark.parametrize("target", KINDS)
def test_a_copy_killed_at_any_instant_is_a_beginning_and_can_go_on(urls, target):
    source, url = urls("sqlite"), urls(target)
    records = make_records(EMPTY_HEAD._replace(engine_epoch=1), 3000)
    filled(source, records)
    instants, found = random.Random(7), 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", COPY, source, url],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(instants.randint(1, 60)):
            child.stdout.readline()
        time.sleep(instants.uniform(0, 0.003))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        store = open_store(url)
        head = store.open_replica()
        assert head.position >= found
        assert list(store.read()) == records[: head.position]
        found = head.position
        store.close()
    assert found > 0
    store = open_store(url)
    copied = copy_stream(open_reader(source), store, "main")
    assert copied.num_found == found
    assert list(store.read()) == records
    store.close()
