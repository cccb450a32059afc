"""Is each content the one that was written, or what a redaction left of it?

The chain covers a content by its digest. A content with another digest, or none at all, is fine if a later record attests it: a
`ContentRedacted` that names the position and the digest of what is left. The last one to name a position holds. So there are
four things that a content can be, and two of them are damage:

- what was written, and no later record says otherwise;
- what the last redaction left of it;
- what was there before a redaction, which says that it's gone (`restored`);
- gone or something else, and nobody attests it (`erased`, `edited`).

A record comes before its redaction, so who reads once knows at the end of the stream. Who can read again looks ahead when it
meets the first such content, and says at once what is wrong. The journal may be live, and a redaction comes at any moment: what was read
before it, and what it has erased by the time it's read, is looked at again before anybody is told of damage.
"""

import time
from collections.abc import Callable, Collection, Iterable

from refold.journal.codec import decode
from refold.journal.errors import bad_record
from refold.journal.events import ContentRedacted
from refold.journal.record import Record, content_digest, has_whole_content

Read = Callable[[int, int | None], Iterable[Record]]
NOTHING_LEFT = ""
_LOOKS, _LOOKS_AT_ONE, _PAUSE_S = 3, 26, 0.02
"""Only whoever has found what looks like damage looks again, for half a second at most."""
_MARK = b'"ContentRedacted"'


def left_of(content: bytes | None) -> str:
    """How a `ContentRedacted` names what is left of a content: its SHA-256 in hex, empty where nothing is."""
    return NOTHING_LEFT if content is None else content_digest(content).hex()


class Attestation:
    """Follows a stream's verified records, and remembers whose content isn't the one that was written."""

    __slots__ = ("_attested", "_expected", "_found", "_looks_ahead", "_read", "_start")

    def __init__(self, start: int = 0, read: Read | None = None, *, looks_ahead: bool = True) -> None:
        """Begin.

        Args:
            start: position of the first record that it will see.
            read: reads the stream again, from a position up to another, exclusive; None if that can't be done.
            looks_ahead: use that also to say at once whether a content that isn't the one that was written is attested later.
        """
        self._start = start
        self._read = read
        self._looks_ahead = looks_ahead and read is not None
        self._found: dict[int, str] = {}
        self._attested: dict[int, str] = {}
        self._expected: dict[int, str] | None = None

    @property
    def redacted(self) -> Collection[int]:
        """The positions of records that have lost content."""
        return self._found.keys()

    def observe(self, record: Record) -> None:
        """Follow one record.

        Raises:
            JournalCorrupt: its content is damaged, or it says that a content is gone that isn't.
        """
        if not has_whole_content(record):
            self._found[record.position] = left_of(record.content)
            if self._looks_ahead:
                self._prove(record.position)
        for position, left in attested_by(record):
            if self._start <= position < record.position:
                self._attested[position] = left
                if position not in self._found and not self._is_gone_soon(position):
                    what = f"has its content, which record {record.position} says was redacted"
                    raise bad_record(position, "restored", what)

    def settle(self) -> None:
        """The stream has ended: whatever isn't attested by now is damage.

        Raises:
            JournalCorrupt: names the first bad position and the kind.
        """
        for position in sorted(self._found):
            if self._attested.get(position) != self._found[position]:
                self._prove(position)

    def _prove(self, position: int) -> None:
        """See to it that what is left of a content is attested: maybe by a redaction that has come since, which then was read half."""
        if self._read is None:
            _check(position, self._found[position], self._attested.get(position))
            return
        for _ in range(_LOOKS):
            if self._expected is not None and self._expected.get(position) == self._found[position]:
                return
            self._is_gone(position, self._read)
            self._expected = {p: left for record in self._read(position + 1, None) for p, left in attested_by(record)}
        _check(position, self._found[position], (self._expected or {}).get(position))

    def _is_gone_soon(self, position: int) -> bool:
        """Whether a content has been redacted since it was read. A store may show the redaction a moment before it's through with it."""
        if self._read is None:
            return False
        for look in range(_LOOKS_AT_ONE):
            time.sleep(_PAUSE_S if look else 0.0)
            if self._is_gone(position, self._read):
                return True
        return False

    def _is_gone(self, position: int, read: Read) -> bool:
        for record in read(position, position + 1):
            if not has_whole_content(record):
                self._found[position] = left_of(record.content)
                return True
        return False


def attested_by(record: Record) -> list[tuple[int, str]]:
    """What a record says is left of earlier contents: position and digest."""
    if _MARK not in (record.body or b""):  # a damaged one may be None
        return []
    said = [event for event in decode(record) if isinstance(event, ContentRedacted)]
    return [pair for event in said for pair in zip(event.positions, event.content_hashes, strict=False)]


def _check(position: int, found: str, attested: str | None) -> None:
    if attested == found:
        return
    if attested is not None:
        raise bad_record(position, "edited", "has another content than its redaction left of it")
    if found == NOTHING_LEFT:
        raise bad_record(position, "erased", "has lost its content, and no record says that it was redacted")
    raise bad_record(position, "edited", "has another content than the one that was written")
