"""Is each content the one that was written, or what a redaction left of it?

The chain covers a content by its digest. A content with another digest, or none at all, is fine if a later record attests it: a
`ContentRedacted` that names the position and the digest of what is left. The last one to name a position holds. So there are
four things that a content can be, and two of them are damage:

- what was written, and no later record says otherwise;
- what the last redaction left of it;
- what was there before a redaction, which says that it's gone (`restored`);
- gone or something else, and nobody attests it (`erased`, `edited`).

A record comes before its redaction, so who reads once knows at the end of the stream. Who can read again looks ahead when it
meets the first such content, and says at once what is wrong. The journal may be live: what was redacted after it was read is
read again.
"""

from collections.abc import Callable, Collection, Iterable

from refold.journal.codec import decode
from refold.journal.errors import bad_record
from refold.journal.events import ContentRedacted
from refold.journal.record import Record, content_digest, has_whole_content

Read = Callable[[int, int | None], Iterable[Record]]
NOTHING_LEFT = ""
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
                self._look_ahead(record.position)
        for position, left in attested_by(record):
            if self._start <= position < record.position:
                self._attested[position] = left
                if position not in self._found:
                    self._look_again(position, record.position)

    def settle(self) -> None:
        """The stream has ended: whatever isn't attested by now is damage.

        Raises:
            JournalCorrupt: names the first bad position and the kind.
        """
        for position in sorted(self._found):
            attested = self._attested.get(position)
            if attested != self._found[position]:
                self._look_again(position, None)
                _check(position, self._found[position], attested)

    def _look_ahead(self, position: int) -> None:
        assert self._read is not None, "who looks ahead can read again"
        if self._expected is None:
            read = self._read
            self._expected = {p: left for record in read(position + 1, None) for p, left in attested_by(record)}
        if self._expected.get(position) != self._found[position]:
            self._look_again(position, None)
            _check(position, self._found[position], self._expected.get(position))

    def _look_again(self, position: int, said_at: int | None) -> None:
        """Read a content once more: it may have been redacted since."""
        for record in () if self._read is None else self._read(position, position + 1):
            if not has_whole_content(record):
                self._found[position] = left_of(record.content)
        if said_at is not None and position not in self._found:
            raise bad_record(position, "restored", f"has its content, which record {said_at} says was redacted")


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
