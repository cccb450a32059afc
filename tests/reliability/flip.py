"""One flipped bit in every byte of a small journal.

A flip is *noticed* if opening or verifying the journal says so with a `JournalError`. If it isn't, then every record, every
head and every stream's name must be exactly as before: the flip hit a byte that holds nothing. For a SQLite file a reader of
the file format of our own says beforehand what each byte is for, so "holds nothing" is a claim that is made before the flip.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from refold.journal.errors import JournalError
from refold.journal.store import JournalReader
from refold.journal.stores import open_reader, open_store
from refold.journal.verify import read_verified
from tests.kit.sqlite_pages import UNUSED, uses_of_bytes
from tests.reliability.drivers import Driver, Place
from tests.reliability.history import next_records
from tests.reliability.judge import Tally
from tests.reliability.torn import memory_folder, put

_NUM_RECORDS = 46  # one of them with overflow pages


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
    store = open_store(place.url)
    head = store.open_stream(place.stream)
    while head.position < _NUM_RECORDS:
        head = store.append(place.stream, next_records(head, min(5, _NUM_RECORDS - head.position)))
    store.close()
    return place


def _uses(path: Path) -> list[str]:
    if path.suffix == ".db":
        return uses_of_bytes(path)
    if path.suffix == ".lock":
        return ["the owner lock, which holds nothing while nobody has it"] * path.stat().st_size
    return ["journal"] * path.stat().st_size


def flip_each(
    driver: Driver, folder: Path, tally: Tally, chosen: Callable[[int], bool], uses: Callable[[Path], list[str]] = _uses
) -> None:
    """Flip one bit in each chosen byte of each file in `folder`, and look."""
    files = {str(p.relative_to(folder)): bytearray(p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}
    named = {name: uses(folder / name) for name in files}
    place = put(driver, folder.with_name("flipped"), files)
    before = asked(place)
    for name, content in files.items():
        for at in filter(chosen, range(len(content))):
            content[at] ^= 1 << at % 8
            place = put(driver, folder.with_name("flipped"), files)
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


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    if driver.moved is None:
        return None
    tally, every = Tally("flip", driver.name), max(round(1 / scale), 1)
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name:
        folder = Path(name, "journal")
        written(driver, folder)
        flip_each(driver, folder, tally, lambda at: at % every == seed % every)
    return tally


__all__ = ["UNUSED", "campaign"]
