"""Whatever is done to a stored journal, the verifier names the first bad position, and what kind of damage it is."""

import sqlite3

import pytest

from refold import migrations
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.record import EMPTY_HEAD, Head, head_after
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryStore
from refold.journal.stores.sql import SqlStore
from refold.journal.testing import make_records
from refold.journal.verify import read_verified, verified, verify_stream

BITS = [1 << bit for bit in range(8)]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Six records of two engine lives, the file's bytes."""
    path = tmp_path_factory.mktemp("original") / "journal.db"
    migrations.ensure(str(path))
    for _ in range(2):
        store = SqlStore(str(path))
        store.append("main", make_records(store.open_stream(), 3, time_ns=1_764_000_000_000_000_000))
        store.close()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path, original):
    path = tmp_path / "journal.db"
    path.write_bytes(original)
    return path


@pytest.fixture
def head(path):
    """The head of the undamaged journal, as someone remembers it."""
    head = verify_stream(open_reader(str(path)))
    assert head.position == 6
    return head


def damage(path, *statements):
    """Run SQL on the file behind everyone's back; a tuple is a statement with its parameters."""
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(*([statement] if isinstance(statement, str) else statement))
    connection.commit()
    connection.close()


def found(path, expect=None):
    """The position and kind of the damage that the verifier reports."""
    reader = open_reader(str(path))
    try:
        with pytest.raises(JournalCorrupt) as caught:
            verify_stream(reader, expect=expect)
    finally:
        reader.close()
    assert str(caught.value.position) in str(caught.value)
    return caught.value.position, caught.value.kind


def test_an_untouched_journal_is_fine(path, head):
    reader = open_reader(str(path))
    assert verify_stream(reader) == verify_stream(reader, expect=head) == head
    assert reader.head() == head


@pytest.mark.parametrize("position", [0, 3, 5])
@pytest.mark.parametrize("column", ["body", "content", "hash"])
def test_every_flipped_bit_of_a_body_a_content_and_a_hash_is_found(path, column, position):
    connection = sqlite3.connect(path, isolation_level=None)
    where = f"WHERE position = {position}"
    (value,) = connection.execute(f"SELECT CAST({column} AS BLOB) FROM journal_records {where}").fetchone()
    kind = "BLOB" if column == "hash" else "TEXT"
    for index in range(len(value)):
        for bit in BITS if position == 3 else BITS[index % 8 : index % 8 + 1]:
            flipped = value[:index] + bytes([value[index] ^ bit]) + value[index + 1 :]
            connection.execute(f"UPDATE journal_records SET {column} = CAST(? AS {kind}) {where}", (flipped,))
            assert found(path) == (position, "edited")
    connection.close()


@pytest.mark.parametrize("column", ["engine_epoch", "schema_version", "time_ns"])
def test_every_flipped_bit_of_a_header_field_is_found(path, column):
    connection = sqlite3.connect(path, isolation_level=None)
    (value,) = connection.execute(f"SELECT {column} FROM journal_records WHERE position = 3").fetchone()
    for bit in range(64):
        flipped = int.from_bytes((value ^ (1 << bit)).to_bytes(9, "big", signed=True)[1:], "big", signed=True)
        connection.execute(f"UPDATE journal_records SET {column} = ? WHERE position = 3", (flipped,))
        assert found(path) == (3, "edited")
    connection.close()


def test_every_flipped_byte_of_a_row_in_the_raw_file_is_found(path, original):
    body = b'[{"type":"RequestAborted","handle":3,"cause":"test"},{"type":"DraftsProposed","handle":3,"token_ids":2}]'
    content = b'["test",[7,3]]'
    assert original.count(body) == original.count(content) == 1
    assert original.index(content) == original.index(body) + len(body) + 32
    start = original.index(body)
    for index in range(start - 24, start + len(body) + 32 + len(content)):
        for mask in (1, 0x80, 0xFF):
            path.write_bytes(original[:index] + bytes([original[index] ^ mask]) + original[index + 1 :])
            with pytest.raises(JournalError):
                verify_stream(open_reader(str(path)))


@pytest.mark.parametrize("position", range(5))
def test_a_deleted_row_is_deleted(path, position):
    damage(path, f"DELETE FROM journal_records WHERE position = {position}")
    assert found(path) == (position, "deleted")


def test_a_deleted_last_row_is_a_truncated_tail(path):
    damage(path, "DELETE FROM journal_records WHERE position = 5")
    assert found(path) == (5, "truncated")


def test_no_rows_at_all_is_a_truncated_tail(path):
    damage(path, "DELETE FROM journal_records")
    assert found(path) == (0, "truncated")


def test_a_deleted_row_whose_place_was_closed_up_is_found(path):
    damage(
        path,
        "DELETE FROM journal_records WHERE position = 2",
        "UPDATE journal_records SET position = position - 1 WHERE position > 2",
        "UPDATE journal_streams SET head_position = 5",
    )
    assert found(path) == (2, "deleted")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 4), (3, 5), (0, 5)])
def test_two_swapped_rows_are_reordered(path, low, high):
    damage(
        path,
        f"UPDATE journal_records SET position = -1 WHERE position = {low}",
        f"UPDATE journal_records SET position = {low} WHERE position = {high}",
        f"UPDATE journal_records SET position = {high} WHERE position = -1",
    )
    assert found(path) == (low, "reordered")


def test_a_tail_cut_off_together_with_the_head_is_found_by_who_remembers(path, head):
    reader = open_reader(str(path))
    third = list(reader.read())[3]
    reader.close()
    damage(
        path,
        "DELETE FROM journal_records WHERE position > 3",
        ("UPDATE journal_streams SET head_position = 4, head_hash = ?", [third.hash]),
    )
    assert verify_stream(open_reader(str(path))) == head_after(third)
    assert found(path, expect=head) == (4, "truncated")


def test_a_history_that_was_written_anew_is_found_by_who_remembers(path, head):
    forged = MemoryStore()
    forged.append("main", make_records(forged.open_stream(), 9, cause="forged"))
    assert verify_stream(forged).position == 9
    with pytest.raises(JournalCorrupt, match="record 5 is not the one that the expected head at 6 names") as caught:
        verify_stream(forged, expect=head)
    assert caught.value.kind == "edited"


def test_an_old_head_is_enough_to_pass_through(path):
    reader = open_reader(str(path))
    for record in reader.read():
        verify_stream(reader, expect=head_after(record))
    verify_stream(reader, expect=EMPTY_HEAD)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("head_position = 7", (6, "truncated")),
        ("head_position = 4", (3, "edited")),
        ("head_hash = zeroblob(32)", (5, "edited")),
        ("engine_epoch = 1", (0, "unindexed")),  # each record says its own; the row only fences
    ],
)
def test_an_edited_head_is_found(path, change, expected):
    damage(path, f"UPDATE journal_streams SET {change}")
    assert found(path) == expected


def test_a_row_added_behind_the_stores_back_is_found(path):
    reader = open_reader(str(path))
    (record,) = make_records(reader.head(), 1)
    reader.close()
    row = (*record[:5], record.hash, record.content)
    damage(path, ("INSERT INTO journal_records VALUES (1, ?, ?, ?, ?, CAST(? AS TEXT), ?, CAST(? AS TEXT), NULL)", row))
    assert found(path) == (6, "edited")


def test_a_fenced_engines_record_is_found_though_its_hash_is_right():
    records = make_records(Head(0, EMPTY_HEAD.hash, 2), 2)
    late = make_records(head_after(records[-1])._replace(engine_epoch=1), 1)
    with pytest.raises(JournalCorrupt, match="engine epoch 1, after one of epoch 2") as caught:
        list(verified(records + late))
    assert (caught.value.position, caught.value.kind) == (2, "reordered")


def test_records_that_come_in_the_wrong_order_or_twice_are_found():
    records = make_records(Head(0, EMPTY_HEAD.hash, 1), 4)
    kinds = (([0, 2, 1, 3], 1, "reordered"), ([0, 1, 1, 2], 2, "inserted"), ([3, 2, 1, 0], 0, "reordered"))
    for order, position, kind in kinds:
        with pytest.raises(JournalCorrupt) as caught:
            list(verified([records[index] for index in order]))
        assert (caught.value.position, caught.value.kind) == (position, kind)


def test_verification_can_start_at_a_trusted_head(path, head):
    reader = open_reader(str(path))
    records = list(reader.read())
    assert list(verified(reader.read(start=4), start_head=head_after(records[3]), expect=head)) == records[4:]
    with pytest.raises(JournalCorrupt):
        list(verified(reader.read(start=4), start_head=head_after(records[2])))


def test_good_records_come_out_before_the_bad_one(path):
    damage(path, "UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 4")
    seen = []
    with pytest.raises(JournalCorrupt):
        seen.extend(record.position for record in read_verified(open_reader(str(path))))
    good = read_verified(open_reader(str(path)))
    assert [next(good).position for _ in range(4)] == [0, 1, 2, 3]
