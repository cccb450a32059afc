"""Redaction and anchors through the engine: alive, at rest, and across restarts."""

import asyncio
import contextlib
import errno
import shutil
from functools import partial
from pathlib import Path

import pytest

from refold import Engine, JournalOwned, NotFound, Rejected, SamplingParams
from refold.engine.history.heads import read_head
from refold.engine.history.verify import verify_journal
from refold.engine.redacting import redact_at_rest
from refold.journal.codec import decode
from refold.journal.errors import JournalCorrupt, RefoldError
from refold.journal.events import ContentRedacted
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.stores.segments import folder
from refold.journal.stores.segments.store import SegmentStore
from tests.kit.engines import eventually
from tests.kit.engines import must_produce as must_produce_on
from tests.kit.faulty_files import Fault, FaultyFiles

MODEL = "simulated?vocab=1000000&eos=-1&step_ms=1"
SHORT = SamplingParams(seed=3, max_tokens=30)
LONG = SamplingParams(seed=9, max_tokens=4_000)
must_produce = partial(must_produce_on, model=MODEL)
HUSH = SamplingParams(seed=77, max_tokens=30)
SECRET = [765_431, 765_432, 765_433]


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal.db")


def raw(journal: str) -> bytes:
    path = Path(journal)
    return b"".join(file.read_bytes() for file in path.parent.iterdir() if file.name.startswith(path.name))


def is_said(journal: str, tokens: list[int]) -> bool:
    data = raw(journal)
    return any(str(token).encode() in data for token in tokens if token >= 100_000)


def test_the_next_engine_finishes_an_erasure_that_was_cut_short_in_segments(tmp_path: Path) -> None:
    root = tmp_path / "J"
    folder.create(root)
    files = FaultyFiles(root)
    store = SegmentStore(root, files=files)
    with Engine(MODEL, store, snapshot_every_records=0) as engine:
        engine.run([SECRET], [HUSH], request_ids=["secret"])
    store.close()
    files.rule = lambda call: (
        Fault("error", errno.EIO) if call.name == "rename" and call.path.suffix == ".sealed" else None
    )
    store = SegmentStore(root, files=files)
    with contextlib.suppress(RefoldError), Engine(MODEL, store, snapshot_every_records=0) as engine:
        assert "opening the journal finishes it" in engine.redact("secret").left
    store.close()
    assert list(root.rglob("*.at-*"))
    with Engine(MODEL, f"segments:///{root}", snapshot_every_records=0) as engine:
        assert engine.recovery is not None
    assert not list(root.rglob("*.at-*"))
    verify_journal(open_reader(f"segments:///{root}"))


def test_a_live_engine_forgets_one_request_and_goes_on_with_the_others(journal: str) -> None:
    with Engine(MODEL, journal, snapshot_every_records=32) as engine:
        engine.run([SECRET, [5, 6]], [HUSH, SHORT], request_ids=["secret", "other"])
        engine.enqueue([7], LONG, request_id="long")
        done = engine.redact("secret", "asked by mail")
        assert done.records >= 30
        assert done.left == ""
        assert not is_said(journal, [*SECRET, *must_produce(SECRET, HUSH)])
        with pytest.raises(Rejected, match="'secret' was redacted"):
            engine.wait(["secret"])
        with pytest.raises(Rejected, match="redacted before"):
            engine.redact("secret")
        with pytest.raises(Rejected, match="'long' is running"):
            engine.redact("long")
        with pytest.raises(NotFound):
            engine.redact("nobody")
        assert engine.wait(["other"])[0].token_ids == must_produce([5, 6], SHORT)
        assert engine.run([[8, 9]], SHORT)[0].token_ids == must_produce([8, 9], SHORT)
        engine.abort("long")
        engine.wait(["long"])
    assert not is_said(journal, [*SECRET, *must_produce(SECRET, HUSH)])
    verdict = verify_journal(open_reader(journal))
    assert (verdict.num_redacted_requests, verdict.num_redacted_records) == (1, done.records)
    events = [event for record in open_reader(journal).read() for event in decode(record)]
    assert [e.reason for e in events if isinstance(e, ContentRedacted)] == ["asked by mail"]


def test_an_engine_that_opens_a_redacted_journal_goes_on(journal: str) -> None:
    with Engine(MODEL, journal) as engine:
        engine.run([SECRET, [5, 6]], [HUSH, SHORT], request_ids=["secret", "other"])
        engine.redact("secret")
    for _ in range(2):
        with Engine(MODEL, journal) as engine:
            with pytest.raises(Rejected, match="'secret' was redacted"):
                engine.wait(["secret"])
            with pytest.raises(Rejected, match="'secret' was redacted"):
                asyncio.run(anext(engine.resume("secret")))
            assert engine.wait(["other"])[0].token_ids == must_produce([5, 6], SHORT)
            with pytest.raises(Rejected):
                engine.enqueue([1], SHORT, request_id="secret")
    verify_journal(open_reader(journal))


def test_a_journal_at_rest_is_redacted_and_a_live_one_refused(journal: str) -> None:
    with Engine(MODEL, journal) as engine:
        engine.run([SECRET, [5, 6]], [HUSH, SHORT], request_ids=["secret", "other"])
        with pytest.raises(JournalOwned):
            redact_at_rest(journal, "secret")
    assert is_said(journal, SECRET)
    done = redact_at_rest(journal, "secret", "asked")
    assert done.left == ""
    assert not is_said(journal, [*SECRET, *must_produce(SECRET, HUSH)])
    verify_journal(open_reader(journal))
    for request_id, error in (("secret", Rejected), ("nobody", NotFound), ("", Rejected)):
        with pytest.raises(error):
            redact_at_rest(journal, request_id)
    with pytest.raises(Rejected, match="printable"):
        redact_at_rest(journal, "other", "\n")
    with Engine(MODEL, journal) as engine:
        assert engine.run([SECRET], SHORT)[0].token_ids == must_produce(SECRET, SHORT)


def test_a_journal_whose_engine_was_killed_can_be_redacted(tmp_path: Path, journal: str) -> None:
    copy = str(tmp_path / "copy.db")
    with Engine(MODEL, journal) as engine:
        engine.run([SECRET], SHORT, request_ids=["secret"])
        engine.enqueue([7], LONG, request_id="long")
        while not engine.stats().running:
            pass
        for suffix in ("", "-wal"):
            shutil.copy(journal + suffix, copy + suffix)
        engine.abort("long")
    with pytest.raises(Rejected, match="'long' is"):
        redact_at_rest(copy, "long")
    redact_at_rest(copy, "secret")
    assert not is_said(copy, SECRET)
    with Engine(MODEL, copy) as engine:
        assert engine.unfinished() == ["long"]
        engine.abort("long")
    verify_journal(open_reader(copy))


def test_many_clients_and_many_redactions(journal: str) -> None:
    """Redactions among the work of others: each reply is right, and the journal verifies with every digest."""
    with Engine(MODEL, journal, snapshot_every_records=64) as engine:
        for turn in range(6):
            ids = [f"{turn}-{n}" for n in range(4)]
            for n, request_id in enumerate(ids):
                engine.enqueue([turn, n, *SECRET], SHORT, request_id=request_id)
            engine.wait(ids[:1])
            engine.redact(ids[0])
            done = engine.wait(ids[1:])
            assert [c.token_ids for c in done] == [must_produce([turn, n, *SECRET], SHORT) for n in (1, 2, 3)]
    verdict = verify_journal(open_reader(journal))
    assert verdict.num_redacted_requests == 6
    assert verdict.num_digests > verdict.num_erased_digests


def test_a_store_that_can_not_erase_is_refused() -> None:
    class Plain:
        def __init__(self) -> None:
            inner = MemoryStore()
            for name in ("open_stream", "append", "read", "head", "close"):
                setattr(self, name, getattr(inner, name))

    with Engine(MODEL, Plain()) as engine:
        engine.run([[1]], SHORT, request_ids=["a"])
        with pytest.raises(Rejected, match="a Plain can't erase"):
            engine.redact("a")


# -- anchors ----------------------------------------------------------------------------------------------------------


def test_the_anchor_is_where_the_engine_ended(journal: str, tmp_path: Path) -> None:
    anchor = tmp_path / "anchor.json"
    with Engine(MODEL, journal, anchor=str(anchor), anchor_every_s=0) as engine:
        engine.run([[1]], SHORT)
        eventually(lambda: read_head(anchor).position > 10)
    kept = read_head(anchor)
    assert kept.head == open_reader(journal).head()
    assert kept.stream == DEFAULT_STREAM
    with Engine(MODEL, journal, anchor=str(anchor)):
        pass
    assert read_head(anchor).position > kept.position


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["refold.db"], "an older copy took its place"),
        (["refold.db", "refold.db.mark"], "an older copy was put in its place"),
    ],
    ids=["missed by the mark beside it", "with its mark, missed by the anchor"],
)
def test_an_older_copy_in_the_journals_place_is_found_at_open(tmp_path: Path, files: list[str], message: str) -> None:
    anchor, journal, older = str(tmp_path / "anchor.json"), str(tmp_path / "refold.db"), tmp_path / "older"
    older.mkdir()
    with Engine(MODEL, journal, anchor=anchor) as engine:
        engine.run([[1]], SHORT)
    for name in files:
        shutil.copy(tmp_path / name, older)
    with Engine(MODEL, journal, anchor=anchor) as engine:
        engine.run([[2]], SHORT)
    for name in files:
        shutil.copy(older / name, tmp_path)
    with pytest.raises(JournalCorrupt, match=message) as caught:
        Engine(MODEL, journal, anchor=anchor).open()
    assert caught.value.kind == "truncated"


def test_another_journal_in_its_place_is_found_at_open(tmp_path: Path) -> None:
    anchor = str(tmp_path / "anchor.json")
    with Engine(MODEL, MemoryStore(), anchor=anchor) as engine:
        engine.run([[1]], SHORT)
    other = MemoryJournal()
    with Engine(MODEL, MemoryStore(other)) as engine:
        engine.run([[1], [2], [3]], SHORT)
    with pytest.raises(JournalCorrupt, match="another journal"):
        Engine(MODEL, MemoryStore(other), anchor=anchor).open()


def test_an_anchor_that_can_not_be_written_any_more_stops_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "share"
    folder.mkdir()
    with Engine(MODEL, anchor=str(folder / "anchor.json"), anchor_every_s=0) as engine:
        shutil.rmtree(folder)
        assert engine.generate("hello", SamplingParams(max_tokens=2))


@pytest.mark.parametrize(("where", "says"), [("no folder/anchor.json", "is no folder"), (".", "which is a folder")])
def test_an_anchor_that_no_file_can_be_put_at_is_refused_before_there_is_a_journal(
    tmp_path: Path, where: str, says: str
) -> None:
    with pytest.raises(Rejected, match=says):
        Engine(MODEL, str(tmp_path / "refold.db"), anchor=str(tmp_path / where)).open()
    assert list(tmp_path.iterdir()) == []


def test_an_anchor_that_is_none_or_a_key_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "anchor.json").write_text("nonsense")
    with pytest.raises(Rejected, match="holds no head"):
        Engine(MODEL, anchor=str(tmp_path / "anchor.json")).open()
    with pytest.raises(Rejected, match="key"):
        Engine(MODEL, anchor=str(tmp_path / "other.json"), anchor_key=str(tmp_path / "none.pem")).open()
