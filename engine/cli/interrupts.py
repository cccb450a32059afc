"""SIGTERM, as service managers send it: like Ctrl-C, but for the exit status.

Without this it would end the process as a kill does. The journal survives that too, but the steps in flight are lost, and whoever
opens it next is told of an engine that ended without a word.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from refold.engine.cli.failures import INTERRUPTED, TERMINATED


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whatever cleans up after Ctrl-C does so after this."""


_BOTH = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def terminable() -> Iterator[None]:
    """Meanwhile SIGTERM raises `Terminated`, in the main thread; in any other there are no signals to handle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _BOTH}
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_DFL:  # else somebody has had enough, and that stays so
                signal.signal(number, handler)


def once_is_enough() -> None:
    """From now on either signal ends the process at once."""
    for number in _BOTH:
        signal.signal(number, signal.SIG_DFL)


def let_finish(tell: Callable[[], None]) -> None:
    """From now on the first of either signal interrupts nothing, for all is done but the closing: it's answered by `tell`.

    The next one ends the process at once. Holds as long as `terminable` does.
    """

    def answer(_number: int, _frame: object) -> None:
        once_is_enough()
        with contextlib.suppress(RuntimeError):  # it came while stderr was being written to
            tell()

    if threading.current_thread() is threading.main_thread():
        for number in _BOTH:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, answer)


def in_words(interrupt: KeyboardInterrupt) -> tuple[str, int]:
    """What happened, and the exit status."""
    return ("terminated", TERMINATED) if isinstance(interrupt, Terminated) else ("interrupted", INTERRUPTED)


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated
