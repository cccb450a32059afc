"""Is this the journal that was written? The hash chain answers, at the price of two sha256 per record.

A record's hash covers its header, its body, the digest of its content and the hash before it, so whatever was changed, the
first record that doesn't follow from its predecessor marks the place. What it can't see is a tail cut off together with the
stored head: only someone who remembers a head can, so every check here takes an expected one. It may be an old one: the
stream must pass through it.

The kind of damage is named as well as the evidence allows; `KINDS` says what each means, and `refold.journal.diagnosis` finds it.
Whether the events make sense is another question, asked by the scheduler's laws.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from refold.journal.beside import HARMLESS, check_row
from refold.journal.contents import Attestation
from refold.journal.diagnosis import diagnose, of_an_older_epoch
from refold.journal.ends import EndInDoubt, check_end, check_indexes
from refold.journal.errors import JournalCorrupt, bad_record
from refold.journal.naming import naming
from refold.journal.record import EMPTY_HEAD, Head, Record, follows, head_after, short
from refold.journal.store import DEFAULT_STREAM, JournalReader

KINDS: dict[str, str] = {
    "edited": "the record is there, and is not what was written, one flipped bit included",
    "deleted": "a record is gone, whether or not its place was closed up",
    "inserted": "a record was put in that was never written; those after it follow from the one before it",
    "reordered": "the record that belongs here lies elsewhere in the stream, or an older engine epoch follows a newer one",
    "truncated": "the stream ends before a head that is known",
    "torn": "the last record is there in part",
    "unmarked": "all that is there is whole, and what told how far the stream was acknowledged is lost",
    "renamed": "all records are whole, and were written to a stream of another name",
    "unindexed": "all records are whole, and an index that only finds them is damaged, or something beside them",
    "erased": "the record has lost its content, and no redaction says so",
    "restored": "the record has a content that a redaction says is gone",
}


@runtime_checkable
class Inspected(Protocol):
    """A reader of a container that can be damaged where no record shows it."""

    def inspect(self) -> None:
        """Look at what no record covers.

        Raises:
            JournalCorrupt: it's damaged; of a kind in `HARMLESS` if all records can be read in spite of it.
        """
        ...


class Chain:
    """A walk along a stream that checks each record against the one before. Goes on where it stopped.

    Attributes:
        head: after the last good record.
        contents: which contents aren't what was written; whoever has read the whole stream settles it.
    """

    def __init__(self, start_head: Head = EMPTY_HEAD, expect: Head | None = None) -> None:
        """Begin behind `start_head`; `expect` is a head to pass through, or None."""
        self.head = start_head
        self.contents = Attestation(start_head.position)
        self._before = start_head
        self._expect = expect
        _check_expected(start_head, expect)

    def follow(self, records: Iterable[Record]) -> Iterator[Record]:
        """The same records, each after it was checked. They begin at the head.

        Raises:
            JournalCorrupt: names the first bad position and the kind.
        """
        rest = iter(records)
        for record in rest:
            head = self.head
            if record.position != head.position or not follows(head, record):
                end = None if self._expect is None else self._expect.position
                raise bad_record(*diagnose(self._before, head, record, rest, end))
            if record.engine_epoch < head.engine_epoch:
                raise bad_record(*of_an_older_epoch(head, record.engine_epoch))
            self._before, self.head = head, head_after(record)
            self.contents.observe(record)
            _check_expected(self.head, self._expect)
            yield record

    def settle(self) -> None:
        """The whole stream was read.

        Raises:
            JournalCorrupt: it ends too early, or has a content that nobody attests.
        """
        _check_reached(self.head, self._expect)
        self.contents.settle()


def verified(
    records: Iterable[Record], start_head: Head = EMPTY_HEAD, expect: Head | None = None, *, is_whole: bool = True
) -> Iterator[Record]:
    """The same records, each after it was checked to follow from the one before.

    Args:
        records: from position `start_head.position` on.
        start_head: what they continue: `EMPTY_HEAD`, or a head that is trusted.
        expect: a head that the stream must reach and pass through, or None. Its engine epoch doesn't matter.
        is_whole: whether they go up to the stream's end. If not, a content that was redacted is let pass: what attests it may
            come later.

    Raises:
        JournalCorrupt: names the first bad position and the kind.
    """
    chain = Chain(start_head, expect)
    yield from chain.follow(records)
    _check_reached(chain.head, expect)
    if is_whole:
        chain.settle()


def verified_part(
    reader: JournalReader,
    stream: str,
    start_head: Head = EMPTY_HEAD,
    stop: int | None = None,
    expect: Head | None = None,
    *,
    is_whole: bool = False,
    contents: Attestation | None = None,
) -> Iterator[Record]:
    """Records of a journal from `start_head` on, before position `stop`, each after it was checked as by `verified`.

    The journal may be live: a content that was redacted since it was read is read again before anybody is told that it should be gone.

    Raises:
        JournalCorrupt: names the journal, the first bad position and the kind.
    """
    chain = Chain(start_head, expect)
    chain.contents = contents or attestation_of(reader, stream, start_head.position, looks_ahead=False)
    with naming(reader):
        yield from chain.follow(reader.read(stream, start_head.position, stop))
        _check_reached(chain.head, expect)
        if is_whole:
            chain.settle()


def attestation_of(reader: JournalReader, stream: str, start: int = 0, *, looks_ahead: bool = True) -> Attestation:
    """For a stream that is read from position `start` on, and can be read again."""
    return Attestation(start, lambda begin, end: reader.read(stream, begin, end), looks_ahead=looks_ahead)


def read_verified(
    reader: JournalReader,
    stream: str = DEFAULT_STREAM,
    *,
    expect: Head | None = None,
    contents: Attestation | None = None,
) -> Iterator[Record]:
    """All records of a stream, verified against their chain, the stored head and an expected one.

    The journal may be live: what is appended meanwhile is read and verified too. `contents` is a new one that the caller
    wants to look at afterwards, made with `attestation_of`.

    Raises:
        JournalCorrupt: names the first bad position and the kind.
    """
    with naming(reader):
        yield from _read_verified(reader, stream, expect, contents or attestation_of(reader, stream))


def _read_verified(reader: JournalReader, stream: str, expect: Head | None, contents: Attestation) -> Iterator[Record]:
    beside = _damage_beside(reader)
    stored = reader.head(stream)
    chain = Chain(expect=stored)
    chain.contents = contents
    for record in chain.follow(reader.read(stream)):
        _check_expected(chain.head, expect)
        yield record
    head = chain.head
    chain.settle()
    _check_reached(head, expect)
    if head.engine_epoch > stored.engine_epoch or head.position > stored.position:
        stored = reader.head(stream)
    if head.position > stored.position or head.engine_epoch > stored.engine_epoch:
        check_row(reader, stream)
        raise bad_record(stored.position, "edited", f"lies beyond the stored head at {stored.position}")
    check_end(reader, stream)  # first: an index can be mended only where the end is sure
    check_indexes(reader, stream)
    if beside is not None:
        raise beside


def _damage_beside(reader: JournalReader) -> JournalCorrupt | None:
    """What is wrong with the container where no record is: to be told once the records were read.

    Raises:
        JournalCorrupt: what is wrong may concern them.
    """
    try:
        if isinstance(reader, Inspected):
            reader.inspect()
    except JournalCorrupt as error:
        if error.kind not in HARMLESS:
            raise
        return error
    return None


def verify_stream(reader: JournalReader, stream: str = DEFAULT_STREAM, *, expect: Head | None = None) -> Head:
    """Verify a whole stream; returns the head after its last record.

    Raises:
        JournalCorrupt: names the first bad position and the kind.
    """
    head = EMPTY_HEAD
    for record in read_verified(reader, stream, expect=expect):
        head = head_after(record)
    return head


def _check_expected(head: Head, expect: Head | None) -> None:
    if expect is not None and head.position == expect.position and head.hash != expect.hash:
        raise bad_record(
            max(head.position - 1, 0),
            "edited",
            f"is not the one that the expected head at {head.position} names: it has the hash {short(head.hash)}, and the head "
            f"has {short(expect.hash)}, so it was changed, or the head was",
        )


def _check_reached(head: Head, expect: Head | None) -> None:
    if expect is not None and head.position < expect.position:
        raise EndInDoubt(
            f"the stream ends at {head.position}, expected {expect.position}: its tail was cut off; restore a backup",
            position=head.position,
            num_known=expect.position,
            told_by="head",
            kind="truncated",
        )
