"""Progress: a bar on stderr, on a terminal only, and only for what takes longer than two seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from refold.engine.cli.output import colour_on

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 2.0


class Bar:
    """Call `advance` as often as you like; nothing is drawn before `PATIENCE_S` have passed."""

    def __init__(self, label: str, total: int, unit: str, *, is_wanted: bool = True) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._watched = is_wanted and sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._done = 0
        self._progress: Progress | None = None

    def advance(self, amount: int = 1) -> None:
        """Count."""
        if not self._watched:
            return
        self._done += amount
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._done)
        elif time.monotonic() - self._started_s > PATIENCE_S:
            self._progress = self._draw()

    def close(self) -> None:
        """Take the bar away."""
        self._watched = False
        if self._progress is not None:
            self._progress.stop()

    def _draw(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(file=sys.stderr, highlight=False, no_color=not colour_on(sys.stderr))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self._unit))
        # What is written to stdout is printed above the bar, by the bar's console: so only where both are a terminal. A file or a
        # pipe would not get it.
        above = sys.stdout.isatty()
        progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, redirect_stdout=above)
        progress.add_task(self._label, total=self._total, completed=self._done)
        progress.start()
        return progress


@contextmanager
def bar(label: str, total: int, unit: str, *, is_wanted: bool = True) -> Iterator[Bar]:
    """A bar that is gone afterwards, whatever happens. `is_wanted`: nothing else on the screen shows how far it is."""
    drawn = Bar(label, total, unit, is_wanted=is_wanted)
    try:
        yield drawn
    finally:
        drawn.close()
