"""Verification: is this journal whole, and did its engine keep the laws?

Three independent checks in one pass: the hash chain (`refold.journal.verify`), the laws after every event
(`refold.scheduler.laws`, which share no code with the fold that they judge), and the digests that the engine recorded of
its own state. What no single file can prove is that its tail wasn't cut off together with its head: give the head that an
earlier verification printed.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from refold.engine.history.causes import Cause, cause_of_law, gap_in
from refold.engine.history.redaction import erased_of
from refold.engine.history.redecide import Decider, Divergence
from refold.engine.history.replay import Contradiction, fold_event, unheard
from refold.journal.codec import decode
from refold.journal.contents import attested_by
from refold.journal.errors import InvariantViolation, JournalCorrupt, JournalError, Rejected
from refold.journal.events import ContentRedacted, EngineOpened, Event, StateDigest
from refold.journal.naming import naming
from refold.journal.own_name import check_name
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import attestation_of, read_verified, verified_part
from refold.projections.totals import Totals
from refold.scheduler.lawbook import LawBook
from refold.scheduler.laws import LAWS
from refold.scheduler.state import State

SHORT_RECORDS = 2_000
"""Up to this length, a journal is checked after every event without being asked."""

RECORDS_AHEAD = 64

_MOST_READINGS = 5

_HEAD = re.compile(r"(\d{1,18}):([0-9a-fA-F]{64})")
_LAW = re.compile(r"^(L\d+) broken")


class Verdict(NamedTuple):
    """A clean bill: what was counted, the laws that were checked after each event, and the head to remember."""

    totals: Totals
    num_records: int
    num_events: int
    num_engines: int
    num_digests: int
    num_erased_digests: int
    num_redacted_records: int
    num_redacted_requests: int
    laws: tuple[str, ...]
    head: Head
    state: State
    num_checks: int = 0
    num_decided: int = 0
    num_forgotten: int = 0


def parse_head(text: str) -> Head:
    """The head in `POSITION:HASH`, as `refold verify` prints it.

    Raises:
        Rejected: it isn't one.
    """
    match = _HEAD.fullmatch(text.strip())
    if match is None:
        raise Rejected(
            f"head {text[:80]!r}: give POSITION:HASH with 64 hexadecimal digits, as `refold verify` prints it"
        )
    return Head(int(match[1]), bytes.fromhex(match[2]), 0)


def format_head(head: Head) -> str:
    """`POSITION:HASH`."""
    return f"{head.position}:{head.hash.hex()}"


def verify_journal(
    reader: JournalReader,
    stream: str = DEFAULT_STREAM,
    expect: Head | None = None,
    on_record: Callable[[], object] = unheard,
    *,
    redecide: bool = False,
    every_event: bool = False,
) -> Verdict:
    """Check the whole stream; `expect` is a head that it must reach, `on_record` is called after each record.

    The journal may be live. What seems wrong while requests are redacted may be a view of some records before it and of some after: it's
    read anew then.

    With `redecide`, each decision is taken again by today's code (L12). In a long journal the laws of state are checked as
    often as they cost little beside the fold (see `Judge`); with `every_event`, after each event however long it takes.

    Raises:
        JournalCorrupt: a record is edited, deleted, moved or cut off; or isn't a list of events.
        Contradiction: the records are whole, and an event breaks a law, or would not be decided today.
        JournalError: it can't be read, or not of one moment.
    """
    with naming(reader):
        for _ in range(_MOST_READINGS):
            begun = reader.head(stream).position
            try:
                return _verdict(reader, stream, expect, on_record, redecide=redecide, every_event=every_event)
            except (JournalCorrupt, Contradiction):
                if not _was_redacted_since(reader, stream, begun):
                    raise
        raise JournalError(
            f"requests of stream {stream!r} were redacted during each of {_MOST_READINGS} readings, so no view of it was of one moment: "
            "verify it again later"
        )


def _was_redacted_since(reader: JournalReader, stream: str, position: int) -> bool:
    try:
        return any(attested_by(record) for record in reader.read(stream, position))
    except JournalError:  # the damage itself, maybe
        return False


def _verdict(
    reader: JournalReader,
    stream: str,
    expect: Head | None,
    on_record: Callable[[], object],
    *,
    redecide: bool,
    every_event: bool,
) -> Verdict:
    stored = reader.head(stream).position
    judge = Judge(every_event=every_event or stored <= SHORT_RECORDS, decider=Decider() if redecide else None)
    contents, lost, redacted = attestation_of(reader, stream), dict[int, int](), set[int]()
    totals, head, kinds = Totals(), EMPTY_HEAD, Counter[type[Event]]()
    try:
        for record in read_verified(reader, stream, expect=expect, contents=contents):
            events = decode(record)
            check_name(events, record.position, stream)
            judge.observe(record, events)
            if record.position in contents.redacted:
                lost |= {handle: record.position for handle in erased_of(events) if handle not in lost}
            redacted.update(handle for e in events if isinstance(e, ContentRedacted) for handle in e.handles)
            totals.observe_all(events)
            kinds.update(map(type, events))
            head = head_after(record)
            on_record()
        if head.position:
            judge.check(head.position - 1, len(events) - 1, events[-1])
    except (Contradiction, JournalCorrupt) as error:
        raise _the_first(reader, stream, judge, error) from error
    _check_redacted(lost, redacted)
    return Verdict(
        totals=totals,
        num_records=head.position,
        num_events=kinds.total(),
        num_engines=kinds[EngineOpened],
        num_digests=kinds[StateDigest],
        num_erased_digests=judge.book.num_erased_digests,
        num_redacted_records=len(contents.redacted),
        num_redacted_requests=len(redacted),
        laws=(*LAWS, "L12") if redecide else tuple(LAWS),
        head=head,
        state=judge.state,
        num_checks=judge.book.num_checks,
        num_decided=judge.decider.num_decided if judge.decider else 0,
        num_forgotten=judge.decider.num_forgotten if judge.decider else 0,
    )


def _check_redacted(lost: dict[int, int], redacted: set[int]) -> None:
    """Only requests that a record says were redacted have lost tokens; `lost` has where each lost its first."""
    for handle, position in lost.items():
        if handle not in redacted:
            raise JournalCorrupt(
                f"record {position} has lost tokens of handle {handle}, which no record says was redacted (erased); restore a "
                "backup",
                position=position,
                kind="erased",
            )


def _the_first(
    reader: JournalReader, stream: str, judge: "Judge", error: Contradiction | JournalCorrupt
) -> Contradiction | JournalCorrupt:
    """The first thing that is wrong: maybe one that was passed unseen between the last two checks."""
    if isinstance(error, Contradiction) and error.cause.kind != "lost-event":
        _look_for_a_gap(reader, stream, judge.state, error)
    if judge.every_event or judge.num_unchecked == 0:
        return error
    again = Judge(every_event=False, decider=None)
    try:
        for record in read_verified_until(reader, stream, error.position + 1):
            again.every_event = record.position > judge.last_clean
            again.observe(record, decode(record))
    except Contradiction as earlier:
        if (earlier.position, earlier.index) < (error.position, getattr(error, "index", 0)):
            return earlier
    except JournalCorrupt:
        pass
    return error


def _look_for_a_gap(reader: JournalReader, stream: str, state: State, error: Contradiction) -> None:
    """Whether the numbers in what follows say that something before isn't told; then that is the cause."""
    if error.law not in {"L12", "fold"}:
        return
    ahead = reader.read(stream, error.position, error.position + RECORDS_AHEAD)
    try:
        gap = gap_in(state, map(decode, ahead))
    except JournalError:
        return
    if gap:
        error.cause = Cause("lost-event", gap)


class Judge:
    """Folds a journal that anyone may have written, and lets the laws look on.

    The law book follows every event. What holds of the state by itself (counters, blocks, queues) costs as much as the state is
    large, so with a large state it is checked after so many request-events that it costs a fraction of the fold; a violation
    that stays is found at the next check, and `verify_journal` goes back for the first event that shows it. `last_clean` is
    the position of the record behind which everything was in order.
    """

    def __init__(self, *, every_event: bool, decider: Decider | None) -> None:
        self.state = State()
        self.book = LawBook()
        self.every_event = every_event
        self.decider = decider
        self.last_clean = -1
        self.num_unchecked = 0

    def observe(self, record: Record, events: Sequence[Event]) -> None:
        """Judge one record.

        Raises:
            Contradiction: it is wrong.
        """
        position = record.position
        if self.decider is not None:
            divergence = self.decider.check(self.state, record, events)
            if divergence is not None:
                raise self._l12(divergence)
        for index, event in enumerate(events):
            fold_event(self.state, event, position, index)
            _judged(self.book.follow, self.state, event, position, index)
            self.num_unchecked += len(getattr(event, "handles", ())) or 1
            if self.every_event:
                self.check(position, index, event)
        if self.num_unchecked >= _worth_checking(self.state):
            self.check(position, len(events) - 1, events[-1])
            self.last_clean = position

    def check(self, position: int, index: int, event: Event) -> None:
        """Let the laws of state look at it as it is. Raises as `observe`."""
        _judged(lambda state, _: self.book.check(state), self.state, event, position, index)
        self.num_unchecked = 0

    def _l12(self, divergence: Divergence) -> Contradiction:
        return Contradiction(
            f"L12 broken (re-deciding gives the recorded decision): {divergence.words}",
            position=divergence.position,
            index=0,
            law="L12",
            cause=divergence.cause,
        )


def _worth_checking(state: State) -> int:
    """After how many request-events a check costs about a fifth of what they cost themselves."""
    entries = sum(len(step.handles) for step in state.window.in_flight)
    return (state.pool.num_blocks + 6 * len(state.requests.by_handle) + 2 * entries) // 3


def read_verified_until(reader: JournalReader, stream: str, stop: int) -> Iterator[Record]:
    """The first records of a stream, each after it was checked to follow from the one before."""
    return verified_part(reader, stream, stop=stop)


def _judged(look: Callable[[State, Event], None], state: State, event: Event, position: int, index: int) -> None:
    """Let the laws look; whatever they raise is a violation at that place."""
    try:
        look(state, event)
    except Exception as error:
        law = _LAW.match(str(error)) if isinstance(error, InvariantViolation) else None
        detail = str(error) if law else " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Contradiction(
            f"{type(event).__name__} (event {index} of record {position}): {detail}",
            position=position,
            index=index,
            law=law[1] if law else "unknown",
            cause=cause_of_law(law[1] if law else "unknown", event),
        ) from error
