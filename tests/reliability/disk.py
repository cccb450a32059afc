"""ENOSPC and EIO at every call that writes, syncs, grows or cuts a file of the journal.

A first run counts the calls. Then each of them fails in its turn: once; from then on, as on a disk that stays full; and after
half of its bytes went through. What the process is told must be a `JournalError` with the cause; when the disk is well
again, the same process opens the journal again and goes on.
"""

import errno
import random
import subprocess
import tempfile
from pathlib import Path

from refold.journal.errors import JournalError
from refold.journal.stores import open_store
from tests.kit.disk import FROM_THEN_ON, HALF_THEN_ON, ONCE, Disk
from tests.reliability.drivers import Driver, Place
from tests.reliability.engine_life import Seen, judge_engine, live
from tests.reliability.history import NUM_RECORDS, WrongState, digests, next_records
from tests.reliability.judge import Tally, continued, goes_on, judge
from tests.reliability.scenario import in_a_child, two_lives
from tests.reliability.shared import Shared

_MODES = {ONCE: "once", FROM_THEN_ON: "from then on", HALF_THEN_ON: "half of it"}
_ERRORS = (errno.ENOSPC, errno.EIO)
_ENGINES = 300


def _count(driver: Driver, folder: Path, disk: Disk, shared: Shared) -> int:
    place = driver.fresh(folder)
    shared.extra = 0

    def life() -> None:
        disk.watch(folder)
        two_lives(place, lambda _: None)
        shared.extra = disk.calls

    outcome = in_a_child(life)
    assert outcome == ("", ""), outcome
    return shared.extra


def _life(place: Place, folder: Path, disk: Disk, shared: Shared, fault: tuple[int, int, int]) -> None:
    def acknowledge(position: int) -> None:
        shared.acknowledged = position

    disk.watch(folder)
    disk.fail(*fault)
    try:
        two_lives(place, acknowledge)
    except JournalError:
        disk.mend()
        store = open_store(place.url)
        shared.acknowledged = continued(store, place.stream, shared.acknowledged).position
        store.close()
        raise


def _one(driver: Driver, folder: Path, disk: Disk, shared: Shared, tally: Tally, fault: tuple[int, int, int]) -> None:
    nth, error, mode = fault
    what = f"{errno.errorcode[error]} at call {nth}, {_MODES[mode]}"
    place = driver.fresh(folder)
    shared.acknowledged = 0

    def life() -> None:
        try:
            _life(place, folder, disk, shared, fault)
        finally:
            disk.mend()
            shared.note = disk.failed_call

    outcome = in_a_child(life)
    tally.cycles += 1
    tally.sites[shared.note] += 1
    tally.seen["told" if outcome.message else "went through"] += 1
    if outcome.crash:
        tally.blame("wrong_state", f"{what}: {outcome.crash}")
        return
    if outcome.message and "; " not in outcome.message and ": " not in outcome.message:
        tally.blame("wrong_state", f"{what}: the message says nothing to do: {outcome.message}")
    judge(tally, place, shared.acknowledged, what=what)
    goes_on(tally, place, shared.acknowledged, what)


def _engine_life(driver: Driver, folder: Path, disk: Disk, tally: Tally, fault: tuple[int, int, int]) -> None:
    """An engine on the failing disk: it stops with the cause, and goes on when the disk is well again."""
    place = driver.fresh(folder)
    what = f"engine, {errno.errorcode[fault[1]]} at call {fault[0]}, {_MODES[fault[2]]}"

    def life() -> None:
        seen: Seen = {}
        disk.watch(folder)
        disk.fail(*fault)
        cause = None
        try:
            live(place, seen)
        except JournalError as error:
            cause = error
        disk.mend()
        found = Tally("", "")
        judge_engine(found, place, seen, what, is_over=cause is None)
        live(place, seen)
        judge_engine(found, place, seen, what, is_over=True)
        if not found.is_clean:
            raise WrongState("; ".join(found.examples))
        if cause is not None:
            raise cause

    outcome = in_a_child(life)
    tally.cycles += 1
    tally.seen["engines told" if outcome.message else "engines that went through"] += 1
    if outcome.crash:
        tally.blame("wrong_state", f"{what}: {outcome.crash}")


def _small_file_system(driver: Driver, folder: Path, tally: Tally) -> None:
    """A file system of 400 KB, full for real: append until it's refused, make room, go on."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        tally.seen["small file systems that this user may not mount"] += 1
        return
    try:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(260_000))
        place = driver.fresh(folder / "journal")
        acknowledged = _fill(place)
        judge(tally, place, acknowledged, what="a full file system")
        ballast.unlink()
        goes_on(tally, place, acknowledged, "a file system that was full")
        tally.seen["records until a real file system was full"] += acknowledged
        tally.cycles += 1
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a reader of the full disk may still be closing


def _fill(place: Place) -> int:
    store = open_store(place.url)
    head = store.open_stream(place.stream)
    try:
        while head.position < NUM_RECORDS:
            head = store.append(place.stream, next_records(head, 3))
        raise AssertionError("the file system was never full")
    except JournalError:
        return head.position
    finally:
        store.close()


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    if driver.moved is None:
        return None
    tally, disk, shared, rng = Tally("disk", driver.name), Disk(), Shared(), random.Random(seed)
    digests()
    with tempfile.TemporaryDirectory() as name:
        total = _count(driver, Path(name, "counted"), disk, shared)
        faults = [(nth, error, mode) for nth in range(1, total + 1) for error in _ERRORS for mode in _MODES]
        every = max(round(1 / scale), 1)
        for number, fault in enumerate(faults[seed % every :: every]):
            _one(driver, Path(name, str(number)), disk, shared, tally, fault)
        for number in range(max(round(_ENGINES * scale), 2)):
            fault = (rng.randint(1, 150), rng.choice(_ERRORS), rng.choice(list(_MODES)))
            _engine_life(driver, Path(name, f"engine{number}"), disk, tally, fault)
        _small_file_system(driver, Path(name, "small"), tally)
    return tally
