"""Opening by a snapshot: the same engine as by folding everything, or, if anything about it is doubtful, by folding everything."""

import asyncio
import json
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from refold import Engine, SamplingParams, migrations
from refold.engine import folding, snapshotting, spared
from refold.engine.folding import Base, beginning, head_before, nearest, snapshot_of
from refold.engine.history.replay import replay, state_at
from refold.engine.history.timeline import Timeline
from refold.engine.opening import fold_journal, fold_on
from refold.engine.snapshotting import SnapshotKeeper
from refold.engine.spared import SparedRecords
from refold.journal.copying import copy_stream
from refold.journal.errors import JournalCorrupt, JournalError, NotFound
from refold.journal.record import Head
from refold.journal.snapshots import Snapshot
from refold.journal.store import JournalReader
from refold.journal.stores import open_reader, open_store
from refold.scheduler.state import digest
from tests.history.journals import eventful_lives, write_journal
from tests.kit.engines import collect, eventually, joined, lawful_events, must_produce
from tests.kit.sameness import differences

MODEL = "simulated?vocab=1000&eos=-1"
SLOW = f"{MODEL}&step_ms=1"


@pytest.fixture
def journal(tmp_path: Path) -> str:
    path = tmp_path / "journal.db"
    write_journal(path, eventful_lives()[0])
    return str(path)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, object]]]:
    heard: list[tuple[str, dict[str, object]]] = []
    for module in (folding, snapshotting):
        monkeypatch.setattr(module, "warn", lambda what, **facts: heard.append((what, facts)))
    return heard


def whole_fold(journal: str, stop: int | None = None) -> Base:
    reader = open_reader(journal)
    head = reader.head() if stop is None else head_before(reader, "main", stop)
    return fold_on(reader, "main", beginning(), head)


def keep(journal: str, *snapshots: Snapshot) -> None:
    store = open_store(journal)
    store.open_replica()
    for snapshot in snapshots:
        store.save_snapshot("main", snapshot)
    store.close()


def kept_at(journal: str, position: int) -> Snapshot:
    snapshot = snapshot_of(*whole_fold(journal, position))
    keep(journal, snapshot)
    return snapshot


def opened(journal: str) -> tuple[Base, int]:
    reader = open_reader(journal)
    base, recovery = fold_journal(reader, "main", reader.head())
    assert recovery.records == reader.head().position
    return base, recovery.from_snapshot


def test_a_journal_opens_by_its_newest_snapshot_to_the_same_fold(journal: str, warnings: list) -> None:
    end = whole_fold(journal)
    for position in range(1, end.head.position + 1, 3):
        kept_at(journal, position)
        base, from_snapshot = opened(journal)
        assert from_snapshot == position
        assert base.head == end.head
        assert differences(end.folded, base.folded) == []
    assert warnings == []


DAMAGE = {
    "position": "position = position + 1",
    "position beyond the end": "position = 999999",
    "epoch": "engine_epoch = engine_epoch + 1",
    "hash": "hash = zeroblob(32)",
    "version": "version = 'another'",
    "digest": "digest = 'f' || substr(digest, 2)",
    "checksum": "checksum = zeroblob(32)",
    "a byte": "body = CAST(substr(body, 1, 40) || x'00' || substr(body, 42) AS BLOB)",
    "cut off": "body = substr(body, 1, length(body) - 1)",
    "empty": "body = zeroblob(0)",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_snapshot_is_a_warning_and_a_fold_from_the_start(journal: str, damage: str, warnings: list) -> None:
    kept_at(journal, 20)
    with sqlite3.connect(journal) as connection:
        connection.execute(f"UPDATE journal_snapshots SET {damage}")
    base, from_snapshot = opened(journal)
    assert from_snapshot == 0
    assert differences(whole_fold(journal).folded, base.folded) == []
    assert [what for what, _ in warnings] == ["snapshot_ignored"]


def forged(snapshot: Snapshot, **fields: object) -> Snapshot:
    from refold.journal.snapshots import checksum_of

    changed = snapshot._replace(**fields)  # type: ignore[arg-type]
    return changed._replace(checksum=checksum_of(changed))


@pytest.mark.parametrize("what", ["hash", "epoch", "position", "state", "version", "body"])
def test_a_snapshot_that_is_sound_but_not_of_this_journal_is_ignored(journal: str, what: str, warnings: list) -> None:
    good = snapshot_of(*whole_fold(journal, 20))
    other = snapshot_of(*whole_fold(journal, 19))
    wrong = {
        "hash": forged(good, hash=bytes(32)),
        "epoch": forged(good, engine_epoch=9),
        "position": forged(good, position=21),
        "state": forged(good, body=other.body),
        "version": forged(good, version="0" * 32),
        "body": forged(good, body=b"no zlib"),
    }[what]
    keep(journal, wrong)
    base, from_snapshot = opened(journal)
    assert from_snapshot == 0
    assert differences(whole_fold(journal).folded, base.folded) == []
    assert len(warnings) == 1


def test_an_older_snapshot_serves_when_the_newest_is_damaged(journal: str, warnings: list) -> None:
    kept_at(journal, 12)
    keep(journal, kept_at(journal, 30)._replace(checksum=bytes(32)))
    assert opened(journal)[1] == 12
    assert len(warnings) == 1


def test_a_snapshot_whose_position_was_moved_beyond_the_end_is_told_though_an_older_one_serves(
    journal: str, warnings: list
) -> None:
    kept_at(journal, 12)
    kept_at(journal, 30)
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_snapshots SET position = 999999 WHERE position = 30")
    base, from_snapshot = opened(journal)
    assert from_snapshot == 12
    ((what, facts),) = warnings
    assert what == "snapshot_ignored"
    assert facts["reason"] == f"it says that it was made of 999999 records, and the journal has {base.head.position}"


@pytest.mark.parametrize("damage", [damage for what, damage in DAMAGE.items() if what != "version"])
def test_an_engine_drops_a_snapshot_that_it_can_never_use_and_says_so_once(
    journal: str, damage: str, warnings: list
) -> None:
    kept_at(journal, 12)
    kept_at(journal, 20)
    with sqlite3.connect(journal) as connection:
        connection.execute(f"UPDATE journal_snapshots SET {damage} WHERE position = 20")
    damaged = max(entry.position for entry in open_reader(journal).snapshots())
    for _ in range(2):
        store = open_store(journal)
        _, recovery = fold_journal(store, "main", store.open_stream())
        assert recovery.from_snapshot == 12
        store.close()
    ((what, facts),) = warnings
    assert what == "snapshot_ignored"
    assert (facts["journal"], facts["position"], facts["folded_from"], facts["dropped"]) == (journal, damaged, 12, True)
    assert [entry.position for entry in open_reader(journal).snapshots()] == [12]


def test_a_snapshot_of_another_version_and_one_behind_a_damaged_record_are_kept(journal: str, warnings: list) -> None:
    keep(
        journal, forged(snapshot_of(*whole_fold(journal, 12)), version="0" * 32), snapshot_of(*whole_fold(journal, 20))
    )
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 19")
    store = open_store(journal)
    with pytest.raises(JournalError, match="record 19 "):
        fold_journal(store, "main", store.open_stream())
    store.close()
    assert [entry.position for entry in open_reader(journal).snapshots()] == [12, 20]


def test_a_sound_snapshot_beyond_the_end_names_the_head_that_is_gone(journal: str, warnings: list) -> None:
    snapshot = kept_at(journal, 30)
    with sqlite3.connect(journal) as connection:
        connection.execute("DELETE FROM journal_records WHERE position >= 20")
        connection.execute(
            "UPDATE journal_streams SET head_position = 20, head_hash = (SELECT hash FROM journal_records WHERE position = 19)"
        )
    Path(f"{journal}.mark").unlink()
    for _ in range(2):
        store = open_store(journal)
        fold_journal(store, "main", store.open_stream())
        store.close()
    ((_, facts),) = warnings
    assert facts["reason"] == (
        "it says that it was made of 30 records, and the journal has 20: the others were acknowledged, and are gone; it names the "
        f"head 30:{snapshot.hash.hex()}"
    )
    assert facts["dropped"] is True


def test_a_reader_says_each_time_it_is_asked_and_leaves_the_snapshot_alone(journal: str, warnings: list) -> None:
    keep(journal, kept_at(journal, 30)._replace(checksum=bytes(32)))
    reader = open_reader(journal)
    state_at(reader, 35)
    state_at(reader, 10)
    ((what, facts),) = warnings
    assert (what, facts["journal"], facts["position"], facts["folded_from"]) == ("snapshot_ignored", journal, 30, 0)
    assert len(reader.snapshots()) == 1  # type: ignore[attr-defined]


def test_a_reader_is_told_of_a_snapshot_beyond_the_end_wherever_it_looks(journal: str, warnings: list) -> None:
    kept_at(journal, 30)
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_snapshots SET position = 999999")
    state_at(open_reader(journal), 10)
    ((_, facts),) = warnings
    assert facts["position"] == 999999


def test_a_timeline_that_walks_about_says_it_once(journal: str, warnings: list) -> None:
    keep(journal, kept_at(journal, 30)._replace(checksum=bytes(32)))
    timeline = Timeline(open_reader(journal))
    for position in (35, 3, 33, 5, 34):
        timeline.seek(position)
    assert [facts["position"] for _, facts in warnings] == [30]


FILE_DAMAGE = {
    "its first byte": lambda path: path.write_bytes(b"?" + path.read_bytes()[1:]),
    "a byte in its middle": lambda path: path.write_bytes(path.read_bytes()[:500] + b"?" + path.read_bytes()[501:]),
    "its end": lambda path: os.truncate(path, 400),
    "all of it": lambda path: os.truncate(path, 0),
    "its name": lambda path: path.rename(path.with_name(f"{25:020d}.snapshot")),
}


@pytest.mark.parametrize("damage", FILE_DAMAGE.values(), ids=FILE_DAMAGE.keys())
def test_a_damaged_snapshot_beside_segments_is_told_and_dropped_like_any_other(
    journal: str, tmp_path: Path, damage: Callable[[Path], object], warnings: list
) -> None:
    kept_at(journal, 12)
    plain = f"segments:///{tmp_path / 'plain'}"
    migrations.ensure(plain)
    store = open_store(plain)
    copy_stream(open_reader(journal), store, "main")  # type: ignore[arg-type]
    for position in (12, 30):
        store.save_snapshot("main", snapshot_of(*whole_fold(journal, position)))  # type: ignore[attr-defined]
    store.close()
    damage(tmp_path / "plain" / "main" / f"{30:020d}.snapshot")
    reader = open_reader(plain)
    assert nearest(reader, "main", 28 if damage is FILE_DAMAGE["its name"] else 35).head.position == 12
    for _ in range(2):
        store = open_store(plain)
        _, recovery = fold_journal(store, "main", store.open_stream())
        assert recovery.from_snapshot == 12
        store.close()
    assert [facts.get("dropped", False) for _, facts in warnings] == [False, True]
    assert [entry.position for entry in reader.snapshots()] == [12]  # type: ignore[attr-defined]
    assert not list((tmp_path / "plain" / "main").glob("*[23]?.snapshot"))


def test_a_snapshot_beside_segments_that_can_not_be_read_keeps_nobody_from_the_records(
    journal: str, tmp_path: Path, warnings: list
) -> None:
    plain = f"segments:///{tmp_path / 'plain'}"
    migrations.ensure(plain)
    store = open_store(plain)
    copy_stream(open_reader(journal), store, "main")  # type: ignore[arg-type]
    store.close()
    (tmp_path / "plain" / "main" / f"{30:020d}.snapshot").mkdir()
    assert nearest(open_reader(plain), "main", 35).head.position == 0
    store = open_store(plain)
    _, recovery = fold_journal(store, "main", store.open_stream())
    store.close()
    assert recovery.from_snapshot == 0
    assert [facts["position"] for _, facts in warnings] == [30, 30]


def test_a_state_that_a_later_record_contradicts_is_folded_again_from_the_start(journal: str, warnings: list) -> None:
    """The digest can't see everything: whatever passes it and is wrong shows at the next record that doesn't fit."""
    base = whole_fold(journal, 20)
    base.folded.totals.steps += 1
    base.folded.outbox.by_handle.clear()
    keep(journal, snapshot_of(*base))
    again, from_snapshot = opened(journal)
    assert from_snapshot == 0
    assert differences(whole_fold(journal).folded, again.folded) == []
    assert [what for what, _ in warnings] == ["snapshot_ignored"]


def test_a_snapshot_beyond_the_head_is_not_used(journal: str, warnings: list) -> None:
    kept_at(journal, 30)
    reader = open_reader(journal)
    assert nearest(reader, "main", 29).head.position == 0
    assert nearest(reader, "main", 30).head.position == 30
    assert warnings == []


def test_a_changed_record_before_the_snapshot_is_noticed(journal: str, warnings: list) -> None:
    kept_at(journal, 20)
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 19")
    with pytest.raises(JournalError, match="19"):
        opened(journal)
    assert len(warnings) == 1


def test_states_at_every_position_are_those_of_a_whole_replay(journal: str) -> None:
    for position in (1, 9, 10, 25):
        kept_at(journal, position)
    reader = open_reader(journal)
    for step in replay(reader):
        found = state_at(reader, step.record.position)
        assert found is not None
        assert (found.record, found.events) == (step.record, step.events)
        assert digest(found.state) == digest(step.state)
    assert state_at(reader).record == step.record
    with pytest.raises(NotFound):
        state_at(reader, step.record.position + 1)


# -- engines ----------------------------------------------------------------------------------------------------------


def serve(journal: str, first: int, count: int, **options: object) -> None:
    with Engine(MODEL, journal, snapshot_every_records=32, **options) as engine:  # type: ignore[arg-type]
        sampling = [SamplingParams(seed=i, max_tokens=20) for i in range(first, first + count)]
        ids = [f"r{i}" for i in range(first, first + count)]
        engine.run([[1, 2, 3]] * count, sampling, request_ids=ids)


def test_an_engine_leaves_a_snapshot_and_the_next_one_opens_by_it(tmp_path: Path) -> None:
    journal = str(tmp_path / "engine.db")
    serve(journal, 0, 12)
    with Engine(MODEL, journal) as engine:
        assert engine.recovery is not None
        assert engine.recovery.records - 4 < engine.recovery.from_snapshot <= engine.recovery.records

        async def again() -> None:
            for i in range(12):
                tokens = joined(await collect(engine.resume(f"r{i}")))
                assert tokens == must_produce([1, 2, 3], SamplingParams(seed=i, max_tokens=20), MODEL)

        asyncio.run(again())
        assert engine.stats().tokens == 240
    assert lawful_events(open_reader(journal))


def test_snapshots_are_made_beside_a_running_engine(
    tmp_path: Path, warnings: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotting, "RESTS_AFTER_SAVING", 0)
    journal = str(tmp_path / "engine.db")
    with Engine(SLOW, journal, snapshot_every_records=16) as engine:
        engine.enqueue([1, 2], SamplingParams(seed=1, max_tokens=4000), request_id="long")
        reader = open_reader(journal)
        eventually(lambda: len(reader.snapshots()) >= 2)
        made = [reader.load_snapshot("main", entry.position) for entry in reader.snapshots()]
        for snapshot in made:
            if snapshot is not None:
                assert digest(whole_fold(journal, snapshot.position).folded.state) == snapshot.digest
        engine.abort("long")
    assert warnings == []
    assert opened(journal)[1] > 0


def test_a_session_goes_on_by_a_snapshot(tmp_path: Path) -> None:
    journal = str(tmp_path / "engine.db")

    async def first() -> list[int]:
        async with Engine(MODEL, journal, snapshot_every_records=8) as engine:
            session = await engine.open_session([1, 2, 3], SamplingParams(seed=1, max_tokens=30), request_id="talk")
            tokens = joined(await collect(session.turn()))
            await session.extend([4, 5], SamplingParams(seed=1, max_tokens=30))
            return tokens

    async def second() -> list[int]:
        async with Engine(MODEL, journal, snapshot_every_records=8) as engine:
            assert engine.recovery is not None
            assert engine.recovery.from_snapshot > 0
            async with await engine.attach_session("talk", after=29) as session:
                return joined(await collect(session.turn()), 30)

    assert len(asyncio.run(first())) == 30
    assert len(asyncio.run(second())) == 30
    assert lawful_events(open_reader(journal))


def test_zero_is_never(tmp_path: Path) -> None:
    journal = str(tmp_path / "engine.db")
    with Engine(MODEL, journal, snapshot_every_records=0) as engine:
        engine.run([[1]] * 8, SamplingParams(seed=1, max_tokens=50))
    assert open_reader(journal).snapshots() == []


class _FullDisk:
    """A store that keeps records but has no room for snapshots."""

    def __init__(self, store: object) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def save_snapshot(self, stream: str, snapshot: Snapshot) -> None:
        raise JournalError("no space left on device; free some")


def test_a_snapshot_that_cannot_be_kept_ends_snapshots_and_nothing_else(journal: str, warnings: list) -> None:
    store = open_store(journal)
    store.open_stream()
    keeper = SnapshotKeeper(_FullDisk(store), "main", 0, 8)  # type: ignore[arg-type]
    keeper.opened(whole_fold(journal))
    keeper.became_durable(store.head().position)
    keeper.close(lambda: whole_fold(journal))
    assert [what for what, _ in warnings] == ["snapshots_off"]
    store.close()


def test_the_version_is_that_of_the_sources() -> None:
    version = folding.fold_version()
    assert len(version) == 32
    names = [name for name, _ in folding._sources()]
    assert {"scheduler/fold.py", "projections/outbox.py", "scheduler/images.py", "events.py", "codec.py"} <= set(names)


def test_the_head_before_a_position_is_the_one_that_was_there(journal: str) -> None:
    reader = open_reader(journal)
    heads = [Head(0, bytes(32), 0)] + [Head(r.position + 1, r.hash, r.engine_epoch) for r in reader.read()]
    assert [head_before(reader, "main", position) for position in range(len(heads))] == heads
    with pytest.raises(JournalError):
        head_before(reader, "main", len(heads))


# -- what a snapshot spares -------------------------------------------------------------------------------------------


@pytest.fixture
def edited(tmp_path: Path) -> str:
    """A journal that opens by a snapshot, and has an old record that isn't what was written."""
    journal = str(tmp_path / "engine.db")
    serve(journal, 0, 12)
    edit(journal)
    return journal


def edit(journal: str) -> None:
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 5")


def test_an_engine_does_not_open_on_a_journal_whose_old_records_were_changed(edited: str) -> None:
    num_records = open_reader(edited).head().position
    with pytest.raises(JournalCorrupt, match=f"^{re.escape(edited)}: record 5 ") as caught, Engine(MODEL, edited):
        pass
    assert (caught.value.position, caught.value.kind) == (5, "edited")
    assert open_reader(edited).head().position == num_records


def test_an_engine_on_a_long_journal_opens_at_once_and_stops_when_a_changed_record_is_found(
    edited: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spared, "FEW_RECORDS", 8)
    engine = Engine(SLOW, f"sqlite:///{edited}").open()
    with pytest.raises(JournalCorrupt, match=rf"^{re.escape(edited)}: record 5 .*restore a backup"):
        engine.run([[1]], SamplingParams(seed=1, max_tokens=4000))
    engine.close()
    (stopped,) = [line for line in capsys.readouterr().err.splitlines() if "engine_stopped" in line]
    assert json.loads(stopped)["journal"] == edited
    assert json.loads(stopped)["reason"].startswith(f"{edited}: record 5 ")


def test_a_damaged_journal_in_a_store_of_ones_own_is_called_by_its_path(edited: str) -> None:
    store = open_store(edited)
    with pytest.raises(JournalCorrupt, match=f"^{re.escape(edited)}: record 5 "), Engine(MODEL, store):
        pass
    store.close()


def test_a_long_journal_that_is_whole_is_checked_beside_the_engine_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spared, "FEW_RECORDS", 8)
    journal = str(tmp_path / "engine.db")
    serve(journal, 0, 12)
    with Engine(MODEL, journal) as engine:
        thread = engine._live().spared._thread
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()
        engine.run([[1]], SamplingParams(seed=1, max_tokens=20))


@pytest.mark.parametrize("position", [0, 1, 17, 30, -2, -1])
def test_many_short_lives_on_a_long_journal_come_past_every_record(
    journal: str, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spared, "FEW_RECORDS", 40)  # so each checks 2 before it opens, and nothing beside
    reader = open_reader(journal)
    end = reader.head().position
    assert end > 40
    with sqlite3.connect(journal) as connection:
        at = position % end
        connection.execute("UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = ?", (at,))
    found = [where for epoch in range(3, 3 + end) if (where := damage_found(reader, epoch)) is not None]
    assert found, f"nobody came past record {at} of {end}"
    assert set(found) <= {at, at + 1}


def damage_found(reader: JournalReader, epoch: int) -> int | None:
    """Where an engine of this epoch finds damage before it opens."""
    head = reader.head()._replace(engine_epoch=epoch)
    try:
        SparedRecords(reader, "main", head, head.position).check_before_opening()
    except JournalCorrupt as error:
        return error.position
    return None


def test_an_engine_that_closes_does_not_wait_for_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spared, "FEW_RECORDS", 8)
    monkeypatch.setattr(snapshotting, "SLICE_S", 0.0)
    monkeypatch.setattr(snapshotting, "RESTS", 10_000)
    journal = str(tmp_path / "engine.db")
    serve(journal, 0, 12)
    with Engine(MODEL, journal) as engine:
        engine.run([[1]], SamplingParams(seed=1, max_tokens=2))
