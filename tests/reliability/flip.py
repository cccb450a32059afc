"""One flipped bit in every byte of a small journal.

A flip is *noticed* if opening or verifying the journal says so with a `JournalError`. If it isn't, then every record, every
head and every stream's name must be exactly as before: the flip hit a byte that holds nothing. For a SQLite file a reader of
the file format of our own says beforehand what each byte is for, so "holds nothing" is a claim that is made before the flip.

No flip knows of another, so each processor that this process may use takes its share of the bytes, on a copy of its own.
"""

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from refold.journal.errors import JournalError
from refold.journal.store import JournalReader, JournalStore
from refold.journal.stores import open_reader, open_store
from refold.journal.verify import read_verified
from tests.kit.memory import memory_folder
from tests.kit.sqlite_pages import FREE_SPACE, OVERFLOW_TAIL, UNUSED, end_of_wal, uses_of_bytes
from tests.reliability.drivers import Driver, Place
from tests.reliability.history import next_records
from tests.reliability.judge import Tally, continued
from tests.reliability.scenario import in_a_child
from tests.reliability.torn import put

_NUM_RECORDS = 46  # one of them with overflow pages
_NUM_RECORDS_LEFT_BEHIND = 12


_LOCK = "the owner lock, which holds nothing while nobody has it"
_MARK = "the mark, beside which the journal is whole"
_LAID_OUT = "space laid out in advance"
_NEWER = "a page of the file of which the WAL has a newer version"
_MANY = {FREE_SPACE, OVERFLOW_TAIL, _LAID_OUT, _NEWER}  # gone on from now and then only
HARMLESS = UNUSED | {
    "sqlite_stat1: cells",  # hints for SQLite's planner: with others it finds the same rows
    "audit_views: cells",  # explanations of the views
    "sqlite_schema: overflow",  # the views: they show the journal, and nothing that it says is read through them
    "sqlite_schema: cells",  # where SQLite reads the same definition from the text: a constraint's name, a letter's case
    _LOCK,
    _MARK,
    _LAID_OUT,
    _NEWER,
}


class Said(NamedTuple):
    """All that a journal says."""

    records: list[Any]
    head: Any
    streams: Any


def said_by(reader: JournalReader, stream: str) -> Said:
    """Everything, after it was verified."""
    records = list(read_verified(reader, stream))
    streams = reader.streams() if hasattr(reader, "streams") else None
    return Said(records, reader.head(stream), streams)


def asked(place: Place) -> Said:
    reader = open_reader(place.url)
    try:
        return said_by(reader, place.stream)
    finally:
        reader.close()


def written(driver: Driver, folder: Path) -> Place:
    """A small journal, closed in order."""
    place = driver.fresh(folder)
    _write(place, _NUM_RECORDS).close()
    return place


def left_behind(driver: Driver, folder: Path) -> Place:
    """A smaller journal, as a process leaves it that is killed after its last append."""
    place = driver.fresh(folder)
    outcome = in_a_child(lambda: _write(place, _NUM_RECORDS_LEFT_BEHIND) and None)
    assert outcome == ("", ""), outcome
    for index in folder.rglob("*-shm"):  # SQLite makes it again from the WAL
        index.unlink()
    return place


def _write(place: Place, num_records: int) -> JournalStore:
    store = open_store(place.url)
    head = store.open_stream(place.stream)
    while head.position < num_records:
        head = store.append(place.stream, next_records(head, min(5, num_records - head.position)))
    return store


def _uses(path: Path) -> list[str]:
    """What each byte of a file is for; only what is in `HARMLESS` may change unnoticed."""
    size = path.stat().st_size
    wal = path.with_name(path.name + "-wal")
    if path.suffix == ".db":
        return uses_beside_wal(path, wal) if wal.exists() and wal.stat().st_size else uses_of_bytes(path)
    if path.name.endswith("-wal"):
        num_used = end_of_wal(path.read_bytes())
        return ["the WAL"] * num_used + [_LAID_OUT] * (size - num_used)
    if path.suffix == ".lock" or path.name == "lock":
        return [_LOCK] * size
    if path.name == "mark" or path.suffix == ".mark":
        return [_MARK] * size
    num_used = len(path.read_bytes().rstrip(b"\0"))
    return ["journal"] * num_used + [_LAID_OUT] * (size - num_used)


def uses_beside_wal(path: Path, wal: Path) -> list[str]:
    """The uses of a file's bytes where a WAL has newer versions of some pages."""
    log, uses = wal.read_bytes(), uses_of_bytes(path)
    page_bytes = int.from_bytes(path.read_bytes()[16:18], "big")
    newer = {int.from_bytes(log[at : at + 4], "big") for at in range(32, end_of_wal(log), 24 + page_bytes)}
    return [_NEWER if at // page_bytes + 1 in newer else use for at, use in enumerate(uses)]


def flip_each(
    driver: Driver,
    folder: Path,
    tally: Tally,
    chosen: Callable[[int], bool],
    uses: Callable[[Path], list[str]] | None = None,
    copy: str = "flipped",
) -> None:
    """Flip one bit in each chosen byte of each file of a `copy` beside `folder`, and look."""
    files = {str(p.relative_to(folder)): bytearray(p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}
    named = {name: (uses or _uses)(folder / name) for name in files}
    copied = folder.with_name(copy)
    before = asked(put(driver, copied, files))
    for name, content in files.items():
        for at in filter(chosen, range(len(content))):
            content[at] ^= 1 << at % 8
            place = put(driver, copied, files)
            content[at] ^= 1 << at % 8
            _look(tally, place, before, f"{name}, byte {at} ({named[name][at]})", named[name][at])


def _look(tally: Tally, place: Place, before: Said, what: str, use: str) -> None:
    tally.cycles += 1
    try:
        after = asked(place)
    except JournalError:
        tally.seen["noticed"] += 1
        return
    except Exception as error:  # noqa: BLE001 - whatever else it is, it's a fault of ours
        tally.blame("wrong_state", f"{what}: {type(error).__name__}: {error}")
        return
    tally.seen["changed nothing"] += 1
    tally.sites[use] += 1
    if after != before:
        tally.blame("wrong_state", f"{what}: passes, and says something else")
    elif use not in HARMLESS:
        tally.blame("wrong_state", f"{what}: passes, though the byte says something")
    elif use not in _MANY or tally.sites[use] % 100 == 0:
        _next_engine(tally, place, after, what)


def _next_engine(tally: Tally, place: Place, before: Said, what: str) -> None:
    """Whoever writes next is told, or goes on as if nothing had been."""
    tally.seen["gone on from"] += 1
    try:
        store = open_store(place.url)
        with contextlib.closing(store):
            continued(store, place.stream, len(before.records))
        records = asked(place).records
    except JournalError:
        tally.seen["noticed by the next engine"] += 1
        return
    if records[:-2] != before.records:
        tally.blame("lost", f"{what}: the next engine wrote over something")


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    if driver.moved is None:
        return None
    tally, every = Tally("flip", driver.name), max(round(1 / scale), 1)
    num_shares = len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(dir=memory_folder()) as name,
        ProcessPoolExecutor(num_shares, multiprocessing.get_context("fork")) as processes,
    ):
        for state, make in (("closed", written), ("left-behind", left_behind)):
            folder = Path(name, state, "journal")
            make(driver, folder)
            firsts = [seed % every + share * every for share in range(num_shares)]
            for part in processes.map(partial(_share, driver, folder, num_shares * every), firsts):
                tally.add(part)
    return tally


def _share(driver: Driver, folder: Path, every: int, first: int) -> Tally:
    part = Tally("flip", driver.name)
    flip_each(driver, folder, part, lambda at: at % every == first, copy=f"flipped-{first}")
    return part
