"""Whatever is wrong with a journal is said of that journal: who has several must not have to guess."""

import re
import sqlite3
from pathlib import Path

import pytest

from refold import migrations
from refold.engine.history.replay import Contradiction, replay, state_at
from refold.engine.history.timeline import Timeline
from refold.engine.history.verify import verify_journal
from refold.journal.copying import copy_stream
from refold.journal.errors import JournalCorrupt, JournalError
from refold.journal.naming import name, place_of_reader
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.location import place_of
from refold.journal.stores.memory import MemoryStore
from refold.journal.stores.sql import SqlStore
from refold.journal.verify import read_verified
from tests.history.journals import eventful_lives, write_journal


@pytest.fixture
def journal(tmp_path: Path) -> str:
    path = tmp_path / "refold.db"
    write_journal(path, eventful_lives()[0])
    return str(path)


@pytest.fixture
def damaged(journal: str) -> str:
    with sqlite3.connect(journal) as connection:
        connection.execute("UPDATE journal_records SET time_ns = 1 WHERE position = 7")
    return journal


READINGS = {
    "verify_journal": verify_journal,
    "read_verified": lambda reader: list(read_verified(reader)),
    "replay": lambda reader: list(replay(reader)),
    "state_at": lambda reader: state_at(reader, 9),
    "seek": lambda reader: Timeline(reader).seek(9),
    "walk": lambda reader: list(Timeline(reader)),
    "forward": lambda reader: Timeline(reader).seek(3).forward(9),
    "copy": lambda reader: copy_stream(reader, MemoryStore(), "main"),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS.keys())
def test_damage_is_said_of_the_journal_once(damaged: str, read) -> None:
    with pytest.raises(JournalCorrupt) as caught:
        read(open_reader(damaged))
    assert str(caught.value).startswith(f"{damaged}: record 7 ")
    assert str(caught.value).count(damaged) == 1
    assert caught.value.position == 7
    assert caught.value.place == damaged


def test_a_body_that_is_no_event_is_said_of_the_journal_too(journal: str) -> None:
    timeline = Timeline.open(journal).seek(7)
    with sqlite3.connect(journal) as connection:
        connection.execute("""UPDATE journal_records SET body = '["nonsense"]' WHERE position = 8""")
    timeline._last, timeline._events = None, []
    with pytest.raises(JournalCorrupt, match=f"^{re.escape(journal)}: "):
        timeline.seek(8)


def test_a_contradiction_is_said_of_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "twice.db"
    (first, *rest), _ = eventful_lives()
    write_journal(path, [[*first[:6], first[5], *first[6:]], *rest])
    for read in (verify_journal, lambda reader: list(Timeline(reader))):
        with pytest.raises(Contradiction, match=f"^{re.escape(str(path))}: ") as caught:
            read(open_reader(str(path)))
        assert caught.value.position == 6


def test_each_kind_of_reader_and_store_knows_its_place(journal: str, tmp_path: Path) -> None:
    plain = f"segments:///{tmp_path / 'plain'}"
    migrations.ensure(plain)
    for url in (journal, plain):
        for opened in (open_reader(url), open_store(url)):
            assert place_of_reader(opened) == place_of(url)
            opened.close()
    assert place_of_reader(MemoryStore()) == "a MemoryStore"


def test_a_password_is_not_part_of_a_place() -> None:
    with pytest.raises(JournalError) as caught:
        SqlStore("postgresql://ada:secret@127.0.0.1:1/journals", patience_s=0)
    assert "secret" not in str(caught.value)


def test_who_has_named_it_is_right() -> None:
    error = name(JournalCorrupt("record 3 is not there", position=3, kind="deleted"), "/a.db")
    assert str(name(error, "/b.db")) == "/a.db: record 3 is not there"
    assert str(name(JournalCorrupt("/c.db ends at 3", position=3, kind="truncated"), "/c.db")) == "/c.db ends at 3"


def test_of_two_journals_the_damaged_one_is_named(damaged: str, tmp_path: Path) -> None:
    sound = tmp_path / "sound.db"
    migrations.ensure(str(sound))
    with pytest.raises(JournalCorrupt, match=f"^{re.escape(damaged)}: record 7 "):
        copy_stream(open_reader(damaged), open_store(str(sound)), "main")
