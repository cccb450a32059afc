"""Every store of ours passes the contract; SQLite both with its owner lock and with the epoch fence alone."""

import pytest

from refold import migrations
from refold.journal.stores.memory import MemoryJournal, MemoryStore
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
    def store_factory(self, tmp_path):
        url = f"sqlite:///{tmp_path / 'journal.db'}"
        migrations.ensure(url)
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
