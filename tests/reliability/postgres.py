"""PostgreSQL going away: the server stopped `immediate` in the middle, connections cut, a forgotten transaction.

- *stopped*: a process appends without pause; the server ends every backend without a word, as a crash does, and recovers. The
  writer finds out by itself what became of the append that was under way, and goes on.
- *cut*: between the store and the server, a proxy cuts the connection after a random number of bytes of the request or of its
  answer, around COMMIT as anywhere else.
- *crowd*: 16 processes append to 16 streams of one database while a foreign transaction stays open with a snapshot and a row.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from refold.journal.errors import JournalError
from refold.journal.stores import open_store
from tests.kit.cutting_proxy import ANSWERED, SENT, CuttingProxy
from tests.reliability.drivers import Driver, Place, server
from tests.reliability.history import NUM_RECORDS, digests, next_records
from tests.reliability.judge import UNSEEN, Tally, judge
from tests.reliability.shared import Shared

_STOPS, _CUTS = 60, 3000
_APPENDERS, _APPENDS = 16, 60
_PATIENCE_S = 40.0


def _forked(life: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = 1
        try:
            life()
            status = 0
        finally:
            os._exit(status)
    return pid


def _append_all(place: Place, shared: Shared) -> None:
    """Append the whole history; open the journal again whenever the store gives up."""
    while shared.acknowledged < NUM_RECORDS:
        with contextlib.suppress(JournalError):
            store = open_store(place.url)
            with contextlib.closing(store):
                head = store.open_stream(place.stream)
                while head.position < NUM_RECORDS:
                    head = store.append(place.stream, next_records(head, 2))
                    shared.acknowledged = head.position
                    time.sleep(0.001)  # else it's done before the server stops
        shared.extra += 1
        time.sleep(0.05)


def _stop_in_the_middle(driver: Driver, tally: Tally, stops: int, rng: random.Random) -> None:
    shared, remaining = Shared(), stops
    while remaining:
        place = driver.fresh(Path())
        shared.acknowledged, remembered = 0, UNSEEN
        pid = _forked(lambda place=place: _append_all(place, shared))  # type: ignore[misc]
        while remaining and shared.acknowledged < NUM_RECORDS - 40:
            time.sleep(rng.random() * 0.1)
            before = shared.acknowledged
            server().stop("immediate")
            time.sleep(rng.random() * 0.1)
            server().start()
            if not _goes_on(shared, before):
                tally.blame("wrong_state", f"stop {tally.cycles}: the writer never went on after {before}")
            remembered = judge(tally, place, before, remembered, f"stop {tally.cycles}")
            tally.cycles += 1
            tally.seen["stopped"] += 1
            remaining -= 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        judge(tally, place, shared.acknowledged, remembered, "after the last stop")
    tally.seen["journals opened again by their writers"] += shared.extra


def _goes_on(shared: Shared, before: int) -> bool:
    deadline_s = time.monotonic() + _PATIENCE_S
    while shared.acknowledged <= before < NUM_RECORDS:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


def _cut_connections(driver: Driver, tally: Tally, cuts: int, rng: random.Random) -> None:
    proxy = CuttingProxy(f"{server().socket_folder}/.s.PGSQL.5432")
    with contextlib.closing(proxy):
        while cuts > 0:
            proxy.arm(SENT, 1 << 60)
            place = driver.fresh(Path())
            options = place.url.rpartition("options=")[2]
            through = f"127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable&options={options}"
            store = open_store(f"postgresql://postgres@{through}")
            with contextlib.closing(store):
                head = store.open_stream(place.stream)
                while cuts > 0 and head.position < NUM_RECORDS:
                    proxy.arm(rng.choice((SENT, ANSWERED)), int(rng.random() ** 3 * 3000))
                    before, met = head, proxy.num_cuts
                    try:
                        head = store.append(place.stream, next_records(head, rng.randint(1, 3)))
                    except JournalError as error:
                        tally.blame("wrong_state", f"cut {tally.cycles}: it gave up: {error}")
                        head = store.open_stream(place.stream)
                    met = proxy.num_cuts - met
                    tally.seen["cut" if met else "passed before the cut"] += 1
                    tally.cycles += bool(met)
                    cuts -= 1
                    assert head.position > before.position
            judge(tally, place, head.position, head, f"cut {tally.cycles}")


def _append_some(place: Place, shared: Shared) -> None:
    store = open_store(place.url)
    head = store.open_stream(place.stream)
    for _ in range(_APPENDS):
        head = store.append(place.stream, next_records(head, 1))
        shared.acknowledged = head.position
    store.close()


def _crowd(driver: Driver, tally: Tally) -> None:
    place = driver.fresh(Path())
    accounts = [Shared() for _ in range(_APPENDERS)]
    with server().connect(place.url) as foreign:
        foreign.execute("CREATE TABLE foreign_work (x int)")
        foreign.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        foreign.execute("INSERT INTO foreign_work SELECT count(*) FROM journal_records")
        streams = [place._replace(stream=f"engine-{number}") for number in range(_APPENDERS)]
        pids = [
            _forked(lambda stream=stream, account=account: _append_some(stream, account))  # type: ignore[misc]
            for stream, account in zip(streams, accounts, strict=True)
        ]
        for pid in pids:
            if os.waitpid(pid, 0)[1] != 0:
                tally.blame("wrong_state", "crowd: an appender failed")
        for stream, account in zip(streams, accounts, strict=True):
            judge(tally, stream, account.acknowledged, what=f"crowd, {stream.stream}")
            tally.seen["appended in a crowd of 16, beside an idle transaction"] += account.acknowledged
        foreign.execute("ROLLBACK")
    tally.cycles += 1


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    if driver.name != "postgresql":
        return None
    tally, rng = Tally("postgres", driver.name), random.Random(seed)
    digests()
    _stop_in_the_middle(driver, tally, max(round(_STOPS * scale), 1), rng)
    _cut_connections(driver, tally, max(round(_CUTS * scale), 1), rng)
    _crowd(driver, tally)
    return tally
