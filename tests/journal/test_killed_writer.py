"""A writing process is killed at random instants: what it acknowledged is there, and the journal is whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.codec import decode
from refold.journal.errors import JournalOwned
from refold.journal.record import EMPTY_HEAD
from refold.journal.stores import engine_owner, open_reader, open_store
from refold.journal.testing import make_records
from refold.journal.verify import read_verified, verify_stream

SCRIPT = Path(__file__).with_name("writing_process.py")


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def one_life(nursery, seconds: float, *, after_first_ack: bool) -> int:
    """Start a writer, kill it after `seconds`; the highest position that it acknowledged."""
    nursery.stdin.write("\n")
    nursery.stdin.flush()
    told = {"pid": 0, "ack": 0}
    while not told["pid"] or (after_first_ack and not told["ack"]):
        word, value = nursery.stdout.readline().split()
        told[word] = int(value)
    time.sleep(seconds)
    os.kill(told["pid"], signal.SIGKILL)
    while (line := nursery.stdout.readline().strip()) != "dead":
        word, value = line.split()
        told[word] = int(value)
    return told["ack"]


PATHS = {"sqlite": "journal.db", "segments": "journal/"}


def made(path):
    migrations.ensure(path)
    return path


@pytest.fixture(params=PATHS)
def path(request, tmp_path):
    return made(f"{tmp_path}/{PATHS[request.param]}")


@pytest.fixture(params=[*PATHS, "postgresql"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return made(f"{tmp_path}/{PATHS[request.param]}")


def becomes_free(url) -> bool:
    """Whether the journal has no owner; a server may need a moment to notice that a client is dead."""
    deadline = time.monotonic() + 5
    while engine_owner(url) is not None and time.monotonic() < deadline:
        time.sleep(0.005)
    return engine_owner(url) is None


def test_a_writer_killed_forty_times_loses_nothing_that_it_acknowledged(url):
    instants = random.Random(20)
    lives_with_work, remembered = 0, EMPTY_HEAD
    with start("live", url) as nursery:
        assert nursery.stdout.readline() == "ready\n"
        for life in range(40):
            acked = one_life(nursery, instants.uniform(0.0, 0.04), after_first_ack=life % 2 == 1)
            reader = open_reader(url)
            head = verify_stream(reader, expect=remembered)
            reader.close()
            assert head.position >= acked
            assert becomes_free(url)
            lives_with_work += acked > remembered.position
            remembered = head
        nursery.stdin.close()
    assert lives_with_work >= 20
    with_bodies = read_verified(open_reader(url), expect=remembered)
    assert all(decode(record)[0].handle == record.position for record in with_bodies)
    store = open_store(url)
    head = store.open_stream()
    assert head.engine_epoch > lives_with_work
    assert store.append("main", make_records(head, 1)).position == remembered.position + 1
    store.close()


def test_two_processes_that_fight_for_a_stream_never_fork_it(url):
    with start("race", url, 150) as first, start("race", url, 150) as second:
        racers = (first, second)
        assert [racer.stdout.readline() for racer in racers] == ["ready\n", "ready\n"]
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        results = [racer.communicate(timeout=60)[0].split() for racer in racers]
    reader = open_reader(url)
    assert verify_stream(reader).position == 300
    writers = [decode(record)[0].cause for record in reader.read()]
    for pid, done, _ in results:
        assert writers.count(pid) == int(done) == 150
    assert sum(int(fenced) for _, _, fenced in results) > 0, "the processes never met: the test proved nothing"


def test_the_owner_lock_dies_with_its_process_and_not_with_its_children(url):
    with start("hold", url) as owner:
        child = int(owner.stdout.readline().split()[1])
        try:
            assert engine_owner(url) == owner.pid
            with pytest.raises(JournalOwned, match=f"process {owner.pid}.*another (journal|stream)"):
                open_store(url).open_stream()
            owner.kill()
            owner.wait()
            os.kill(child, 0)
            assert becomes_free(url)
            store = open_store(url)
            assert store.open_stream().engine_epoch == 2
            assert engine_owner(url) == os.getpid()
            store.close()
            assert becomes_free(url)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_full_disk_refuses_the_append_and_leaves_the_journal_whole(path):
    with start("full", path) as process:
        refused, after = process.communicate(timeout=60)[0].splitlines()
    kind, position, message = refused.split(" ", 2)
    assert kind == "JournalError"
    assert "free" in message
    reader = open_reader(path)
    assert after == f"after {int(position) + 3}"
    assert verify_stream(reader).position == int(position) + 3 > 30
