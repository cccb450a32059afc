"""A journal that is followed for as long as one likes: is it still the one that was opened?

A file that was moved away, or deleted, stays open to whoever has it open, and nothing is ever appended to it again. He would wait for
ever, and a replica would fall behind in silence, while an engine writes to another file of that name, a backup say.
"""

import contextlib
from collections.abc import Iterator

from refold.engine.cli.failures import UNREADABLE, Complaint
from refold.engine.cli.output import named
from refold.journal.errors import JournalError
from refold.journal.stores.location import locate


class Followed:
    """What lies in a journal's place, as it was when this was made."""

    __slots__ = ("_identity", "_journal")

    def __init__(self, journal: str) -> None:
        self._journal = journal
        self._identity = self._look()

    def check(self) -> None:
        """See to it that the same still lies there.

        Raises:
            Complaint: something else does, or nothing.
        """
        found = self._look()
        if found != self._identity:
            what = "it was moved away, or deleted" if found is None else "another was put in its place"
            line = f"{named(self._journal)} is no longer the journal that was followed: {what}"
            raise Complaint(line, "the same command follows what is there, once it is", UNREADABLE)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """What can't be read because something else lies there by now, or nothing, is told as that.

        Raises:
            Complaint: see `check`.
        """
        try:
            yield
        except JournalError:
            self.check()
            raise

    def _look(self) -> tuple[int, int] | None:
        """The identity of the file or folder; None of a database, or if nothing is there."""
        path = locate(self._journal).path
        try:
            there = None if path is None else path.stat()
        except OSError:  # whoever opens it says why
            return None
        return None if there is None else (there.st_dev, there.st_ino)
