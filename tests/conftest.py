"""What all tests share: a PostgreSQL server, started when the first test asks for it."""

import pytest


@pytest.fixture(scope="session")
def postgres_server():
    from tests.kit.postgres import Server

    server = Server()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres_server):
    """A place in a PostgreSQL database of the test's own, with the journal's tables."""
    return postgres_server.journal()
