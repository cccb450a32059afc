"""The journal in numbers, for little reading: its ends, its newest snapshot, and the records behind that.

Counts of requests and tokens are totals that the fold keeps, so the newest snapshot has them up to its position, and only what
lies behind it is read. What kinds of events there are and how many bytes each takes needs every record: that is asked for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from refold.engine.folding import nearest
from refold.journal.archives import Archive, ArchivedReader, border_of
from refold.journal.codec import decode
from refold.journal.errors import bad_record
from refold.journal.events import ContentRedacted, Event, QuarantineLifted, RequestQuarantined
from refold.journal.naming import naming
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after, size_of
from refold.journal.snapshots import SnapshotEntry, SnapshotReader
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import verified, verified_part
from refold.projections.suspicion import Suspicion, lift, quarantine
from refold.projections.totals import Totals

NS_PER_S = 1_000_000_000
S_PER_DAY = 86_400
RECENT_RECORDS = 1024
MIN_GROWTH_S = 3600.0


class Span(NamedTuple):
    """Some records: how many, from when to when, and their bytes of body and content where they were counted."""

    num_records: int
    first_ns: int
    last_ns: int
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took to write them. At least 0, whatever the clock did."""
        return max(0, self.last_ns - self.first_ns) / NS_PER_S

    def per_day(self, amount: int) -> int | None:
        """What `amount`, over this span, comes to in a day; None where a day would be made up from less than `MIN_GROWTH_S`."""
        return int(amount * S_PER_DAY / self.seconds) if self.seconds >= MIN_GROWTH_S else None


class Kind(NamedTuple):
    """Events of one kind: how many, and their bytes as JSON, content included."""

    num_events: int
    num_bytes: int


class Statistics(NamedTuple):
    """What is known of one stream. `kinds` is empty if it wasn't asked for.

    `num_quarantined`: contents that are kept out because they killed workers.
    """

    head: Head
    border: Head
    all: Span
    recent: Span
    totals: Totals
    snapshots: list[SnapshotEntry]
    archives: list[Archive]
    kinds: dict[str, Kind]
    num_quarantined: int = 0

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens a second of the stream's life; None of one that has none."""
        return self.totals.tokens / self.all.seconds if self.all.seconds else None

    @property
    def records_per_s(self) -> float | None:
        """Over the most recent records, which may be much more than over all."""
        return self.recent.num_records / self.recent.seconds if self.recent.seconds else None


def statistics(
    reader: JournalReader,
    stream: str = DEFAULT_STREAM,
    *,
    by_kind: bool = False,
    on_record: Callable[[], None] = lambda: None,
) -> Statistics | None:
    """The numbers of a stream; None if nothing was written to it. `by_kind` reads every record.

    Raises:
        JournalCorrupt: a record that was read doesn't follow from the one before it.
        JournalError: the journal can't be read, or records that are needed are archived and not within reach.
    """
    head = reader.head(stream)
    if not head.position:
        return None
    border = border_of(reader, stream)
    totals, kinds, known = (_count_all if by_kind else _count_rest)(reader, stream, head, on_record)
    return Statistics(
        head=head,
        border=border,
        all=_span(reader, stream, border, border.position, head.position),
        recent=_span(reader, stream, border, max(border.position, head.position - RECENT_RECORDS), head.position),
        totals=totals,
        snapshots=reader.snapshots(stream) if isinstance(reader, SnapshotReader) else [],
        archives=reader.archives(stream) if isinstance(reader, ArchivedReader) else [],
        kinds=kinds,
        num_quarantined=len(known.quarantined),
    )


def _span(reader: JournalReader, stream: str, border: Head, start: int, stop: int) -> Span:
    first, last = (_record_at(reader, stream, border, position) for position in (start, stop - 1))
    return Span(stop - start, first.time_ns, last.time_ns)


def _record_at(reader: JournalReader, stream: str, border: Head, position: int) -> Record:
    """The record there, after it was checked to follow from the one before it, or from the border."""
    with naming(reader):
        before = border if position == border.position else _head_of(reader, stream, position - 1)
        for record in verified(reader.read(stream, position, position + 1), before, is_whole=False):
            return record
        raise bad_record(position, "deleted", "is not there")


def _head_of(reader: JournalReader, stream: str, position: int) -> Head:
    """The head after a record, as the record says."""
    if position < 0:
        return EMPTY_HEAD
    for record in reader.read(stream, position, position + 1):
        return head_after(record)
    raise bad_record(position, "deleted", "is not there")


def _count_rest(
    reader: JournalReader, stream: str, end: Head, on_record: Callable[[], None]
) -> tuple[Totals, dict[str, Kind], Suspicion]:
    """The totals of the newest snapshot, and of what lies behind it."""
    folded, head = nearest(reader, stream, end.position)
    known = folded.state.suspicion
    for record in verified_part(reader, stream, head, end.position, end):
        events = decode(record)
        folded.totals.observe_all(events)
        _follow_quarantine(known, events)
        on_record()
    return folded.totals, {}, known


def _follow_quarantine(known: Suspicion, events: Sequence[Event]) -> None:
    """What is quarantined, and nothing else of suspicion; whose it is, is told by the handle alone."""
    for event in events:
        if isinstance(event, RequestQuarantined):
            quarantine(known, event.content_digest, event.handle, "")
        elif isinstance(event, QuarantineLifted):
            lift(known, [event.handle])
        elif isinstance(event, ContentRedacted):
            lift(known, event.handles)


def _count_all(
    reader: JournalReader, stream: str, end: Head, on_record: Callable[[], None]
) -> tuple[Totals, dict[str, Kind], Suspicion]:
    totals, kinds, suspicion = Totals(), dict[str, Kind](), Suspicion()
    encoder = msgspec.json.Encoder()
    for record in verified_part(reader, stream, EMPTY_HEAD, end.position, end):
        events = decode(record)
        totals.observe_all(events)
        _follow_quarantine(suspicion, events)
        sizes = [len(encoder.encode(event)) for event in events] if len(events) > 1 else [size_of(record)]
        for event, size in zip(events, sizes, strict=True):
            name = type(event).__name__
            known = kinds.get(name, Kind(0, 0))
            kinds[name] = Kind(known.num_events + 1, known.num_bytes + size)
        on_record()
    return totals, dict(sorted(kinds.items(), key=lambda item: -item[1].num_bytes)), suspicion
