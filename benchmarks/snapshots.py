"""What a snapshot saves and costs: opening a long journal with and without one, its size, and a step beside one that is made.

    python benchmarks/snapshots.py [--entries 1000000] [--requests 256] [--journal FILE]

A journal of about `entries` request-events (one entry of one step is one) is written through the store, requests of 50 to 400
tokens coming and going. Then it's opened as an engine opens it. `step` is the wall time of the engine's own part of a decode
step (decide, append, fold) while nothing else happens, and while the keeper folds and saves.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.step import Loop, _engine_config, _warm
from refold.engine.folding import snapshot_of
from refold.engine.opening import fold_journal
from refold.engine.snapshotting import SnapshotKeeper
from refold.journal.events import Sampling
from refold.journal.stores import open_store
from refold.journal.writer import JournalWriter
from refold.migrations import ensure
from refold.scheduler.commands import OpenEngine, StartWorker, SubmitRequest
from refold.scheduler.snapshot import pack


def fill(url: str, num_requests: int, num_entries: int) -> int:
    """Write the journal; returns its request-events."""
    store = open_store(url)
    writer = JournalWriter(store, "main", store.open_stream("main"))
    loop, dice, count, number = Loop(writer.append), random.Random(1), 0, 0
    loop.turn(OpenEngine(engine_epoch=1, refold_version="0", root_seed=0, config=_engine_config(num_requests)))
    loop.turn(StartWorker(kind="simulated", environment={}))
    while count < num_entries:
        while len(loop.state.requests.by_handle) < num_requests:
            number += 1
            sampling = Sampling(seed=number, max_tokens=dice.randint(50, 400))
            prompt = [dice.randrange(50_000) for _ in range(dice.randint(20, 300))]
            loop.turn(
                SubmitRequest(
                    request_id=f"cmpl-{dice.getrandbits(64):016x}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    arrival_ns=number,
                )
            )
        loop.schedule()
        if len(loop.in_flight) == 2:
            count += 2 * len(loop.in_flight[0].handles)
            loop.turn(loop.answer())
        if not writer.has_room:
            writer.flush()
    writer.close()
    store.close()
    return count


def opening(url: str) -> None:
    store = open_store(url)
    head = store.head()
    for _ in range(2):
        base, recovery = fold_journal(store, "main", head._replace(engine_epoch=0))
        print(
            f"opened {recovery.records:,} records in {recovery.seconds * 1000:,.0f} ms, "
            f"{recovery.from_snapshot:,} of them by a snapshot"
        )
        started = time.perf_counter()
        pieces = list(pack(base.folded))
        packed = time.perf_counter()
        snapshot = snapshot_of(*base)
        made = time.perf_counter()
        store.open_replica()
        store.save_snapshot("main", snapshot)
        saved = time.perf_counter()
        print(
            f"snapshot: {sum(map(len, pieces)):,} bytes packed in {(packed - started) * 1000:.0f} ms, {len(snapshot.body):,} "
            f"compressed; made in {(made - started) * 1000:.0f} ms, saved in {(saved - made) * 1000:.0f} ms; "
            f"{len(base.folded.outbox.by_handle):,} outputs, {len(base.folded.state.requests.by_handle):,} requests"
        )
    store.close()


def beside(url: str, num_requests: int, num_steps: int, every_records: int) -> None:
    store = open_store(url)
    head = store.open_stream("steps")
    keeper = SnapshotKeeper(store, "steps", 0, every_records)
    writer = JournalWriter(store, "steps", head, on_durable=keeper.became_durable)
    loop = Loop(writer.append)
    _warm(loop, num_requests, max_tokens=num_steps + 1000)
    spent = []
    started = time.perf_counter()
    for _ in range(num_steps):
        start = time.perf_counter()
        if len(loop.in_flight) < 2:
            loop.schedule()
        answer = loop.answer()
        loop.turn(answer)
        spent.append((time.perf_counter() - start) * 1e6)
        time.sleep(0.004)
    seconds = time.perf_counter() - started
    writer.close()
    keeper.close(None)
    made = len(store.snapshots("steps"))
    store.close()
    spent.sort()
    print(
        f"step, {'no snapshots' if not every_records else f'one every {every_records} records'}: p50 "
        f"{statistics.median(spent):.0f} us, p99 {spent[int(len(spent) * 0.99)]:.0f} us, max {spent[-1]:.0f} us "
        f"({num_steps / seconds:.0f} steps/s, {made} snapshots there at the end)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'long.db'}"
        ensure(url)
        count = fill(url, options.requests, options.entries)
        size = Path(folder, "long.db").stat().st_size
        print(f"{count:,} request-events, {size:,} bytes, {size / (count / 2):.1f} per generated token")
        opening(url)
        for every in (0, 500, 0, 500):
            other = f"sqlite:///{Path(folder) / f'steps{time.time_ns()}.db'}"
            ensure(other)
            beside(other, options.requests, options.steps, every)


if __name__ == "__main__":
    main()
