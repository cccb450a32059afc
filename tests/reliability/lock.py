"""A lock on the journal, held for 1 s and for 10 s by a program that isn't ours, at every kind of call.

Each call either waits until the lock is gone and works, or gives up after a bounded time with a `JournalError` that speaks of
the lock. Whatever it did, nothing is lost, and once the lock is gone the same process goes on.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from refold.journal.errors import JournalError
from refold.journal.record import Head
from refold.journal.stores import open_reader, open_store
from tests.reliability.drivers import Driver, Place
from tests.reliability.history import next_records
from tests.reliability.judge import Tally, goes_on, judge

_SLACK_S = 3.0
_AT_ONCE = 12
HOLDS_S = (1.0, 10.0)


class _Subject:
    """A store that has got as far as the call in question."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.store: Any = open_store(place.url)
        self.head = self._appended(self.store.open_stream(place.stream))

    def open(self) -> None:
        open_store(self.place.url).close()

    def read(self) -> None:
        reader = open_reader(self.place.url)
        assert len(list(reader.read(self.place.stream))) == self.head.position
        reader.close()

    def take_over(self) -> None:
        self.head = self.store.open_stream(self.place.stream)

    def append(self) -> None:
        self.head = self._appended(self.head)

    def checkpoint(self) -> None:
        if hasattr(self.store, "maintain"):
            self.store.maintain(idle=True)

    def close(self) -> None:
        self.store.close()

    def _appended(self, head: Head) -> Head:
        return self.store.append(self.place.stream, next_records(head, 3))


SITES: dict[str, Callable[[_Subject], None]] = {
    "open": _Subject.open,
    "take over": _Subject.take_over,
    "append": _Subject.append,
    "read": _Subject.read,
    "checkpoint": _Subject.checkpoint,
    "close": _Subject.close,
}


def one(driver: Driver, place: Place, site: str, locker: str, hold_s: float, tally: Tally) -> None:
    """One call under one lock."""
    what = f"{site} under {locker} for {hold_s:g} s"
    subject = _Subject(place)
    program = [sys.executable, "-c", driver.lockers[locker], place.url, str(hold_s)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n", what
        started_s = time.monotonic()
        outcome = "worked"
        try:
            SITES[site](subject)
        except JournalError as error:
            outcome = "gave up"
            if not any(word in str(error) for word in ("lock", "another program", "another transaction")):
                tally.blame("wrong_state", f"{what}: says nothing of a lock: {error}")
        except Exception as error:  # noqa: BLE001
            tally.blame("wrong_state", f"{what}: {type(error).__name__}: {error}")
        waited_s = time.monotonic() - started_s
        other.kill()
    judge(tally, place, subject.head.position, what=what)
    if waited_s > driver.patience_s + _SLACK_S:
        tally.blame("wrong_state", f"{what}: waited {waited_s:.1f} s")
    subject.store.close()
    goes_on(tally, place, subject.head.position, what)
    tally.cycles += 1
    tally.seen[outcome] += 1
    tally.sites[f"{site}, {locker}, {hold_s:g} s: {outcome} after {_about(waited_s)}"] += 1


def _about(seconds: float) -> str:
    return "no wait" if seconds < 0.3 else f"{seconds:.0f} s"


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    if not driver.lockers:
        return None
    tally = Tally("lock", driver.name)
    holds = HOLDS_S if scale >= 1 else HOLDS_S[:1]
    sites = list(SITES) if scale >= 1 else ["take over", "append", "read"]
    cases = [(site, locker, hold_s) for hold_s in holds for locker in driver.lockers for site in sites]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_AT_ONCE) as pool:
        places = [driver.fresh(Path(name, str(number))) for number in range(len(cases))]
        jobs = [pool.submit(one, driver, place, *case, tally) for place, case in zip(places, cases, strict=True)]
        for job in jobs:
            job.result()
    return tally
