"""Every store of ours passes the contract; all but memory both with their owner lock and with the epoch fence alone."""

from typing import ClassVar

import pytest

from refold import migrations
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.stores.sql import SqlStore
from refold.journal.testing import JournalStoreContract


class TestMemoryStore(JournalStoreContract):
    @pytest.fixture
    def store_factory(self):
        journal = MemoryJournal()
        return lambda: MemoryStore(journal)


class _SqlContract(JournalStoreContract):
    exclusive = True

    @pytest.fixture
    def url(self, tmp_path):
        url = f"sqlite:///{tmp_path / 'journal.db'}"
        migrations.ensure(url)
        return url

    @pytest.fixture
    def store_factory(self, url):
        handles = []

        def make():
            handles.append(SqlStore(url, exclusive=self.exclusive))
            return handles[-1]

        yield make
        for handle in handles:
            handle.close()


class TestSqlStore(_SqlContract):
    pass


class TestSqlStoreByFenceAlone(_SqlContract):
    exclusive = False


class _PostgresContract(_SqlContract):
    @pytest.fixture
    def url(self, postgres_url):
        return postgres_url


class TestPostgresStore(_PostgresContract):
    pass


class TestPostgresStoreByFenceAlone(_PostgresContract):
    exclusive = False


class _SegmentContract(JournalStoreContract):
    options: ClassVar[dict[str, object]] = {}

    @pytest.fixture
    def store_factory(self, tmp_path):
        migrations.ensure(f"segments:///{tmp_path / 'journal'}")
        handles = []

        def make():
            handles.append(SegmentStore(tmp_path / "journal", **self.options))
            return handles[-1]

        yield make
        for handle in handles:
            handle.close()


class TestSegmentStore(_SegmentContract):
    pass


class TestSegmentStoreByFenceAlone(_SegmentContract):
    options: ClassVar = {"exclusive": False}


class TestSegmentStoreOfManySegments(_SegmentContract):
    options: ClassVar = {"segment_bytes": 300}
