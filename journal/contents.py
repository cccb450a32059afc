"""Is each content the one that was written, or what a redaction left of it?

The chain covers a content by its digest. A content with another digest, or none at all, is fine if a later record attests it: a
`ContentRedacted` that names the position and the digest of what is left. The last one to name a position holds. So there are
four things that a content can be, and three of them are damage:

- what was written, and no later record says otherwise;
- what the last redaction left of it;
- `restored`: what was there before a redaction, which says that it's gone;
- `erased`, or `edited`: gone, or something else, and nobody attests it.

What is attested can only be known at the end of the stream: a record comes before its redaction.
"""

from collections.abc import Collection

from refold.journal.codec import decode
from refold.journal.errors import JournalCorrupt
from refold.journal.events import ContentRedacted
from refold.journal.record import Record, content_digest, has_whole_content

_MARK = b'"ContentRedacted"'
NOTHING_LEFT = ""


def left_of(content: bytes | None) -> str:
    """How a `ContentRedacted` names what is left of a content: its SHA-256 in hex, empty where nothing is."""
    return NOTHING_LEFT if content is None else content_digest(content).hex()


class Attestation:
    """Follows a stream's records and remembers whose content isn't the one that was written. Feed it verified records only.

    `redacted` are their positions.
    """

    __slots__ = ("_attested", "_found", "_start")

    def __init__(self, start: int = 0) -> None:
        """Args: start: position of the first record that it will see."""
        self._start = start
        self._found: dict[int, str] = {}
        self._attested: dict[int, str] = {}

    @property
    def redacted(self) -> Collection[int]:
        """The positions of records that have lost content."""
        return self._found.keys()

    def observe(self, record: Record) -> None:
        """Follow one record.

        Raises:
            JournalCorrupt: it says that a content is gone, and it isn't.
        """
        if not has_whole_content(record):
            self._found[record.position] = left_of(record.content)
        if _MARK in record.body:
            for event in decode(record):
                if isinstance(event, ContentRedacted):
                    self._attest(event, record.position)

    def settle(self) -> None:
        """The stream has ended: whatever isn't attested by now is damage.

        Raises:
            JournalCorrupt: names the first bad position and the kind.
        """
        for position, found in sorted(self._found.items()):
            attested = self._attested.get(position)
            if attested == found:
                continue
            if attested is not None:
                raise _corrupt(position, "edited", "has another content than its redaction left of it")
            if found == NOTHING_LEFT:
                raise _corrupt(position, "erased", "has lost its content, and no record says that it was redacted")
            raise _corrupt(position, "edited", "has another content than the one that was written")

    def _attest(self, event: ContentRedacted, said_at: int) -> None:
        for position, left in zip(event.positions, event.content_hashes, strict=False):
            if self._start <= position < said_at:
                if position not in self._found:
                    raise _corrupt(position, "restored", f"has its content, which record {said_at} says was redacted")
                self._attested[position] = left


def _corrupt(position: int, kind: str, what: str) -> JournalCorrupt:
    return JournalCorrupt(f"record {position} {what} ({kind}); restore a backup", position=position, kind=kind)
