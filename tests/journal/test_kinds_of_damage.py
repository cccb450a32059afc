"""Every kind of damage on every store, done by hand to what the store holds: `verify` says where it begins and what it is."""

import pytest

from refold import migrations
from refold.journal.codec import encode
from refold.journal.errors import JournalCorrupt
from refold.journal.events import DraftsProposed
from refold.journal.record import EMPTY_HEAD, Head, content_to_store, head_after, seal
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.stores.sql import SqlStore
from refold.journal.verify import KINDS, verified, verify_stream

NUM_RECORDS = 12


def records(count=NUM_RECORDS, epoch=1, cause=0):
    head, made = EMPTY_HEAD._replace(engine_epoch=epoch), []
    for _ in range(count):
        event = DraftsProposed(handle=1, token_ids=[head.position, cause])
        made.append(seal(head, head.position, *encode([event], f"{cause}")))
        head = head_after(made[-1])
    return made


class Memory:
    def __init__(self, kept):
        self.journal = MemoryJournal()
        self.store = MemoryStore(self.journal)
        self.store.open_stream()
        self.store.append("main", kept)

    def put(self, changed, head=None):
        """Have exactly these rows, each at its own position, whatever anyone says."""
        self.journal.records["main"] = list(changed)
        if head is not None:
            self.journal.heads["main"] = head

    def close(self):
        pass


class Sql:
    def __init__(self, url, kept):
        migrations.ensure(url)
        self.store = SqlStore(url)
        self.store.open_stream()
        self.store.append("main", kept)
        self.store.close()
        self.store = SqlStore(url)

    def put(self, changed, head=None):
        import sqlalchemy as sa

        from refold.journal.stores.columns import RECORD_COLUMNS
        from refold.journal.stores.tables import journal_records, journal_streams

        with self.store._database.engine.connect() as connection, self.store._database.transaction(connection):
            stream_id = connection.execute(sa.select(journal_streams.c.stream_id)).scalar_one()
            connection.execute(sa.delete(journal_records))
            for record in changed:
                content, content_hash = content_to_store(record)
                stored = record._replace(
                    body=record.body.decode(),
                    content=None if content is None else content.decode(),
                    content_hash=content_hash,
                )
                values = dict(zip(RECORD_COLUMNS, stored, strict=True))
                connection.execute(sa.insert(journal_records).values(stream_id=stream_id, **values))
            if head is not None:
                values = {"head_position": head.position, "head_hash": head.hash}
                connection.execute(sa.update(journal_streams).values(**values))

    def close(self):
        self.store.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def journal(request, tmp_path):
    if request.param == "memory":
        made = Memory(records())
    elif request.param == "sqlite":
        made = Sql(f"sqlite:///{tmp_path / 'journal.db'}", records())
    else:
        made = Sql(request.getfixturevalue("postgres_url"), records())
    yield made
    made.close()


def found(journal, expect=None):
    with pytest.raises(JournalCorrupt) as caught:
        verify_stream(journal.store, expect=expect)
    assert f"record {caught.value.position}" in str(caught.value) or caught.value.kind == "truncated"
    assert caught.value.kind in KINDS
    return caught.value.position, caught.value.kind


def numbered(some):
    """The same records with positions that are dense again, as someone who hides a gap would leave them."""
    return [record._replace(position=position) for position, record in enumerate(some)]


def test_nothing_is_wrong(journal):
    kept = records()
    journal.put(kept)
    assert verify_stream(journal.store) == head_after(kept[-1])


@pytest.mark.parametrize("position", [0, 5, NUM_RECORDS - 1])
@pytest.mark.parametrize(
    "change",
    [
        {"time_ns": 999},
        {"engine_epoch": 7},
        {"schema_version": 1},
        {"body": b'[{"type":"DraftsProposed","handle":2,"token_ids":2}]'},
        {"content": b'["0",[9,9]]'},
        {"content": b""},
        {"hash": b"\1" * 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_edited(journal, position, change):
    kept = records()
    kept[position] = kept[position]._replace(**change)
    journal.put(kept)
    assert found(journal) == (position, "edited")


def test_edited_with_a_hash_that_fits(journal):
    """Whoever edits a record and its hash breaks the chain at the next one, which says where it was left."""
    kept = records()
    forged = seal(Head(5, kept[4].hash, 1), 999, *encode([DraftsProposed(handle=9, token_ids=[1])]))
    kept[5] = forged
    journal.put(kept)
    position, kind = found(journal)
    assert kind == "edited"
    assert position == 6


@pytest.mark.parametrize("position", [0, 5, 10])
def test_deleted(journal, position):
    kept = records()
    journal.put(kept[:position] + kept[position + 1 :])
    assert found(journal) == (position, "deleted")


@pytest.mark.parametrize(("position", "count"), [(0, 1), (5, 1), (5, 4)])
def test_deleted_and_closed_up(journal, position, count):
    kept = records()
    rest = numbered(kept[:position] + kept[position + count :])
    journal.put(rest, head_after(rest[-1]))
    assert found(journal) == (position, "deleted")


@pytest.mark.parametrize("position", [0, 5, 11])
def test_inserted(journal, position):
    kept = records()
    stranger = records(1, cause=77)[0]
    rest = numbered([*kept[:position], stranger, *kept[position:]])
    journal.put(rest, head_after(rest[-1]))
    assert found(journal) == (position, "inserted")


@pytest.mark.parametrize("position", [1, 5, 11])
def test_inserted_and_chained(journal, position):
    """A stranger that follows from the record before it: what comes after doesn't follow from the stranger."""
    kept = records()
    stranger = seal(Head(position, kept[position - 1].hash, 1), 5, *encode([DraftsProposed(handle=9, token_ids=[1])]))
    rest = numbered([*kept[:position], stranger, *kept[position:]])
    journal.put(rest, head_after(rest[-1]))
    assert found(journal) == (position, "inserted")


def test_inserted_twice_the_same(journal):
    kept = records()
    rest = numbered([*kept[:6], *kept[5:]])
    journal.put(rest, head_after(rest[-1]))
    assert found(journal) == (6, "inserted")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 8), (9, 11), (0, 11)])
def test_reordered(journal, low, high):
    kept = records()
    kept[low], kept[high] = kept[high], kept[low]
    journal.put(numbered(kept))
    assert found(journal) == (low, "reordered")


@pytest.mark.parametrize(("source", "target"), [(2, 7), (7, 2)])
def test_moved(journal, source, target):
    kept = records()
    kept.insert(target, kept.pop(source))
    journal.put(numbered(kept))
    assert found(journal) == (min(source, target), "reordered")


@pytest.mark.parametrize("left", [0, 1, 11])
def test_truncated(journal, left):
    journal.put(records()[:left])
    assert found(journal) == (left, "truncated")


@pytest.mark.parametrize("left", [1, 11])
def test_truncated_with_its_head(journal, left):
    kept = records()
    journal.put(kept[:left], head_after(kept[left - 1]))
    assert verify_stream(journal.store).position == left
    assert found(journal, expect=head_after(kept[-1])) == (left, "truncated")


@pytest.mark.parametrize("part", ["body", "content"])
@pytest.mark.parametrize("cut", [1, 5, 9])
def test_torn(journal, part, cut):
    kept = records()
    text = getattr(kept[-1], part)
    kept[-1] = kept[-1]._replace(**{part: text[:-cut]})
    journal.put(kept)
    assert found(journal) == (NUM_RECORDS - 1, "torn" if part == "body" else "edited")


def test_erased(journal):
    kept = records()
    kept[5] = kept[5]._replace(content=None)
    journal.put(kept)
    assert found(journal) == (5, "erased")


def test_an_older_epoch_after_a_newer_one_is_reordered():
    first = records(3, epoch=2)
    late = seal(head_after(first[-1])._replace(engine_epoch=1), 0, b"[]")
    with pytest.raises(JournalCorrupt) as caught:
        list(verified([*first, late]))
    assert (caught.value.position, caught.value.kind) == (3, "reordered")
