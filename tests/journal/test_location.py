"""One URL names the store; what names none is refused with what to write instead."""

from pathlib import Path

import pytest

from refold.journal.errors import JournalError
from refold.journal.stores import engine_owner, open_reader, open_store
from refold.journal.stores.location import locate, shown, sqlite_path
from refold.journal.stores.memory import MemoryStore


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a.db", Path.cwd() / "a.db"),
        ("sqlite:////var/a.db", Path("/var/a.db")),
        ("a.db", Path.cwd() / "a.db"),
        ("/var/a b#c?d%41.db", Path("/var/a b#c?d%41.db")),
        ("~/a.db", Path.home() / "a.db"),
        ("sqlite:////var/100%.db", Path("/var/100%.db")),
    ],
)
def test_a_file_by_url_or_by_path(url, path):
    assert locate(url) == ("sqlite", path, url)
    assert sqlite_path(url) == path


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        ":memory:",
        "sqlite:a.db",
        "sqlite:///a.db?mode=ro",
        "mysql://h/d",
        "file:a.db",
        "a\0b",
        "sqlite:///a\0b",
        "lone\ud800.db",
        "https://example.org/a.db",
    ],
)
def test_what_names_no_store_is_refused_with_a_remedy(url):
    for way in (locate, open_store, open_reader):
        with pytest.raises(JournalError, match="use "):
            way(url)


def test_memory_is_a_journal_of_its_own_process():
    store = open_store("memory:")
    assert isinstance(store, MemoryStore)
    assert store.open_stream().engine_epoch == open_store("memory:").open_stream().engine_epoch == 1
    with pytest.raises(JournalError, match="name a journal file"):
        open_reader("memory:")
    with pytest.raises(JournalError, match="no journal file"):
        engine_owner("memory:")


@pytest.mark.parametrize(
    "name", ["with space.db", "per%cent.db", "que?stion.db", "ha#sh.db", "ünïcödé.db", "quo'te\".db"]
)
def test_any_file_name_works_all_the_way(tmp_path, name):
    from refold import migrations

    path = str(tmp_path / name)
    assert migrations.ensure(path)
    assert not migrations.ensure(path)
    store = open_store(path)
    head = store.open_stream()
    reader = open_reader(path)
    assert reader.head() == head
    reader.close()
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, name + ".lock"])


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user@host/database",
        "postgresql+psycopg://user@host:5432/database?sslmode=require",
        "postgres:///database?host=/var/run/postgresql",
    ],
)
def test_a_database_by_url(url):
    assert locate(url) == ("postgresql", None, url)
    with pytest.raises(JournalError, match="no journal file"):
        sqlite_path(url)


@pytest.mark.parametrize(
    "url", ["postgresql://", "postgresql://host", "postgresql://host/", "postgresql://host/a/b", "postgres:///a\0b"]
)
def test_a_url_without_a_database_is_refused(url):
    with pytest.raises(JournalError, match="use postgresql://USER@HOST/DATABASE"):
        locate(url)


@pytest.mark.parametrize(
    ("url", "screen"),
    [
        ("postgresql://ann:s3cret@host/db", "postgresql://ann:***@host/db"),
        ("postgresql://ann:s%40c:ret@host/db", "postgresql://ann:***@host/db"),
        ("postgresql://host/db?user=ann&password=s3cret&sslmode=require", None),
        ("postgresql://ann@host/db", "postgresql://ann@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("/tmp/x:y@z.db", "/tmp/x:y@z.db"),
    ],
)
def test_no_password_is_shown(url, screen):
    assert shown(url) == (screen or "postgresql://host/db?user=ann&password=***&sslmode=require")
