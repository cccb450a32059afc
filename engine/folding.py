"""Where a fold begins: at the start of the journal, or at a snapshot that is proved to belong to it.

A snapshot is used only if everything fits: its bytes are what was stored, the code that made it is this code, the record
before it in the journal is the one that it names, and the state in it hashes to what it says. Otherwise there is a
warning, and an older snapshot or the journal's first record is where the fold begins. Nothing but time depends on it.

The code is known by the hash of its sources: whoever changes how the journal folds, in whatever way, makes every old
snapshot one of another code, without having to think of it.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from refold.journal.archives import border_of
from refold.journal.ends import check_parts
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.naming import naming, place_of_reader
from refold.journal.record import EMPTY_HEAD, Head, head_after
from refold.journal.snapshots import Snapshot, SnapshotReader, checksum_of, make_snapshot, open_body
from refold.journal.store import JournalReader
from refold.journal.stores import doubt_of
from refold.journal.verify import verified
from refold.projections.outbox import Outbox
from refold.projections.totals import Totals
from refold.scheduler.snapshot import Folded, pack, unpack
from refold.scheduler.state import State, digest

_PACKAGES = ("refold.scheduler", "refold.projections")
_MODULES = ("events.py", "codec.py", "record.py", "content.py", "upcasters")


class Base(NamedTuple):
    """A fold of the records before `head`. `head` is `EMPTY_HEAD` where the fold begins with the first record."""

    folded: Folded
    head: Head


def beginning() -> Base:
    """The fold of nothing."""
    return Base(Folded(State(), Outbox(), Totals()), EMPTY_HEAD)


class Unsound(NamedTuple):
    """A snapshot that was passed over, and why. `is_for_good`: nothing that happens to the journal can make it one of it."""

    position: int
    reason: str
    is_for_good: bool


class NotOfThisJournal(ValueError):
    """A snapshot that isn't what was stored, or was made of another history: not now, and never."""


def nearest(reader: JournalReader, stream: str, stop: int, told: set[int] | None = None) -> Base:
    """The fold that is nearest to position `stop`, not beyond it, without folding anything.

    Unsound snapshots on the way are warned of, but for those whose positions are in `told`, which remembers them.

    Raises:
        JournalError: the journal can't be read.
    """
    base, unsound = search(reader, stream, stop)
    for each in unsound:
        if told is None or each.position not in told:
            warn_of_unsound(reader, stream, each, base.head)
    if told is not None:
        told.update(each.position for each in unsound)
    return base


def search(reader: JournalReader, stream: str, stop: int) -> tuple[Base, list[Unsound]]:
    """As `nearest`, and what was passed over. A snapshot beyond `stop` is looked at only if it's beyond the journal's end too.

    Raises:
        JournalCorrupt: a part of the records that the snapshot spares is missing, and that is seen without reading them.
        JournalError: the journal can't be read.
    """
    if not isinstance(reader, SnapshotReader) or not fold_version():
        return beginning(), []
    unsound = list[Unsound]()
    end: int | None = None
    for entry in reversed(reader.snapshots(stream)):
        if entry.position > stop:
            end = reader.head(stream).position if end is None else end
            if entry.position > end:
                unsound.append(Unsound(entry.position, _beyond(reader, stream, entry.position, end), is_for_good=True))
            continue
        try:
            snapshot = reader.load_snapshot(stream, entry.position)
            if snapshot is None and not any(each.position == entry.position for each in reader.snapshots(stream)):
                continue  # thinned out meanwhile
            base = restore(reader, stream, _at(entry.position, snapshot))
        except (ValueError, JournalError) as error:
            is_for_good = isinstance(error, NotOfThisJournal)
            unsound.append(Unsound(entry.position, str(error)[:200], is_for_good))
            continue
        with naming(reader):
            check_parts(reader, stream, base.head.position)
        return base, unsound
    return beginning(), unsound


def _at(position: int, snapshot: Snapshot | None) -> Snapshot:
    """The snapshot that is kept at a position, if it's one, and says so itself.

    Raises:
        NotOfThisJournal: it isn't.
    """
    if snapshot is None:
        raise NotOfThisJournal("it can't be read: its bytes were changed, or cut off")
    if snapshot.position != position:
        raise NotOfThisJournal(
            f"it's kept as one of {position} records, and says that it was made of {snapshot.position}"
        )
    return snapshot


def warn_of_unsound(reader: JournalReader, stream: str, unsound: Unsound, start: Head, **facts: object) -> None:
    """Say that a snapshot was passed over, why, and how many records the snapshot that is used instead has; 0: there's none."""
    whose = {"journal": place_of_reader(reader), "stream": stream, "position": unsound.position}
    warn("snapshot_ignored", **whose, reason=unsound.reason, folded_from=start.position, **facts)


def restore(reader: JournalReader, stream: str, snapshot: Snapshot) -> Base:
    """The fold in a snapshot, after everything about it was checked.

    Raises:
        NotOfThisJournal: it isn't sound, or isn't of this journal.
        ValueError: it's of other code, or the record that it was made after is damaged.
    """
    try:
        body = open_body(snapshot)
    except ValueError as error:
        raise NotOfThisJournal(str(error)) from error
    if snapshot.version != fold_version():
        raise ValueError("it was made by another version of refold")
    _check_place(reader, stream, snapshot)
    try:
        folded = unpack(body)
        found = digest(folded.state)
    except Exception as error:
        raise NotOfThisJournal(f"it can't be decoded: {type(error).__name__}: {error}") from error
    if found != snapshot.digest:
        raise NotOfThisJournal(f"its state hashes to {found[:16]}, it says {snapshot.digest[:16]}")
    return Base(folded, snapshot.head)


def _beyond(reader: SnapshotReader, stream: str, position: int, end: int) -> str:
    """What a snapshot of more records than there are says: that they were there, if its bytes are what was stored."""
    reason = f"it says that it was made of {position} records, and the journal has {end}"
    snapshot = reader.load_snapshot(stream, position)
    if snapshot is None or checksum_of(snapshot) != snapshot.checksum:
        return reason
    if snapshot.position != position:
        return f"it's kept as one of {position} records, and says that it was made of {snapshot.position}"
    return f"{reason}: the others were acknowledged, and are gone; it names the head {position}:{snapshot.hash.hex()}"


def snapshot_of(folded: Folded, head: Head) -> Snapshot:
    """A snapshot of a fold of the records before `head`."""
    return make_snapshot(head, fold_version(), digest(folded.state), pack(folded))


def _check_place(reader: JournalReader, stream: str, snapshot: Snapshot) -> None:
    """The record before the snapshot is the one that it names, and follows from the one before it."""
    try:
        if head_before(reader, stream, snapshot.position) != snapshot.head:
            raise NotOfThisJournal(
                f"record {snapshot.position - 1} of the journal is not the one that it was made after"
            )
    except JournalCorrupt as error:
        raise ValueError(f"the record before it is damaged: {error}") from error


def head_before(reader: JournalReader, stream: str, position: int) -> Head:
    """The head of the stream as it was when it ended before `position`.

    Raises:
        JournalCorrupt: the records there don't follow from each other, or there are none.
        JournalError: they can't be read.
    """
    border = border_of(reader, stream)
    if position in {0, border.position}:
        return border if position else EMPTY_HEAD
    start = border if position > border.position else EMPTY_HEAD
    records = list(reader.read(stream, max(position - 2, start.position), position))
    if len(records) > 1 and records[0].position > start.position:
        start = head_after(records.pop(0))
    head = EMPTY_HEAD
    for record in verified(records, start, is_whole=False):
        head = head_after(record)
    if head.position != position:
        raise JournalCorrupt(f"there is no record {position - 1}", position=position - 1, kind="deleted")
    return head


@lru_cache(maxsize=1)
def fold_version() -> str:
    """Names the code that folds: a hash over its sources; empty if they aren't to be had, and then snapshots aren't used."""
    said = hashlib.sha256()
    try:
        for name, text in _sources():
            said.update(f"{name}\0{len(text)}\0".encode() + text)
    except (OSError, ModuleNotFoundError) as error:
        warn("snapshots_off", reason=f"the sources of refold can't be read: {error}")
        return ""
    return said.hexdigest()[:32]


def warn_of_doubt(store: JournalReader) -> None:
    """Say so if a cut-off end of a journal could not be noticed. To be asked before its stream is opened, which mends the mark."""
    if doubt := doubt_of(store):
        warn("mark_ignored", journal=place_of_reader(store), reason=doubt)


def warn(what: str, **facts: object) -> None:
    """A line in the log. It's imported on use: who only reads never needs it."""
    from refold.engine.logs import get_logger  # noqa: PLC0415

    get_logger().warning(what, **facts)


def _sources() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        yield from _texts(files(package))
    for name in _MODULES:
        place = files("refold.journal") / name
        yield from _texts(place) if place.is_dir() else [(name, place.read_bytes())] if place.is_file() else []


def _texts(folder: Traversable) -> Iterator[tuple[str, bytes]]:
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".py")), key=lambda file: file.name)
    if not found:
        raise ModuleNotFoundError(f"no sources in {folder}")
    for file in found:
        yield f"{folder.name}/{file.name}", file.read_bytes()
