"""The PostgreSQL store meets the world: other owners, lost sessions, forgotten transactions, foreign tables, no server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refold import migrations
from refold.journal.archive_file import write_archive
from refold.journal.errors import (
    Fenced,
    JournalCorrupt,
    JournalError,
    JournalOwned,
    NotFound,
    SchemaTooNew,
)
from refold.journal.record import EMPTY_HEAD, NO_CONTENT_HASH, Record, chain_hash, head_after
from refold.journal.stores import engine_owner, open_reader, open_store
from refold.journal.stores.sql import SqlStore
from refold.journal.testing import make_records
from refold.journal.verify import verify_stream

SCRIPT = Path(__file__).with_name("writing_process.py")


@pytest.fixture
def store(postgres_url):
    store = SqlStore(postgres_url)
    yield store
    store.close()


@pytest.fixture
def admin(postgres_server, postgres_url):
    with postgres_server.connect(postgres_url) as connection:
        yield connection


def grow(store, count: int = 1):
    """Append `count` records one by one; the head after them."""
    head = store.head()
    for _ in range(count):
        head = store.append("main", make_records(head, 1))
    return head


def session_of(store) -> int:
    return store._database.writing().exec_driver_sql("SELECT pg_backend_pid()").scalar_one()


def end_session(admin, pid: int) -> None:
    """Ended by the server: the client finds out when it uses it next."""
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])


class TestSettings:
    def test_a_commit_is_durable_even_where_the_database_says_otherwise(self, postgres_url, admin):
        asynchronous = postgres_url + "%20-csynchronous_commit%3Doff%20-cidle_session_timeout%3D5000"
        store = SqlStore(asynchronous)
        asked = "synchronous_commit", "lock_timeout", "idle_session_timeout", "default_transaction_isolation"
        writer = store._database.writing()
        settings = [writer.exec_driver_sql(f"SHOW {name}").scalar() for name in asked]
        assert settings == ["on", "5s", "0", "read committed"]
        store.close()

    def test_a_reader_can_not_write(self, store, postgres_url):
        store.open_stream()
        with pytest.raises(JournalError, match="read-only"):
            open_reader(postgres_url)._database.query("DELETE FROM journal_records RETURNING 1", ())

    def test_it_is_read_with_plain_sql(self, store, admin):
        store.open_stream()
        grow(store, 2)
        rows = admin.execute("SELECT (body::jsonb -> 0 ->> 'handle')::int FROM journal_records ORDER BY position")
        assert rows.fetchall() == [(0,), (1,)]

    def test_bodies_are_stored_as_they_are(self, store, admin):
        """The server's own compression would cost more than all the rest of an append."""
        sql = "SELECT attname FROM pg_attribute WHERE attrelid = 'journal_records'::regclass AND attstorage = 'x'"
        assert {name for (name,) in admin.execute(sql)} & {"body", "content"} == set()

    def test_a_record_that_fits_in_a_page_is_one_row_and_a_larger_one_lies_apart(self, store, admin):
        head = store.open_stream()
        sql = "SELECT pg_relation_size(reltoastrelid) > 0 FROM pg_class WHERE oid = 'journal_records'::regclass"
        head = store.append("main", make_records(head, 1, cause="x" * 3_500))  # said twice: 7 kB
        assert admin.execute(sql).fetchone() == (False,)
        head = store.append("main", make_records(head, 1, cause="x" * 20_000))
        assert admin.execute(sql).fetchone() == (True,)
        assert verify_stream(store) == head


class TestOwnership:
    def test_a_second_store_is_refused_and_told_by_whom_and_what_to_do(self, store, postgres_url):
        store.open_stream()
        pattern = (
            rf"written by process {os.getpid()} on .*: stop that engine.*pg_terminate_backend\({session_of(store)}\)"
        )
        with pytest.raises(JournalOwned, match=pattern):
            SqlStore(postgres_url).open_stream()
        assert engine_owner(postgres_url) == os.getpid()
        assert grow(store).position == 1

    def test_engines_on_different_streams_share_a_database(self, store, postgres_url):
        store.open_stream("a")
        other = SqlStore(postgres_url)
        assert other.open_stream("b").engine_epoch == 1
        with pytest.raises(JournalOwned, match="stream 'a'"):
            other.open_stream("a")
        other.append("b", make_records(other.head("b"), 1))
        with pytest.raises(JournalOwned, match="stream 'b'"):
            store.open_stream("b")
        other.close()
        assert store.open_stream("b").engine_epoch == 2

    def test_engines_in_different_schemas_know_nothing_of_each_other(self, store, postgres_server):
        store.open_stream()
        other = SqlStore(postgres_server.journal())
        assert other.open_stream().engine_epoch == 1
        other.close()

    def test_a_lost_session_is_replaced_and_takes_its_lock_back(self, store, admin, postgres_url):
        store.open_stream()
        end_session(admin, session_of(store))
        assert engine_owner(postgres_url) is None
        assert grow(store, 2).position == 2
        assert engine_owner(postgres_url) == os.getpid()
        with pytest.raises(JournalOwned):
            SqlStore(postgres_url).open_stream()

    def test_who_opens_while_the_session_is_lost_fences_the_one_that_had_it(self, store, admin, postgres_url):
        head = store.append("main", make_records(store.open_stream(), 1))
        end_session(admin, session_of(store))
        other = SqlStore(postgres_url)
        taken = other.open_stream()
        with pytest.raises(Fenced, match="engine epoch 2 now, this engine has 1"):
            store.append("main", make_records(head, 1))
        assert other.append("main", make_records(taken, 1)).position == 2
        store.close()
        assert engine_owner(postgres_url) == os.getpid(), "closing the fenced one took nothing from the owner"
        other.close()

    def test_a_lock_that_could_not_be_had_back_is_asked_for_again(self, store, admin, postgres_url, postgres_server):
        """The server may take a while to notice that a session is dead; the epoch is the fence meanwhile."""
        store.open_stream()
        end_session(admin, session_of(store))
        ghost = postgres_server.connect(postgres_url)
        keys = "'journal_records'::regclass::oid::bigint::bit(32)::int, stream_id"
        ghost.execute(f"SELECT pg_advisory_lock({keys}) FROM journal_streams")
        assert grow(store).position == 1
        store.maintain(idle=True)
        ghost.close()
        deadline = time.monotonic() + 5
        while engine_owner(postgres_url) != os.getpid():
            store.maintain()
            assert time.monotonic() < deadline
        assert grow(store).position == 2

    def test_a_process_that_was_paused_while_another_took_over_is_fenced(self, postgres_url):
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), "live", postgres_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as nursery:
            assert nursery.stdout.readline() == "ready\n"
            nursery.stdin.write("\n")
            nursery.stdin.flush()
            words = {}
            while "ack" not in words:
                word, value = nursery.stdout.readline().split()
                words[word] = int(value)
            os.kill(words["pid"], signal.SIGSTOP)
            with pytest.raises(JournalOwned, match=f"process {words['pid']}"):
                SqlStore(postgres_url).open_stream()
            usurper = SqlStore(postgres_url, exclusive=False)
            head = usurper.open_stream()
            assert head.position >= words["ack"]
            os.kill(words["pid"], signal.SIGCONT)
            for line in nursery.stdout:
                assert not line.startswith("ack") or int(line.split()[1]) <= head.position, (
                    "it wrote after it was fenced"
                )
                if line == "dead\n":
                    break
            nursery.stdin.close()
        assert usurper.head() == head, "the paused engine got something in"
        head = usurper.append("main", make_records(head, 2))
        assert verify_stream(open_reader(postgres_url)) == head
        usurper.close()


class TestOtherTransactions:
    def test_an_append_leaves_no_dead_row_behind(self, store, admin, postgres_server, postgres_url):
        """A row that is changed by each append grows a tail of dead versions while anybody holds a snapshot."""
        store.open_stream()
        with postgres_server.connect(postgres_url) as forgotten:
            forgotten.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            forgotten.execute("SELECT count(*) FROM journal_records")
            where = "SELECT ctid::text FROM journal_streams"
            before = admin.execute(where).fetchone()
            head = grow(store, 300)
            assert admin.execute(where).fetchone() == before
            assert open_reader(postgres_url).head() == head
            assert forgotten.execute("SELECT count(*) FROM journal_records").fetchone() == (0,)

    def test_the_stored_head_follows_at_leisure_and_is_there_at_the_end(self, store, admin):
        sql = "SELECT head_position FROM journal_streams"
        store.open_stream()
        grow(store, 2)
        store.maintain()
        assert admin.execute(sql).fetchone() == (0,)
        store.maintain(idle=True)
        assert admin.execute(sql).fetchone() == (2,)
        head = store.append("main", make_records(store.head(), 1030))
        store.maintain()
        assert admin.execute(sql).fetchone() == (1032,)
        store.append("main", make_records(head, 1))
        store.close()
        assert admin.execute(sql).fetchone() == (1033,)

    def test_someone_elses_record_is_a_conflict_not_a_fork(self, store, admin):
        head = store.append("main", make_records(store.open_stream(), 1))
        insert = "INSERT INTO journal_records SELECT stream_id, position + 1, engine_epoch, schema_version, time_ns, body, hash"
        admin.execute(f"{insert} FROM journal_records")
        with pytest.raises(JournalError, match="head at 2, expected 1"):
            store.append("main", make_records(head, 1))

    def test_a_record_that_vanishes_under_its_writer_leaves_no_gap(self, store, admin):
        store.open_stream()
        head = grow(store, 3)
        admin.execute("DELETE FROM journal_records WHERE position = 2")
        with pytest.raises(JournalError, match="head at 2, expected 3"):
            store.append("main", make_records(head, 1))
        assert [record.position for record in store.read()] == [0, 1]

    def test_a_stream_of_which_all_was_archived_keeps_its_head_and_goes_on(self, store, tmp_path):
        store.open_stream()
        head = grow(store, 5)
        store.add_archive("main", write_archive(tmp_path / "archive", "main", store.read()))
        assert store.drop_archived("main", 100) == 5
        assert store.head() == head
        head = store.append("main", make_records(head, 2))
        assert [record.position for record in store.read(start=5)] == [5, 6]
        assert store.head() == head

    def test_a_tail_that_was_cut_off_is_noticed(self, store, admin, postgres_url):
        store.open_stream()
        grow(store, 4)
        store.close()
        admin.execute("DELETE FROM journal_records WHERE position = 3")
        assert open_reader(postgres_url).head().position == 4
        with pytest.raises(JournalCorrupt) as caught:
            verify_stream(open_reader(postgres_url))
        assert (caught.value.position, caught.value.kind) == (3, "truncated")
        with pytest.raises(JournalCorrupt, match="ends at 3, its head says 4"):
            SqlStore(postgres_url).open_stream()
        assert engine_owner(postgres_url) is None

    def test_a_history_other_than_the_one_that_was_stored_is_noticed(self, store, admin, postgres_url):
        store.open_stream()
        grow(store, 2)
        store.maintain(idle=True)
        grow(store, 2)
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [session_of(store)])
        admin.execute("UPDATE journal_streams SET head_hash = %s", [b"x" * 32])
        with pytest.raises(JournalCorrupt):
            SqlStore(postgres_url).open_stream()


class TestNumbers:
    """A lone record goes to the server in its binary formats, several go as the driver's arrays: both are the same rows."""

    def test_records_come_back_as_they_went_in_alone_and_in_company(self, store):
        head = store.open_stream()
        written = []
        for count in (1, 3, 1):
            written += make_records(head, count, cause="é" * 3000)
            head = store.append("main", written[-count:])
        assert list(store.read("main")) == written

    @pytest.mark.parametrize("count", [1, 2])
    def test_one_that_the_database_can_not_hold_is_refused_at_once_and_nothing_is_in(self, postgres_url, count):
        store = SqlStore(postgres_url)
        head = before = store.open_replica("main")
        records = []
        for _ in range(count):
            fields = (head.position, 1, 1 << 31, 7, b"[]")
            digest = chain_hash(head.hash, *fields, NO_CONTENT_HASH)
            records.append(Record(*fields, b"", NO_CONTENT_HASH, digest))
            head = head_after(records[-1])
        with pytest.raises(JournalError, match="cannot write record"):
            store.append("main", records)
        assert store.head().position == before.position
        store.close()


class TestPlacesThatAreNoJournals:
    def opened(self, url):
        """The errors of every way in; each must refuse, with the same kind of error."""
        errors = []
        for way in (open_reader, open_store, migrations.ensure):
            with pytest.raises(JournalError) as caught:
                way(url)
            assert "\n" not in str(caught.value)
            errors.append(caught.value)
        return errors

    def test_no_tables_yet(self, postgres_server):
        url = postgres_server.empty()
        for way in (open_reader, open_store):
            with pytest.raises(NotFound, match="refold migrate"):
                way(url)
        assert migrations.ensure(url)
        assert open_reader(url).head() == EMPTY_HEAD

    @pytest.mark.parametrize("table", ["journal_records", "refold_schema"])
    def test_another_programs_tables(self, postgres_server, table):
        url = postgres_server.empty()
        with postgres_server.connect(url) as other:
            other.execute(f"CREATE TABLE {table} (bookmark text)" if table != "refold_schema" else OTHERS_VERSIONS)
        assert {error.kind for error in self.opened(url)} == {"foreign"}

    def test_a_newer_refolds_tables(self, postgres_url, admin):
        admin.execute("UPDATE refold_schema SET version_num = '0099'")
        for error in self.opened(postgres_url):
            assert isinstance(error, SchemaTooNew)
            assert "99" in str(error)

    def test_an_older_refolds_tables(self, postgres_url, admin):
        admin.execute("UPDATE refold_schema SET version_num = '0001'")
        for way in (open_reader, open_store):
            with pytest.raises(JournalError, match=r"run `refold migrate .?postgresql://"):
                way(postgres_url)

    def test_a_database_that_can_not_hold_every_text(self, postgres_server):
        postgres_server.run("CREATE DATABASE ascii_only ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        url = postgres_server.url().replace("/postgres?", "/ascii_only?")
        with pytest.raises(JournalError, match=r"encoded in SQL_ASCII.*ENCODING 'UTF8'"):
            migrations.ensure(url)
        postgres_server.run("DROP DATABASE ascii_only WITH (FORCE)")

    @pytest.mark.parametrize(
        ("change", "remedy"),
        [
            (("/postgres?", "/nowhere?"), 'database "nowhere" does not exist'),
            (("postgres@", "nobody:secret@"), 'role "nobody" does not exist'),
            (("host=/", "host=/nowhere/"), "check that the server runs"),
            (("postgresql://", "postgresql://127.0.0.1:9/x?"), "check that the server runs"),
            (("options=", "bogus=1&options="), "bogus"),
        ],
    )
    def test_a_server_or_database_that_is_not_there(self, postgres_url, change, remedy):
        for error in self.opened(postgres_url.replace(*change)):
            assert remedy in str(error)
            assert "secret" not in str(error)

    def test_without_the_driver_the_remedy_is_its_name(self, postgres_url, monkeypatch):
        monkeypatch.setitem(sys.modules, "psycopg", None)
        for error in self.opened(postgres_url):
            assert "pip install 'refold[postgres]'" in str(error)


OTHERS_VERSIONS = "CREATE TABLE refold_schema AS SELECT 'x' AS version_num"
