"""An erasure whose process or disk fails at any call is done or isn't: content, the record that says so, snapshots and files."""

import contextlib
import errno
import random

import pytest

from refold.journal.codec import encode
from refold.journal.errors import JournalError
from refold.journal.events import ContentRedacted, DraftsProposed
from refold.journal.record import head_after, seal
from refold.journal.snapshots import make_snapshot
from refold.journal.stores.segments import folder
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.verify import read_verified
from tests.kit.faulty_files import Crash, Fault, FaultyFiles, UnsyncedFiles
from tests.kit.segment_campaign import let_go

# A generator that a crash leaves half way is closed by the garbage collector, which ends the dead process once more.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ERASED = {1: None, 7: b'["left",null]', 18: None}
FAULTS = {
    "crash": Fault("late crash"),
    "error": Fault("error", errno.EIO),
    "full": Fault("error", errno.ENOSPC, lasts=True),
    "torn": Fault("torn crash", keep=90),
}


def write(root):
    """Twenty records in sealed, closed and open segments, and a snapshot; the head."""
    folder.create(root)
    store = SegmentStore(root, segment_bytes=1200, files=UnsyncedFiles())
    head = store.open_stream()
    for number in range(20):
        event = DraftsProposed(handle=1, token_ids=[number] * 9)
        head = store.append("main", [seal(head, 0, *encode([event], f"salt {number}"))])
        if number == 10:
            store.maintain(idle=True)
    store.save_snapshot("main", make_snapshot(head, "1", "00" * 32, [b"what was said"]))
    let_go(store)
    return head


def erase(root, files):
    store = SegmentStore(root, segment_bytes=1200, files=files)
    try:
        head = store.open_stream()
        record = seal(
            head, 1, *encode([ContentRedacted(handles=[1], positions=[1, 7, 18], content_hashes=["", "00" * 32, ""])])
        )
        erased = store.erase_content("main", [record], ERASED)
        assert erased.head == head_after(record)
        return erased.is_gone
    finally:
        let_go(store)


@pytest.fixture
def journal(tmp_path):
    root = tmp_path / "journal"
    return root, write(root)


def content_of(root):
    store = SegmentStore(root, files=UnsyncedFiles())
    store.open_stream()
    try:
        return list(store.read()), store.snapshots(), sorted(path.name for path in (root / "main").iterdir())
    finally:
        store.close()


def is_done(root, before):
    """Whether all of it is done; fails if only some of it is."""
    records, snapshots, names = content_of(root)
    assert not [name for name in names if ".at-" in name or name.endswith(".new")], names
    stems = [name.partition(".")[0] for name in names if name.endswith((".seg", ".sealed"))]
    assert len(stems) == len(set(stems)), "an old segment lies beside its new one"
    if len(records) == len(before):
        assert records == before
        assert snapshots
        return False
    assert records[:-1] == [r._replace(content=ERASED.get(r.position, r.content)) for r in before]
    assert not snapshots
    return True


def test_it_is_done_across_sealed_closed_and_open_segments(journal):
    root, _ = journal
    before = content_of(root)[0]
    assert erase(root, UnsyncedFiles())
    assert is_done(root, before)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("survival", ["none", "some", "all"])
def test_whatever_fails_it_is_done_or_it_is_not(journal, tmp_path, fault, survival):
    root, _ = journal
    before = content_of(root)[0]
    sound = FaultyFiles(root)
    images = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert erase(root, sound)
    outcomes = set()
    for number in range(0, len(sound.calls), 3):
        here = tmp_path / f"case{number}"
        for path, data in images.items():
            (here / path).parent.mkdir(parents=True, exist_ok=True)
            (here / path).write_bytes(data)
        files, told = FaultyFiles(here), None
        files.plan(number, FAULTS[fault])
        with contextlib.suppress(JournalError, Crash):
            told = erase(here, files)
        files.lose_power(survival, random.Random(number))
        done = is_done(here, before)
        assert done or told is None, "it was said to be done"
        outcomes.add(done)
    assert outcomes == {False, True}


def test_what_could_not_be_removed_is_said_and_removed_by_the_next_owner(journal):
    root, _ = journal
    before = content_of(root)[0]
    files = FaultyFiles(root)
    files.rule = lambda call: (
        Fault("error", errno.EIO) if call.name == "rename" and call.path.suffix == ".sealed" else None
    )
    assert erase(root, files) is False
    assert is_done(root, before)


def test_an_erased_journal_goes_on_and_is_sealed(journal):
    root, _ = journal
    erase(root, UnsyncedFiles())
    store = SegmentStore(root, files=UnsyncedFiles())
    head = store.open_stream()
    for number in range(5):
        head = store.append("main", [seal(head, 0, *encode([DraftsProposed(handle=1, token_ids=[number])], "salt"))])
    store.compact()
    assert [record.position for record in store.read()] == list(range(26))
    store.close()
    with pytest.raises(JournalError, match=r"erased|edited"):
        list(read_verified(SegmentStore(root)))  # these redactions didn't attest to what is left at 7
