"""What all tests share: files in memory, compiled modules, and a PostgreSQL server, started when the first test asks for it."""

import gc
import os
import signal
import sys
import tempfile

import pytest

from tests.kit.longest_first import longest_first, number_of_workers
from tests.kit.memory import memory_folder

# A shell that runs the tests in its background has them ignore Ctrl-C, and the processes that they start inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch's threads must wait without spinning, as in `refold.gpu.factory`. It counts only before anybody has imported torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Half of the time the tests would wait for a disk. Pytest's own folders are there too, and those of started processes.
if "TMPDIR" not in os.environ and (memory := memory_folder()):
    os.environ["TMPDIR"] = tempfile.tempdir = memory

# Hundreds of tests start a process, and each would compile all of refold again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# Modules and thousands of tests stay until the end: the garbage collector needn't look at them again and again.
gc.set_threshold(50_000)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    if (count := number_of_workers()) > 1:
        items[:] = longest_first(items, count)


@pytest.fixture(scope="session")
def postgres_server():
    from tests.kit.postgres import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server, monkeypatch):
    """A place in a PostgreSQL database of the test's own, with the journal's tables."""
    from refold.journal.stores import postgres_owner

    # Who is refused needn't wait long for it here; who is let in after a kill is waited for by the tests themselves.
    monkeypatch.setattr(postgres_owner, "_PATIENCE_S", 0.3)
    return postgres_server.journal()
