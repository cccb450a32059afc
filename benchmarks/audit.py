"""The audit read model of a long journal: how fast it is projected, and what each named query costs.

    python -m benchmarks.audit [--entries 1000000] [--requests 256] [--journal FILE]

A journal of about `entries` request-events (one entry of one step that is scheduled, or comes back) is written through the store,
requests of 50 to 400 tokens coming and going, then projected. Each named query is asked for one request, step or minute, where it can
be narrowed so, and for the whole journal as its example in docs/reference/audit.md asks it. Times are of the CPU, so that they mean
something on a machine that others use too.
"""

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.snapshots import fill
from refold.engine.audit.place import catch_up, place_of
from refold.migrations import ensure
from refold.projections.audit.catalogue import VIEWS

ROUNDS = 3


def cpu_s(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds of some work."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def project(url: str) -> None:
    (num,) = {len(catch_up(place_of(url)))} - {0}
    connection = sqlite3.connect(url)
    records, events = connection.execute("SELECT num_records, num_request_events FROM integrity").fetchone()
    size = Path(url).stat().st_size
    connection.close()
    print(f"{num} stream, {records:,} records, {events:,} request-events; the file has {size / 2**20:,.0f} MB")


def ask(url: str) -> None:
    connection = sqlite3.connect(f"file:{url}?mode=ro", uri=True)

    def took_ms(sql: str, parameters: tuple[object, ...] = ()) -> float:
        return 1e3 * statistics.median(
            cpu_s(lambda: connection.execute(sql, parameters).fetchall())[0] for _ in range(ROUNDS)
        )

    of = "SELECT request_id, first_scheduled_step FROM requests WHERE status = 'finished' LIMIT 1 OFFSET 99"
    request_id, step = connection.execute(of).fetchone()
    (minute,) = connection.execute("SELECT MIN(minute) FROM counters_by_minute").fetchone()
    values = {"request_id": request_id, "step": step + 5, "minute": minute}
    print(f"{'query':<20}{'narrowed to':<14}{'rows':>8}{'ms':>10}    whole journal, ms")
    for view in VIEWS:
        whole = took_ms(view.example.replace("req-1", request_id))
        for column in [column for column in view.filters if column in values] or [""]:
            parameters = (values[column],) if column else ()
            sql = (
                f"SELECT * FROM {view.name} {f'WHERE {column} = ?' if column else ''} ORDER BY {view.order} LIMIT 1000"
            )
            rows = len(connection.execute(sql, parameters).fetchall())
            print(f"{view.name:<20}{column:<14}{rows:>8}{took_ms(sql, parameters):>10.1f}    {whole:>10.1f}")
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--journal", help="one that is there already; it gets its read model")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = given.journal or str(Path(folder) / "journal.db")
        if given.journal is None:
            ensure(url)
            fill(url, given.requests, given.entries)
        cpu, wall = cpu_s(lambda: project(url))
        connection = sqlite3.connect(url)
        (events,) = connection.execute("SELECT SUM(num_request_events) FROM audit_projections").fetchone()
        connection.close()
        print(
            f"projected in {wall:.1f} s, {cpu:.1f} s of them on the CPU: {events / cpu:,.0f} request-events a second of CPU"
        )
        ask(url)


if __name__ == "__main__":
    main()
