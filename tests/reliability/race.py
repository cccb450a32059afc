"""Several processes that fight for one stream: every append that one of them was promised is there, once.

Each takes the stream over, appends until it's fenced or refused, and takes it over again. Who appended a record is in the
record's time, so each process's account can be held against the journal.
"""

import os
import random
import tempfile
import time
import traceback
from pathlib import Path

from refold.journal.errors import Fenced, JournalError, JournalOwned, PositionConflict
from refold.journal.stores import open_reader, open_store
from tests.reliability.drivers import Driver, Place
from tests.reliability.history import next_records
from tests.reliability.judge import Tally, judge

_RACERS = 3
_ROUNDS = 100
_GOAL = 150


def _race(place: Place, number: int, account: Path, seed: int, deadline_s: float) -> None:
    """Append one record at a time, writing down each position that was acknowledged."""
    rng = random.Random(seed * 100 + number)
    fd = os.open(account, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while time.monotonic() < deadline_s:
        try:
            store = open_store(place.url)
        except JournalError as error:
            os.write(fd, f"refused {type(error).__name__}\n".encode())
            continue
        try:
            head = store.open_stream(place.stream)
            for _ in range(rng.randint(1, 12)):
                if head.position >= _GOAL:
                    return
                head = store.append(place.stream, next_records(head, 1, time_ns=number))
                os.write(fd, f"ack {head.position - 1}\n".encode())
        except (Fenced, PositionConflict, JournalOwned) as error:
            os.write(fd, f"refused {type(error).__name__}\n".encode())
            time.sleep(rng.random() * 0.003)
        finally:
            store.close()


def _round(driver: Driver, folder: Path, tally: Tally, seed: int) -> None:
    place = driver.fresh(folder)
    accounts = [folder.with_name(f"{folder.name}-racer{number}") for number in range(_RACERS)]
    deadline_s = time.monotonic() + 20
    pids = []
    for number, account in enumerate(accounts):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _race(place, number, account, seed, deadline_s)
                status = 0
            except BaseException:  # noqa: BLE001 - it's the rules that were broken, and this says by what
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    for pid in pids:
        if os.waitpid(pid, 0)[1] != 0:
            tally.blame("wrong_state", f"round {seed}: a racer ended otherwise than by its rules")
    _settle_accounts(place, accounts, tally, seed)


def _settle_accounts(place: Place, accounts: list[Path], tally: Tally, seed: int) -> None:
    head = judge(tally, place, 0, what=f"race {seed}")
    reader = open_reader(place.url)
    writers = {record.position: record.time_ns for record in reader.read(place.stream)}
    reader.close()
    claimed: set[int] = set()
    for number, account in enumerate(accounts):
        for line in account.read_text().splitlines():
            word, value = line.split()
            if word == "refused":
                tally.seen[f"refused: {value}"] += 1
                continue
            position = int(value)
            tally.seen["appends acknowledged"] += 1
            if position in claimed:
                tally.blame("duplicates", f"race {seed}: two were promised position {position}")
            if position >= head.position or writers[position] != number:
                tally.blame("lost", f"race {seed}: position {position} was promised to {number}")
            claimed.add(position)
    tally.cycles += 1


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    tally = Tally("race", driver.name)
    with tempfile.TemporaryDirectory() as name:
        for number in range(max(round(_ROUNDS * scale), 1)):
            _round(driver, Path(name, str(number)), tally, seed + number)
    return tally
