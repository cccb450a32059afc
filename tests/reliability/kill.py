"""SIGKILL at random instants: a process that writes, and dies while it opens, appends, checkpoints, reads or closes.

Lives are forked from one process that has imported everything, so one costs milliseconds. A victim says how far its
acknowledged appends go in a page of shared memory, which outlives it. Half of the victims write through the store itself
and half through the journal's writer thread; each is killed at a random time after its birth or after its first append.
"""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from refold.journal.record import Head
from refold.journal.stores import open_store
from refold.journal.writer import JournalWriter
from tests.reliability.drivers import Driver, Place
from tests.reliability.history import NUM_RECORDS, digests, history, next_records
from tests.reliability.judge import UNSEEN, Tally, judge
from tests.reliability.shared import Shared

LIVES_PER_JOURNAL = 40
_KILLS = {"sqlite": 5000, "segments": 5000, "postgresql": 1000}
_MAX_AGE_S = 0.03
_MAX_WORK_S = 0.012


def _live(place: Place, shared: Shared, rng: random.Random) -> None:
    """Write until killed."""
    through_writer = rng.random() < 0.5
    while True:
        shared.stage = "open"
        store = open_store(place.url)
        head = store.open_stream(place.stream)
        shared.acknowledged = head.position
        if through_writer:
            _write_by_thread(store, place.stream, head, shared, rng)
        else:
            _write(store, place.stream, head, shared, rng)
        shared.stage = "close"
        store.close()


def _write(store, stream: str, head: Head, shared: Shared, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 40)):
        shared.stage = "append"
        if records := next_records(head, rng.randint(1, 6)):
            head = store.append(stream, records)
            shared.acknowledged = head.position
        _something_else(store, stream, shared, rng)


def _something_else(store, stream: str, shared: Shared, rng: random.Random) -> None:
    if rng.random() < 0.1 and hasattr(store, "maintain"):
        shared.stage = "maintain"
        store.maintain(idle=True)
    if rng.random() < 0.1:
        shared.stage = "read"
        list(store.read(stream, max(shared.acknowledged - 5, 0)))


def _write_by_thread(store, stream: str, head: Head, shared: Shared, rng: random.Random) -> None:
    def acknowledge(position: int) -> None:
        shared.acknowledged = position

    writer = JournalWriter(store, stream, head, on_durable=acknowledge)
    shared.stage = "append"
    for events in history()[head.position : head.position + rng.randint(1, 120)]:
        writer.append(events, 0)
        if rng.random() < 0.2:
            writer.flush()
    writer.close()
    _something_else(store, stream, shared, rng)


def _kill_one(place: Place, shared: Shared, rng: random.Random, tally: Tally) -> None:
    before = shared.acknowledged
    shared.stage = "born"
    seed = rng.random()
    pid = os.fork()
    if pid == 0:
        try:
            _live(place, shared, random.Random(seed))
        finally:
            os._exit(1)
    if rng.random() < 0.5:
        time.sleep(rng.random() * _MAX_AGE_S)
    else:
        deadline_s = time.monotonic() + 5
        while shared.acknowledged <= before < NUM_RECORDS and time.monotonic() < deadline_s:
            time.sleep(0.0005)
        time.sleep(rng.random() * _MAX_WORK_S)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the victim ended by itself, with status {status}"
    tally.seen[f"killed in {shared.stage}"] += 1


def run(driver: Driver, cycles: int, seed: int) -> Tally:
    """Kill `cycles` writers, a fresh journal every few lives."""
    tally, rng, shared = Tally("kill", driver.name), random.Random(seed), Shared()
    digests()
    with tempfile.TemporaryDirectory() as name:
        while tally.cycles < cycles:
            place = driver.fresh(Path(name, f"journal{tally.seen['journals']}"))
            tally.seen["journals"] += 1
            remembered, shared.acknowledged = UNSEEN, 0
            for _ in range(min(LIVES_PER_JOURNAL, cycles - tally.cycles)):
                _kill_one(place, shared, rng, tally)
                tally.cycles += 1
                before = remembered.position
                remembered = judge(tally, place, shared.acknowledged, remembered, f"kill {tally.cycles} (seed {seed})")
                tally.seen["records written"] += remembered.position - before
                if remembered.position >= NUM_RECORDS:
                    break
    return tally


def campaign(driver: Driver, scale: float, seed: int) -> Tally:
    return run(driver, max(int(_KILLS[driver.name] * scale), 1), seed)
