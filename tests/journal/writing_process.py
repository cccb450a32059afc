"""A process that writes a journal and gets killed for it. Run as a script; one line on stdin starts one life.

    python writing_process.py live URL      each blank line: fork a writer that appends until it's killed
    python writing_process.py race URL N    append N records against whoever else does, taking the stream over when fenced
    python writing_process.py full URL      append until the file may not grow, then again after the limit is lifted
    python writing_process.py hold URL      open the stream, fork a child that outlives us, wait
    python writing_process.py migrate -     each line, a file: fork a process that migrates it

A path that ends with a slash is a journal of segments, small ones, so that they are often closed.

Answers are lines on stdout: `pid N`, `ack N` (every record before N is durable), `dead`, or a result. The writers are
forked, after the imports, so that a life costs milliseconds.
"""

import os
import resource
import sys
import time
from pathlib import Path

from refold.journal.errors import Fenced, JournalError
from refold.journal.events import RequestAborted
from refold.journal.stores.segments.store import SegmentStore
from refold.journal.stores.sql import SqlStore
from refold.journal.testing import make_records
from refold.journal.writer import JournalWriter
from refold.migrations import run  # noqa: F401 - imported before the fork, for every life
from refold.migrations.files import upgrade_file


def opened(url: str, *, exclusive: bool = True, segment_bytes: int = 30_000) -> SqlStore | SegmentStore:
    if url.endswith("/"):
        return SegmentStore(Path(url), exclusive=exclusive, segment_bytes=segment_bytes)
    return SqlStore(url, exclusive=exclusive)


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def live(path: str) -> None:
    store = opened(path)
    head = store.open_stream()
    writer = JournalWriter(store, "main", head, on_durable=lambda position: say(f"ack {position}"))
    while True:
        position = writer.next_position
        assert (
            writer.append([RequestAborted(handle=position, cause="x" * (position % 3000))], time.time_ns()) == position
        )
        if position % 7 == 0 or not writer.has_room:
            writer.flush()
        if position % 97 == 0:
            store.maintain(idle=True)


def migrate(path: str) -> None:
    upgrade_file(Path(path))
    time.sleep(60)


def nursery(path: str, child) -> None:
    say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            child(line.strip() or path)
            os._exit(0)
        say(f"pid {pid}")
        os.waitpid(pid, 0)
        say("dead")


def race(path: str, count: int) -> None:
    store = opened(path, exclusive=False)
    say("ready")
    sys.stdin.readline()
    head, done, fenced = store.open_stream(), 0, 0
    while done < count:
        try:
            head = store.append("main", make_records(head, 1, cause=str(os.getpid())))
            done += 1
            time.sleep(0.001)
        except Fenced:
            fenced += 1
            time.sleep(0.002)
            head = store.open_stream()
    store.close()
    say(f"{os.getpid()} {done} {fenced}")


def full(path: str) -> None:
    store = opened(path, segment_bytes=1 << 20)
    head = store.open_stream()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        while True:
            head = store.append("main", make_records(head, 3, cause="x" * 2000))
    except JournalError as error:
        say(f"{type(error).__name__} {head.position} {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.head() == head
    if isinstance(store, SegmentStore):
        head = store.open_stream()
    head = store.append("main", make_records(head, 3))
    say(f"after {head.position}")
    store.close()


def hold(path: str) -> None:
    store = opened(path)
    store.open_stream()
    child = os.fork()
    if child:
        say(f"child {child}")
    time.sleep(60)
    store.close()


if __name__ == "__main__":
    mode, file, *rest = sys.argv[1:]
    match mode:
        case "live":
            nursery(file, live)
        case "migrate":
            nursery(file, migrate)
        case "race":
            race(file, int(rest[0]))
        case "full":
            full(file)
        case "hold":
            hold(file)
