"""The contract of the store port, as tests that any store can be held to. Needs pytest; nothing else in refold does.

A store of your own passes by subclassing the suite and supplying one fixture, a function that returns a new handle on the
same, at first empty, journal each time it's called:

    import pytest
    from refold.journal.testing import JournalStoreContract

    class TestMyStore(JournalStoreContract):
        @pytest.fixture
        def store_factory(self, tmp_path):
            handles = []

            def make():
                handles.append(MyStore(tmp_path / "journal"))
                return handles[-1]

            yield make
            for handle in handles:
                handle.close()

What the suite can't ask of every store stays for your own tests: that what `append` returned for is on disk after a kill,
and what happens when the disk is full.
"""

# ruff: noqa: D102 - a test here is called what it says

from collections.abc import Callable

import pytest

from refold.journal.codec import decode, encode
from refold.journal.errors import Fenced, JournalError, JournalOwned, PositionConflict
from refold.journal.events import DraftsProposed, Event, RequestAborted
from refold.journal.record import EMPTY_HEAD, GENESIS_HASH, Head, Record, head_after, seal
from refold.journal.store import DEFAULT_STREAM, JournalReader, JournalStore
from refold.journal.verify import verified, verify_stream

StoreFactory = Callable[[], JournalStore]

# What JSON text can hold and a careless store can't: no character, every plane, quotes, NUL, what SQL escapes.
_TEXTS = ("", "plain", "\0 \x01 \x7f", "é\u2028\ufeff\U0001f600", "'; DROP TABLE journal_records; --", '"\\%s ? :a {}')


def make_records(head: Head, count: int, *, cause: str = "test", time_ns: int = 1_000) -> list[Record]:
    """`count` records that continue `head`; each holds two events, whose handle is the record's position.

    The second has a content.
    """
    records: list[Record] = []
    for _ in range(count):
        event = RequestAborted(handle=head.position, cause=cause)
        said = DraftsProposed(handle=head.position, token_ids=[7, head.position])
        records.append(seal(head, time_ns + head.position, *encode([event, said], salt=cause)))
        head = head_after(records[-1])
    return records


def refusal(store: JournalStore, records: list[Record], error: type[JournalError] | tuple[type[Exception], ...]) -> str:
    """The message with which `store` refuses to append; checks that it leaves the stream as it was."""
    before = store.head(), list(store.read())
    with pytest.raises(error) as caught:
        store.append(DEFAULT_STREAM, records)
    assert (store.head(), list(store.read())) == before
    return str(caught.value)


class JournalStoreContract:
    """Subclass this with a fixture `store_factory`; see the module's text."""

    def test_has_the_methods_of_the_port(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        assert isinstance(store, JournalStore)
        assert isinstance(store, JournalReader)

    def test_a_stream_that_was_never_opened_is_empty(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        assert store.head() == EMPTY_HEAD
        assert list(store.read()) == []

    def test_opening_starts_the_first_engine_epoch(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        assert store.open_stream() == Head(0, GENESIS_HASH, 1)
        assert store.head() == Head(0, GENESIS_HASH, 1)

    def test_opening_again_raises_the_epoch_and_nothing_else(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        after = store.append(DEFAULT_STREAM, make_records(store.open_stream(), 3))
        assert store.open_stream() == Head(after.position, after.hash, 2)
        assert store.open_stream() == Head(after.position, after.hash, 3)

    def test_records_come_back_as_they_were(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        records = make_records(store.open_stream(), 5)
        after = store.append(DEFAULT_STREAM, records)
        assert after == head_after(records[-1]) == store.head()
        assert list(store.read()) == records
        assert all(
            type(field) is type(stored)
            for row in zip(records, store.read(), strict=True)
            for field, stored in zip(*row, strict=True)
        )

    @pytest.mark.parametrize("text", _TEXTS, ids=repr)
    def test_any_text_survives(self, store_factory: StoreFactory, text: str) -> None:
        store = store_factory()
        records = make_records(store.open_stream(), 1, cause=text)
        store.append(DEFAULT_STREAM, records)
        (stored,) = store.read()
        event: Event = RequestAborted(handle=0, cause=text)
        assert stored == records[0]
        assert decode(stored) == [event, DraftsProposed(handle=0, token_ids=[7, 0])]

    def test_extreme_times_and_a_large_body_survive(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        head = store.open_stream()
        for time_ns, size in ((2**63 - 1, 10), (-(2**63), 10), (0, 1 << 20)):
            head = store.append(
                DEFAULT_STREAM, [seal(head, time_ns, *encode([RequestAborted(handle=1, cause="x" * size)]))]
            )
        assert verify_stream(store) == head

    def test_read_takes_a_range(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        records = make_records(store.open_stream(), 10)
        store.append(DEFAULT_STREAM, records)
        assert list(store.read(start=4)) == records[4:]
        assert list(store.read(start=4, stop=7)) == records[4:7]
        assert list(store.read(stop=2)) == records[:2]
        assert list(store.read(start=5, stop=5)) == []
        assert list(store.read(start=8, stop=99)) == records[8:]
        assert list(store.read(start=10)) == []
        assert list(store.read(start=99)) == []

    def test_a_long_stream_reads_in_order(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        head = store.open_stream()
        for count in (1, 255, 256, 1, 500):
            head = store.append(DEFAULT_STREAM, make_records(head, count))
        records = list(verified(store.read(), expect=head))
        assert [record.position for record in records] == list(range(1013))

    def test_another_handle_sees_what_was_appended(self, store_factory: StoreFactory) -> None:
        writer, reader = store_factory(), store_factory()
        head = writer.open_stream()
        for _ in range(3):
            head = writer.append(DEFAULT_STREAM, make_records(head, 2))
            assert reader.head() == head
            assert verify_stream(reader) == head

    def test_a_reader_half_way_does_not_stop_the_writer(self, store_factory: StoreFactory) -> None:
        writer, reader = store_factory(), store_factory()
        head = writer.append(DEFAULT_STREAM, make_records(writer.open_stream(), 600))
        half_way = reader.read()
        first = next(half_way)
        head = writer.append(DEFAULT_STREAM, make_records(head, 600))
        rest = list(half_way)
        assert first.position == 0
        assert [record.position for record in rest] == list(range(1, 1 + len(rest)))
        assert len(rest) >= 599

    def test_a_record_that_is_in_is_refused(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        records = make_records(store.open_stream(), 3)
        store.append(DEFAULT_STREAM, records)
        message = refusal(store, records[2:], PositionConflict)
        assert "2" in message
        assert "3" in message

    def test_a_gap_is_refused(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        records = make_records(store.open_stream(), 5)
        store.append(DEFAULT_STREAM, records[:2])
        refusal(store, records[3:], PositionConflict)

    def test_a_record_of_another_history_is_refused(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        head = store.open_stream()
        store.append(DEFAULT_STREAM, make_records(head, 2))
        refusal(store, make_records(head, 3, cause="another history")[2:], PositionConflict)

    def test_a_record_that_was_changed_after_it_was_chained_is_refused(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        store.append(DEFAULT_STREAM, make_records(store.open_stream(), 2))
        (record,) = make_records(store.head(), 1)
        refusal(store, [record._replace(body=record.body.replace(b"test", b"TEST"))], PositionConflict)
        refusal(store, [record._replace(time_ns=record.time_ns + 1)], PositionConflict)
        refusal(store, [record._replace(content_hash=GENESIS_HASH)], PositionConflict)
        refusal(store, [record._replace(hash=GENESIS_HASH)], PositionConflict)

    @pytest.mark.parametrize("count", [2, 3, 21])
    def test_of_records_of_which_the_last_is_refused_none_gets_in(
        self, store_factory: StoreFactory, count: int
    ) -> None:
        """A gap among them may be told as an assertion: whoever chains records doesn't leave one."""
        store = store_factory()
        head = store.append(DEFAULT_STREAM, make_records(store.open_stream(), 2))
        records = make_records(head, count + 1)
        older = make_records(head_after(records[count - 2])._replace(engine_epoch=head.engine_epoch - 1), 1)
        refusal(store, [*records[: count - 1], *older], Fenced)
        refusal(store, [*records[: count - 1], records[count]], (PositionConflict, AssertionError))
        assert store.append(DEFAULT_STREAM, records) == head_after(records[-1])
        assert verify_stream(store) == store.head()

    def test_a_record_that_another_process_has_chained_is_taken(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        ours = make_records(store.open_stream(), 2)
        theirs = [Record(*record) for record in ours]
        assert store.append(DEFAULT_STREAM, theirs) == verify_stream(store)
        assert list(store.read()) == ours

    def test_a_record_of_an_older_epoch_is_refused(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        old = store.open_stream()
        store.open_stream()
        refusal(store, make_records(old, 1), Fenced)

    def test_a_stream_that_is_not_open_here_is_refused(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        store.open_stream()
        with pytest.raises(JournalError, match="open_stream"):
            store.append("other", make_records(Head(0, GENESIS_HASH, 1), 1))
        assert store.head("other") == EMPTY_HEAD

    def test_of_two_openers_only_one_writes(self, store_factory: StoreFactory) -> None:
        first, second = store_factory(), store_factory()
        head = first.append(DEFAULT_STREAM, make_records(first.open_stream(), 1))
        try:
            taken = second.open_stream()
        except JournalOwned:
            assert first.append(DEFAULT_STREAM, make_records(head, 1)) == second.head()
            return
        assert taken == Head(1, head.hash, 2)
        refusal(first, make_records(head, 1), Fenced)
        taken = second.append(DEFAULT_STREAM, make_records(taken, 1))
        refusal(first, make_records(head, 1), Fenced)
        assert verify_stream(first) == taken

    def test_a_handle_that_was_closed_lets_the_next_one_in(self, store_factory: StoreFactory) -> None:
        first, second = store_factory(), store_factory()
        head = first.append(DEFAULT_STREAM, make_records(first.open_stream(), 2))
        first.close()
        first.close()
        with pytest.raises(JournalError):
            first.append(DEFAULT_STREAM, make_records(head, 1))
        with pytest.raises(JournalError):
            first.open_stream()
        taken = second.open_stream()
        assert taken == Head(2, head.hash, 2)
        assert verify_stream(second) == head
        assert second.append(DEFAULT_STREAM, make_records(taken, 1)).position == 3

    def test_streams_know_nothing_of_each_other(self, store_factory: StoreFactory) -> None:
        store = store_factory()
        a, b = store.open_stream("a"), store.open_stream("b")
        a = store.append("a", make_records(a, 3, cause="a"))
        b = store.append("b", make_records(b, 2, cause="b"))
        assert (store.head("a"), store.head("b")) == (a, b)
        assert store.open_stream("a").engine_epoch == 2
        assert store.head("b").engine_epoch == 1
        assert {decode(record)[0] for record in store.read("b")} == {
            RequestAborted(handle=h, cause="b") for h in (0, 1)
        }

    @pytest.mark.parametrize("name", ["", "a" * 201, "line\nbreak", "\0", "\ud800"], ids=ascii)
    def test_a_name_that_is_no_name_is_refused(self, store_factory: StoreFactory, name: str) -> None:
        with pytest.raises(JournalError, match="stream name"):
            store_factory().open_stream(name)
