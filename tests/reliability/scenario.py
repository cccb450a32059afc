"""What a store is put through under a fault: two lives of a writer, with a checkpoint, a reader and a close in each.

A step either works, or fails with a `JournalError`: then the life ends, as an engine's would, and the disk is mended and the
journal opened again. Anything else is a fault of ours.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

from refold.journal.errors import JournalError
from refold.journal.record import Head
from refold.journal.stores import open_store
from tests.reliability.drivers import Place
from tests.reliability.history import next_records

PATIENCE_S = 60


class Outcome(NamedTuple):
    """How a forked life ended: `message` is the error that it was told, if any; `crash` what should not have happened."""

    message: str
    crash: str


def two_lives(place: Place, acknowledge: Callable[[int], None]) -> None:
    """Open, append, checkpoint, append, read, close; then the same again."""
    for _ in range(2):
        store = open_store(place.url)
        try:
            head = _appended(store, place, store.open_stream(place.stream), acknowledge)
            if hasattr(store, "maintain"):
                store.maintain(idle=True)
            head = _appended(store, place, head, acknowledge)
            assert [record.position for record in store.read(place.stream)] == list(range(head.position))
        finally:
            store.close()


def _appended(store, place: Place, head: Head, acknowledge: Callable[[int], None]) -> Head:
    for count in (1, 3, 2):
        head = store.append(place.stream, next_records(head, count))
        acknowledge(head.position)
    return head


def _say_where(_number: int, _frame: object) -> None:
    """After too long: where every thread is."""
    stacks = [traceback.extract_stack(frame)[-3:] for frame in sys._current_frames().values()]
    places = "; ".join(" < ".join(f"{f.name}:{f.lineno}" for f in reversed(stack)) for stack in stacks)
    raise TimeoutError(f"it hung for {PATIENCE_S} s in {places}")


def in_a_child(life: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> Outcome:
    """Run `life` in a forked process; a `JournalError` is its message, anything else a crash."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, _say_where)
        signal.alarm(PATIENCE_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        text = "crash it never said what"
        try:
            prepare()
            life()
            text = "ok "
        except JournalError as error:
            text = f"ok {type(error).__name__}: {error}"
        except BaseException as error:  # noqa: BLE001 - it's told to the parent
            text = f"crash {type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode()[:4000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        kind, _, message = pipe.read().decode().partition(" ")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return Outcome("", f"killed by signal {os.WTERMSIG(status)}")
    return Outcome("", message) if kind == "crash" else Outcome(message, "")
