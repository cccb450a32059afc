"""One history of a segment journal, played again and again, with another call of the file system failing each time.

The history opens a stream, appends groups of several sizes across several segments, seals some, closes, opens and appends
again. A case says which call fails, how, and what a power cut leaves. Then the journal is opened on a sound disk, and has to
hold what was acknowledged, in order, once, and nothing that was never written; and it has to go on.

    python -m tests.kit.segment_campaign [--stride N] [--seed S]
"""

import argparse
import errno
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import Head, Record
from refold.journal.stores.segments import folder
from refold.journal.stores.segments.reader import SegmentReader
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.testing import make_records
from refold.journal.verify import read_verified
from tests.kit.faulty_files import Crash, Fault, FaultyFiles, Survival
from tests.kit.memory import memory_folder

GROUPS = (1, 3, 1, 40, 2, 5, 1, 60, 1, 2)
SEGMENT_BYTES = 3000

FAULTS: dict[str, Fault] = {
    "ENOSPC": Fault("error", errno.ENOSPC),
    "ENOSPC for good": Fault("error", errno.ENOSPC, lasts=True),
    "EIO": Fault("error", errno.EIO),
    "EIO for good": Fault("error", errno.EIO, lasts=True),
    "EIO after the effect": Fault("late error", errno.EIO),
    "short write": Fault("short", keep=7),
    "torn write, then ENOSPC": Fault("torn", errno.ENOSPC, keep=100),
    "crash before": Fault("crash"),
    "crash after": Fault("late crash"),
    "crash in a write": Fault("torn crash", keep=61),
}
SURVIVALS: tuple[Survival, ...] = ("none", "some", "all")


class Case(NamedTuple):
    """A call to fail by its number, how, and what survives the power cut."""

    number: int
    fault: str
    survival: Survival


class Told(NamedTuple):
    """What the history's engine knows: the records that it was told are durable, and all that it ever tried to write."""

    acknowledged: list[Record]
    tried: list[list[Record]]


class Outcome(NamedTuple):
    """How a case went: what the engine was told (`ok`, an error's name, `Crash`), and how many records were found."""

    told: str
    num_found: int


def play(root: Path, files: FaultyFiles, told: Told) -> None:
    """The history. Raises what the store raises, or Crash."""
    for life in range(2):
        store = SegmentStore(root, segment_bytes=SEGMENT_BYTES, files=files)
        try:
            head = store.open_stream()
            for number, count in enumerate(GROUPS):
                head = _append(store, head, count, f"life {life}, group {number}", told)
                if number % 2:
                    store.maintain()
            store.maintain(idle=True)
            store.close()
        finally:
            let_go(store)


def let_go(store: SegmentStore) -> None:
    """What the end of a process does to its owner lock."""
    if store._owner is not None:
        store._owner.forget()


def _append(store: SegmentStore, head: Head, count: int, cause: str, told: Told) -> Head:
    records = make_records(head, count, cause=cause)
    told.tried.append(records)
    head = store.append("main", records)
    told.acknowledged.extend(records)
    return head


def run(case: Case, seed: int = 0) -> Outcome:
    """Play the history with this fault, cut the power, and judge what is left.

    Raises:
        AssertionError: something acknowledged is lost, something is there twice or was never written, or the journal
            doesn't go on.
    """
    base = Path(tempfile.mkdtemp(dir=memory_folder()))
    root = base / "journal"
    try:
        folder.create(root)
        files, told, outcome = FaultyFiles(root), Told([], []), "ok"
        files.plan(case.number, FAULTS[case.fault])
        try:
            play(root, files, told)
        except (JournalError, Crash) as error:
            outcome = type(error).__name__
        files.lose_power(case.survival, random.Random(f"{seed} {case}"))
        return Outcome(outcome, judge(root, told))
    except JournalCorrupt as error:
        raise AssertionError(f"a crash is taken for damage: {error}") from error
    finally:
        shutil.rmtree(base)


def judge(root: Path, told: Told) -> int:
    """Open the journal on a sound disk: what was acknowledged is in, all is in order, and it goes on."""
    reader = SegmentReader(root)
    before = list(read_verified(reader))
    reader.close()
    store = SegmentStore(root, segment_bytes=SEGMENT_BYTES)
    head = store.open_stream()
    found = list(read_verified(store))
    assert found == before, f"a reader saw {len(before)} records, the next owner {len(found)}"
    count = len(told.acknowledged)
    assert found[:count] == told.acknowledged, f"{count} records were acknowledged, {len(found)} are there"
    unknown = [group for group in told.tried if group[0].position >= count]
    whole = any(found[count:] == group for group in unknown)
    assert len(found) == count or whole, f"{len(found) - count} records that are no group of those without an answer"
    assert head.position == len(found)
    head = store.append("main", make_records(head, 2, cause="afterwards"))
    assert [record.position for record in read_verified(store)] == list(range(head.position))
    store.close()
    return len(found)


def num_calls() -> int:
    """How many calls the history makes when none fails."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as base:
        root = Path(base) / "journal"
        folder.create(root)
        files = FaultyFiles(root)
        play(root, files, Told([], []))
        return len(files.calls)


def cases(stride: int = 1, first: int = 0) -> Iterator[Case]:
    """Every call, every fault, every survival; or each `stride`-th of all these, from the one numbered `first` on."""
    every = (
        Case(number, fault, survival) for number in range(num_calls()) for fault in FAULTS for survival in SURVIVALS
    )
    for index, case in enumerate(every):
        if index % stride == first % stride:
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stride", type=int, default=1, help="play each N-th case only")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    told: Counter[str] = Counter()
    failures = 0
    for case in cases(options.stride, options.seed):
        try:
            told[run(case, options.seed).told] += 1
        except Exception as error:  # noqa: BLE001 - a campaign goes on
            failures += 1
            print(f"{case}: {type(error).__name__}: {error}")
    print(f"{told.total()} cases clean, {failures} not; the engine was told: {dict(told)}")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
