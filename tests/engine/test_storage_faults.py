"""What isn't durable isn't delivered; a journal that fails stops the engine, and everyone hears the first cause."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from refold import Engine, Fenced, InvariantViolation, JournalCorrupt, JournalError, JournalOwned, SamplingParams
from refold.engine.engine import Delta
from refold.journal.codec import encode
from refold.journal.events import OutputDelivered, RequestAborted, StateDigest
from refold.journal.record import head_after, seal
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.migrations import ensure
from tests.kit.engines import MODEL, collect, durable_outputs, eventually, joined, lawful_events, must_produce
from tests.kit.faulty_store import FaultyStore

SAMPLING = SamplingParams(seed=4, max_tokens=50)


def sqlite_store(path: Path, **faults: object) -> FaultyStore:
    ensure(str(path))
    return FaultyStore(open_store(str(path)), **faults)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [5, 6, 9, 20, 40])
def test_when_the_disk_fails_streams_get_what_is_durable_and_then_the_cause(position: int, tmp_path: Path) -> None:
    store = sqlite_store(tmp_path / "journal.db", fail_from_position=position)
    seen: dict[str, list[Delta]] = {"a": [], "b": []}

    async def client(engine: Engine, name: str) -> None:
        async for delta in engine.generate([1, 2], SAMPLING, request_id=name):
            seen[name].append(delta)

    async def scenario() -> None:
        async with Engine(MODEL, store) as engine:
            results = await asyncio.gather(client(engine, "a"), client(engine, "b"), return_exceptions=True)
            assert results == [store.error, store.error]
            with pytest.raises(JournalError, match="the disk is full"):
                await collect(engine.generate([1], SAMPLING))
            with pytest.raises(JournalError, match="the disk is full"):
                await engine.submit([1])
            with pytest.raises(JournalError, match="the disk is full"):
                engine.run([[1]])
            with pytest.raises(JournalError, match="the disk is full"):
                await collect(engine.resume("a"))

    asyncio.run(scenario())
    durable = durable_outputs(store).by_id
    for name, deltas in seen.items():
        tokens = joined(deltas)
        known = durable[name].token_ids if name in durable else []
        assert tokens == known[: len(tokens)], "a token was seen that is not on disk"
        assert tokens == known, "a stream gets all that is durable before it fails"
    store.fail_from_position = None
    store.close()
    with Engine(MODEL, str(tmp_path / "journal.db")) as engine:
        for done in engine.wait():
            assert done.token_ids == must_produce([1, 2], SAMPLING)


def test_a_fenced_engine_stops_and_says_so() -> None:
    journal = MemoryJournal()
    with Engine("simulated?eos=-1&step_ms=1", MemoryStore(journal)) as engine:
        request_id = engine.enqueue([1], SamplingParams(seed=1, max_tokens=3000))
        with Engine("simulated?eos=-1", MemoryStore(journal)) as usurper:
            with pytest.raises(Fenced, match="stop this engine"):
                engine.wait([request_id])
            (done,) = usurper.wait([request_id])
    assert done.token_ids == must_produce([1], SamplingParams(seed=1, max_tokens=3000), "simulated?eos=-1")


def test_a_failure_while_closing_is_raised_by_close() -> None:
    store = FaultyStore(MemoryStore())
    engine = Engine(MODEL, store).open()
    engine.run([[1]], SAMPLING)
    store.fail_from_position = 0
    with pytest.raises(JournalError, match="the disk is full"):
        engine.close()
    engine.close()


@pytest.mark.parametrize("position", [0, 1])
def test_a_journal_that_fails_at_open_is_an_error_at_open(position: int) -> None:
    store = FaultyStore(MemoryStore(), fail_from_position=position)
    with pytest.raises(JournalError, match="the disk is full"), Engine(MODEL, store) as engine:
        engine.run([[1]], SAMPLING)


def test_nothing_is_seen_before_it_is_durable() -> None:
    """The store takes its time: whenever a client sees a token, the store has already said that it has the record."""
    store = FaultyStore(MemoryStore())
    store.delay_s = 0.005
    checked = 0

    def check(delta: Delta) -> None:
        nonlocal checked
        end = delta.index + len(delta.token_ids)
        assert durable_outputs(store).by_id[delta.request_id].token_ids[delta.index : end] == delta.token_ids
        checked += 1

    with Engine(MODEL + "&step_ms=2", store) as engine:
        engine.run([[1], [2], [3]], SAMPLING, on_delta=check)
    assert checked >= 10


def test_while_the_disk_stands_still_nothing_is_delivered_and_the_computing_goes_on() -> None:
    store = FaultyStore(MemoryStore())
    seen: list[Delta] = []
    with Engine(MODEL, store) as engine:
        request_id = engine.enqueue([1], SamplingParams(seed=1, max_tokens=2000))
        store.gate.clear()
        steps = engine.stats().steps
        eventually(lambda: engine.stats().steps > steps + 50)
        waiter = threading.Thread(target=lambda: engine.wait([request_id], seen.append))
        waiter.start()
        durable = durable_outputs(store).by_id[request_id].token_ids
        eventually(lambda: sum(len(d.token_ids) for d in seen) >= len(durable) or not durable)
        assert joined(list(seen)) == durable[: len(joined(list(seen)))]
        assert engine.stats().tokens > len(durable)
        store.gate.set()
        waiter.join(20)
    assert joined(seen) == must_produce([1], SamplingParams(seed=1, max_tokens=2000))


def test_a_submission_is_acknowledged_when_it_is_on_disk() -> None:
    store = FaultyStore(MemoryStore())
    acknowledged: list[str] = []
    with Engine(MODEL, store) as engine:
        store.gate.clear()
        client = threading.Thread(target=lambda: acknowledged.append(engine.enqueue([1], SAMPLING, request_id="a")))
        client.start()
        eventually(lambda: engine.stats().requests == 1)
        client.join(0.05)
        assert acknowledged == []
        store.gate.set()
        client.join(10)
        assert acknowledged == ["a"]
        engine.wait(["a"])


def resumed(engine: Engine, request_id: str) -> list[Delta]:
    return asyncio.run(collect(engine.resume(request_id)))


@contextmanager
def on_its_way(engine: Engine, store: FaultyStore) -> Iterator[ThreadPoolExecutor]:
    """Request `a` is decided, and the disk stands still; some threads beside."""
    with ThreadPoolExecutor(3) as threads:
        store.gate.clear()
        threads.submit(engine.enqueue, [1], SAMPLING, request_id="a")
        try:
            eventually(lambda: engine.knows("a"))
            yield threads
        finally:
            store.gate.set()


def test_who_asks_for_a_request_that_is_on_its_way_to_the_disk_waits_for_it() -> None:
    store = FaultyStore(MemoryStore())
    with Engine(MODEL, store) as engine, on_its_way(engine, store) as threads:
        stream = threads.submit(resumed, engine, "a")
        with pytest.raises(TimeoutError):
            stream.result(0.1)
        store.gate.set()
        assert joined(stream.result(10)) == must_produce([1], SAMPLING)


def test_who_asks_while_the_disk_knows_more_than_the_outbox_waits_for_the_outbox_however_long_that_takes() -> None:
    store, hold = FaultyStore(MemoryStore()), threading.Event()
    with Engine(MODEL, store) as engine, on_its_way(engine, store) as threads:
        core = engine._live().core
        threads.submit(core.look(lambda _: hold.wait(20)).result)  # the engine's thread is busy from here on
        store.gate.set()
        eventually(lambda: "a" in durable_outputs(store).by_id)
        assert core.delivery.find("a") is None
        stream = threads.submit(resumed, engine, "a")
        with pytest.raises(TimeoutError):
            stream.result(5.5)
        hold.set()
        assert joined(stream.result(10)) == must_produce([1], SAMPLING)


def test_who_waits_for_a_request_hears_of_a_disk_that_fails_meanwhile() -> None:
    store = FaultyStore(MemoryStore())
    with Engine(MODEL, store) as engine, on_its_way(engine, store) as threads:
        stream = threads.submit(resumed, engine, "a")
        with pytest.raises(TimeoutError):
            stream.result(0.1)
        store.fail_from_position = 0
        store.gate.set()
        with pytest.raises(JournalError, match="the disk is full"):
            stream.result(10)


def test_the_computing_waits_for_a_disk_that_is_too_far_behind() -> None:
    store = FaultyStore(MemoryStore())
    with Engine(MODEL, store, max_in_flight_steps=1) as engine:
        writer = engine._live().core._writer
        writer._max_pending_records //= 10  # 4,096 of them take seconds
        most = writer._max_pending_records
        request_id = engine.enqueue([1], SamplingParams(seed=1, max_tokens=most))
        store.gate.clear()
        eventually(lambda: engine.stats().steps > most // 3, timeout_s=30)
        eventually(lambda: writer.pending >= most, timeout_s=30)
        steps = engine.stats().steps
        threading.Event().wait(0.2)
        assert engine.stats().steps <= steps + 1
        store.gate.set()
        (done,) = engine.wait([request_id])
    assert done.token_ids == must_produce([1], SamplingParams(seed=1, max_tokens=most))


def test_a_disk_slower_than_the_computing_holds_it_back_and_the_backlog_stays_bounded() -> None:
    """Not a disk that stands still: one that takes its time with every group, for as long as the engine runs."""
    store = FaultyStore(MemoryStore())
    store.delay_s = 0.05
    backlog: list[int] = []
    with Engine(MODEL, store, max_in_flight_steps=1) as engine:
        writer = engine._live().core._writer
        writer._max_pending_records = 40
        engine.run([[1]], SamplingParams(seed=1, max_tokens=600), on_delta=lambda _: backlog.append(writer.pending))
        (done,) = engine.run([[2]], SAMPLING)
    assert done.token_ids == must_produce([2], SAMPLING)
    assert 10 <= max(backlog) <= 45, f"{max(backlog)} records were waiting for the disk"


def test_buffered_delivers_before_the_disk_has_it() -> None:
    store = FaultyStore(MemoryStore())
    seen: list[Delta] = []
    with Engine(MODEL, store, durability="buffered") as engine:
        store.gate.clear()
        (done,) = engine.run([[1]], SAMPLING, on_delta=seen.append)
        assert done.token_ids == joined(seen) == must_produce([1], SAMPLING)
        assert engine.stats().durable_position <= 2
        store.gate.set()


def test_buffered_hurries_no_disk_that_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit at the moment of a delivery would take the processor from it."""
    monkeypatch.setattr("refold.journal.writer.MAX_PATIENCE_S", 60.0)
    journal = str(tmp_path / "journal.db")

    def known_of(request_id: str) -> list[int]:
        with closing(open_reader(journal)) as reader:
            known = durable_outputs(reader).by_id
        return known[request_id].token_ids if request_id in known else []

    with Engine(f"{MODEL}&step_ms=4", journal, durability="buffered") as engine:
        (done,) = engine.run([[1]], SAMPLING)
        assert done.token_ids == must_produce([1], SAMPLING)
        threading.Event().wait(0.2)
        assert len(known_of(done.request_id)) < len(done.token_ids), "what came with the submission, at most"
    assert known_of(done.request_id) == done.token_ids, "closing waits"


def test_two_engines_on_one_journal_are_one_too_many(tmp_path: Path) -> None:
    journal = str(tmp_path / "journal.db")
    with Engine(MODEL, journal) as engine:
        with pytest.raises(JournalOwned, match="stop that engine"), Engine(MODEL, journal):
            pass
        (done,) = engine.run([[1]], SAMPLING)
        assert done.token_ids == must_produce([1], SAMPLING)
    with Engine(MODEL, journal) as engine:
        engine.run([[1]], SAMPLING)


def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "letter.txt"
    file.write_text("Dear reader,\n" * 100)
    with pytest.raises(JournalError), Engine(MODEL, str(file)):
        pass
    assert file.read_text() == "Dear reader,\n" * 100


def finished_journal() -> MemoryJournal:
    journal = MemoryJournal()
    with Engine(MODEL, MemoryStore(journal)) as engine:
        engine.run([[1], [2]], SAMPLING)
    return journal


def test_a_changed_record_is_found_at_open() -> None:
    journal = finished_journal()
    records = journal.records["main"]
    place = next(i for i, record in enumerate(records) if b"OutputDelivered" in record.body)
    records[place] = records[place]._replace(body=records[place].body.replace(b"OutputDelivered", b"OutputDelivereD"))
    with pytest.raises(JournalCorrupt) as caught, Engine(MODEL, MemoryStore(journal)):
        pass
    assert (caught.value.position, caught.value.kind) == (place, "edited")


def forge(journal: MemoryJournal, body: bytes, content: bytes = b"") -> int:
    """Append a record that is well chained, whatever it says; returns its position."""
    head = journal.heads["main"]
    record = seal(head, 0, body, content)
    journal.records["main"].append(record)
    journal.heads["main"] = head_after(record)
    return record.position


def test_a_record_that_contradicts_the_state_is_found_at_open() -> None:
    journal = finished_journal()
    event = OutputDelivered(step=10**6, handles=[1], token_ids=[1], first_output_indices=[0])
    position = forge(journal, *encode([event]))
    with pytest.raises(JournalCorrupt, match=f"record {position}: OutputDelivered contradicts") as caught:
        Engine(MODEL, MemoryStore(journal)).open()
    assert caught.value.position == position


def test_a_digest_that_the_state_doesnt_have_is_found_at_open() -> None:
    journal = finished_journal()
    position = forge(journal, *encode([StateDigest(digest="0" * 64)]))
    with pytest.raises(InvariantViolation, match=f"record {position} says that the state hashed to 0000"):
        Engine(MODEL, MemoryStore(journal)).open()


def test_a_record_of_an_unknown_vocabulary_is_found_at_open() -> None:
    journal = finished_journal()
    position = forge(
        journal, encode([RequestAborted(handle=1, cause="x")]).body.replace(b"RequestAborted", b"RequestAdored")
    )
    with pytest.raises(JournalCorrupt, match=f"record {position} holds no list of events"):
        Engine(MODEL, MemoryStore(journal)).open()


def test_digests_are_recorded_as_the_journal_grows() -> None:
    journal = MemoryJournal()
    with Engine(MODEL, MemoryStore(journal)) as engine:
        engine.run([[1]], SamplingParams(seed=1, max_tokens=600))
    digests = [e for e in lawful_events(MemoryStore(journal)) if isinstance(e, StateDigest)]
    assert len(digests) >= 1 + len(journal.records["main"]) // 260
