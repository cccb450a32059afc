"""Erasing content from a store: all or nothing, together with the record that says so, and gone from the files."""

import random
import sqlite3

import pytest

from refold import migrations
from refold.journal.codec import encode
from refold.journal.errors import Fenced, JournalError, PositionConflict
from refold.journal.events import ContentRedacted, DraftsProposed
from refold.journal.record import content_digest, head_after, seal
from refold.journal.snapshots import make_snapshot
from refold.journal.store import ErasingStore
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.stores.sql import SqlStore
from refold.journal.verify import verify_stream

KINDS = ("memory", "sqlite", "segments", "postgres")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


@pytest.fixture(params=KINDS)
def make(request, path):
    """A function that returns a new handle on the same journal."""
    handles = []
    if request.param == "memory":
        journal = MemoryJournal()
        yield lambda: MemoryStore(journal)
        return
    if request.param == "segments":
        path = path.with_name("journal")
        migrations.ensure(f"{path}/")

        def open_segments():
            handles.append(SegmentStore(path, exclusive=False))
            return handles[-1]

        yield open_segments
        for handle in handles:
            handle.close()
        return
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else str(path)
    migrations.ensure(url)

    def open_store():
        handles.append(SqlStore(url, exclusive=False))
        return handles[-1]

    yield open_store
    for handle in handles:
        handle.close()


def secret(position):
    return f"S{position:05}ECRET" * 3


def said(head, count, size=1):
    """Records with a content that can be told in raw bytes: the salt is secret too."""
    records = []
    for _ in range(count):
        tokens = [700_000_000 + head.position] * size
        records.append(seal(head, 0, *encode([DraftsProposed(handle=1, token_ids=tokens)], secret(head.position))))
        head = head_after(records[-1])
    return records


def redaction(head, contents):
    positions = sorted(contents)
    left = ["" if contents[p] is None else content_digest(contents[p]).hex() for p in positions]
    return seal(head, 1, *encode([ContentRedacted(handles=[1], positions=positions, content_hashes=left)]))


def test_what_is_left_is_there_with_the_digest_of_what_was(make):
    store, reader = make(), make()
    assert isinstance(store, ErasingStore)
    head = store.open_stream()
    records = said(head, 6)
    head = store.append("main", records)
    contents = {1: None, 4: b'["left",null]'}
    record = redaction(head, contents)
    erased = store.erase_content("main", [record], contents)
    assert erased.head == head_after(record) == reader.head()
    expected = [r._replace(content=contents.get(r.position, r.content)) for r in records]
    assert list(reader.read()) == [*expected, record]
    assert verify_stream(reader) == erased.head
    assert store.append("main", said(erased.head, 1)).position == 8


def test_it_can_be_erased_again(make):
    store = make()
    head = store.append("main", said(store.open_stream(), 3))
    for contents in ({1: b'["a",null]', 2: None}, {1: None}):
        head = store.erase_content("main", [redaction(head, contents)], contents).head
    assert [r.content is None for r in store.read()] == [False, True, True, False, False]
    assert verify_stream(make()) == head


def test_of_a_handle_that_lost_the_stream_nothing_is_erased(make):
    store, other = make(), make()
    head = store.append("main", said(store.open_stream(), 3))
    other.open_stream()
    with pytest.raises(Fenced):
        store.erase_content("main", [redaction(head, {1: None})], {1: None})
    assert all(r.content for r in other.read())


def test_at_another_head_nothing_is_erased(make):
    store = make()
    head = store.append("main", said(store.open_stream(), 3))
    with pytest.raises(PositionConflict):
        store.erase_content("main", [redaction(head._replace(position=9), {1: None})], {1: None})
    with pytest.raises(JournalError, match="open_stream"):
        make().erase_content("main", [redaction(head, {1: None})], {1: None})
    assert all(r.content for r in store.read())
    assert store.head() == head


def test_an_erasure_that_fails_half_way_leaves_all_as_it_was(make, monkeypatch):
    store = make()
    head = store.append("main", said(store.open_stream(), 3))
    if isinstance(store, MemoryStore):
        pytest.skip("memory has no transactions to fail in")
    if isinstance(store, SegmentStore):
        pytest.skip("segments fail in test_segment_erasure.py, at every call")
    import sqlalchemy as sa

    from refold.journal.stores import database

    def fails(connection, stream_id):
        connection.execute(sa.text("SELECT nothing FROM nowhere"))

    monkeypatch.setattr(database, "drop_all_snapshots", fails)
    with pytest.raises(JournalError):
        store.erase_content("main", [redaction(head, {1: None})], {1: None})
    monkeypatch.undo()
    assert all(r.content for r in store.read())
    assert store.head() == head
    assert store.erase_content("main", [redaction(head, {1: None})], {1: None}).head.position == 4


def test_snapshots_go_too_and_none_from_before_comes_back(make):
    store = make()
    head = store.append("main", said(store.open_stream(), 3))
    old = make_snapshot(head, "1", "00" * 32, [b"what was said"])
    store.save_snapshot("main", old)
    after = store.erase_content("main", [redaction(head, {1: None})], {1: None}).head
    assert store.snapshots("main") == []
    store.save_snapshot("main", old)
    assert store.snapshots("main") == []
    store.save_snapshot("main", make_snapshot(after, "1", "00" * 32, [b"without"]))
    assert [entry.position for entry in store.snapshots("main")] == [after.position]


# -- gone from the files ----------------------------------------------------------------------------------------------


def raw(path):
    files = [path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")]
    return b"".join(file.read_bytes() for file in files if file.exists())


def is_in(data, position):
    """Whether any piece of a content is there: pages cut it anywhere."""
    return f"S{position:05}E".encode() in data or str(700_000_000 + position).encode() in data


@pytest.mark.parametrize("seed", range(3))
def test_no_byte_of_it_is_left_in_a_sqlite_file(path, seed):
    """Contents of every size, in one page and in many, among others that stay."""
    draw = random.Random(seed)
    migrations.ensure(str(path))
    store = SqlStore(str(path))
    head = store.open_stream()
    for _ in range(120):
        size = draw.choice((1, 3, 20, 60, 150, 400, 1500))
        head = store.append("main", said(head, draw.randint(1, 3), size))
        if draw.random() < 0.1:
            store.maintain(idle=True)
        if draw.random() < 0.05:
            store.save_snapshot("main", make_snapshot(head, "1", "00" * 32, [secret(0).encode() * 50]))
    gone = draw.sample(range(head.position), head.position // 3)
    contents = {p: draw.choice((None, b'["left",' + b"null," * draw.choice((1, 30, 400)) + b"null]")) for p in gone}
    before = raw(path)
    assert all(is_in(before, p) for p in range(head.position))
    erased = store.erase_content("main", [redaction(head, contents)], contents)
    assert erased.is_gone
    after = raw(path)
    assert not [p for p in gone if is_in(after, p)]
    assert all(is_in(after, p) for p in range(head.position) if p not in contents)
    store.close()
    assert verify_stream(open_reader(str(path))) == erased.head


def test_a_reader_that_holds_the_wal_is_said(path, monkeypatch):
    from refold.journal.stores import sqlite_database

    monkeypatch.setattr(sqlite_database, "_SCRUB_PATIENCE_S", 0.1)
    migrations.ensure(str(path))
    store = SqlStore(str(path), busy_timeout_s=0.1)
    head = store.append("main", said(store.open_stream(), 3))
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM journal_records").fetchone()
    erased = store.erase_content("main", [redaction(head, {1: None})], {1: None})
    assert not erased.is_gone
    assert "another program is reading" in erased.left
    reader.close()
    store.close()
    assert not is_in(raw(path), 1)


def test_postgresql_says_what_it_keeps(postgres_url):
    store = SqlStore(postgres_url)
    head = store.append("main", said(store.open_stream(), 3))
    erased = store.erase_content("main", [redaction(head, {1: None})], {1: None})
    assert "VACUUM FULL" in erased.left
    store.close()
