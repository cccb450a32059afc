"""Anchoring: the engine puts its durable head into a file, now and then and when it closes.

The file belongs elsewhere than the journal: another disk, or a share that the engine's host can only write to. When the engine
opens, the journal must still pass through the head that is there: if it ends before it, or went another way, somebody put an
older or another journal in its place, and the engine doesn't open.

It's written by the journal's writer, right after a commit: that thread waits for disks anyway.
"""

import os
import time
from pathlib import Path

from refold.engine.history.heads import export, read_head, write_head
from refold.engine.logs import get_logger
from refold.journal.errors import JournalCorrupt, RefoldError, Rejected
from refold.journal.record import Head
from refold.journal.store import JournalReader


class Anchor:
    """One stream's anchor file; nothing happens if there is no path."""

    __slots__ = ("_due_s", "_every_s", "_key", "_last", "_path", "_seen", "_stream")

    def __init__(self, stream: str, path: str | None, every_s: float, key: str | None) -> None:
        """`every_s` 0: after each commit."""
        self._path = None if path is None else Path(path)
        self._stream = stream
        self._every_s = every_s
        self._key = None if key is None else Path(key)
        self._due_s = 0.0
        self._seen: Head | None = None
        self._last: Head | None = None

    def check_place(self) -> None:
        """There is a place to write to; asked before a journal is opened. What happens to it later is a warning.

        Raises:
            Rejected: the path is a folder, or its folder isn't there or can't be written to.
        """
        if self._path is None:
            return
        target = self._path.resolve()
        if target.is_dir():
            raise Rejected(f"anchor is {str(self._path)!r}, which is a folder: name a file in it")
        if not target.parent.is_dir():
            raise Rejected(
                f"anchor is {str(self._path)!r}, and {target.parent} is no folder: make it, or name another file"
            )
        is_special = target.exists() and not target.is_file()  # a pipe or a device is written as it is
        if not os.access(target if is_special else target.parent, os.W_OK):
            raise Rejected(
                f"anchor is {str(self._path)!r}, and this user may not write there: give the right to, or name another file"
            )

    def check(self, reader: JournalReader, head: Head) -> None:
        """The journal, which ends at `head`, passes through the head in the file, if there is one.

        Raises:
            Rejected: the file holds no head, or one that the key didn't sign; or the key can't be used.
            JournalCorrupt: it doesn't.
        """
        export(self._stream, head, 0, key=self._key)
        if self._path is None or not self._path.exists():
            return
        anchored = read_head(self._path, self._key).head
        if anchored.position > head.position:
            raise JournalCorrupt(
                f"the journal ends at {head.position}, its anchor {self._path} is at {anchored.position}: its tail was cut off, or "
                "an older copy was put in its place; restore a backup",
                position=head.position,
                kind="truncated",
            )
        for record in reader.read(self._stream, anchored.position - 1, anchored.position) if anchored.position else ():
            if record.hash != anchored.hash:
                raise JournalCorrupt(
                    f"record {record.position} is not the one that the anchor {self._path} names: this is another journal; restore "
                    "a backup, or name another anchor",
                    position=record.position,
                    kind="edited",
                )

    def committed(self, head: Head) -> None:
        """The journal is durable up to `head`: write that down, if it's time."""
        self._seen = head
        if self._path is not None and time.monotonic() >= self._due_s:
            self._write(self._path, head)

    def close(self) -> None:
        """Write down where the engine has ended."""
        if self._path is not None and self._seen is not None:
            self._write(self._path, self._seen)

    def _write(self, path: Path, head: Head) -> None:
        """What goes wrong is a warning: the journal is whole without."""
        self._due_s = time.monotonic() + self._every_s
        if head == self._last:
            return
        try:
            write_head(path, export(self._stream, head, time.time_ns(), key=self._key))
            self._last = head
        except RefoldError as error:
            get_logger().warning("anchor_not_written", path=str(path), reason=str(error))
