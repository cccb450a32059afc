"""Verification: is this journal whole, and did its engine keep the laws?

Three independent checks in one pass: the hash chain (`refold.journal.verify`), the laws after every event
(`refold.scheduler.laws`, which share no code with the fold that they judge), and the digests that the engine recorded of
its own state. What no single file can prove is that its tail wasn't cut off together with its head: give the head that an
earlier verification printed.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from refold.engine.history.redaction import erased_of
from refold.engine.history.replay import Contradiction, fold_event
from refold.journal.codec import decode
from refold.journal.errors import InvariantViolation, JournalCorrupt, Rejected
from refold.journal.events import ContentRedacted, EngineOpened, Event, StateDigest, WorkerLost
from refold.journal.record import EMPTY_HEAD, Head, head_after
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.verify import attestation_of, read_verified
from refold.projections.totals import Totals
from refold.scheduler.lawbook import LawBook
from refold.scheduler.laws import LAWS
from refold.scheduler.state import State

_HEAD = re.compile(r"(\d{1,18}):([0-9a-fA-F]{64})")
_LAW = re.compile(r"^(L\d+) broken")


class Verdict(NamedTuple):
    """A clean bill: what was counted, the laws that were checked after each event, and the head to remember.

    `num_closed_workers` of the totals' lost workers weren't lost: they ended with an engine that closed in good order.
    """

    totals: Totals
    num_records: int
    num_events: int
    num_engines: int
    num_closed_workers: int
    num_digests: int
    num_erased_digests: int
    num_redacted_records: int
    num_redacted_requests: int
    laws: tuple[str, ...]
    head: Head
    state: State


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
    on_record: Callable[[], None] | None = None,
) -> Verdict:
    """Check the whole stream; `expect` is a head that it must reach, `on_record` is called after each record.

    Raises:
        JournalCorrupt: a record is edited, deleted, moved or cut off; or isn't a list of events.
        Contradiction: the records are whole, and an event breaks a law.
    """
    state, book, totals, head = State(), LawBook(), Totals(), EMPTY_HEAD
    contents, lost, redacted = attestation_of(reader, stream), dict[int, int](), set[int]()
    kinds: Counter[type[Event]] = Counter()
    num_closed_workers = 0
    for record in read_verified(reader, stream, expect=expect, contents=contents):
        events = decode(record)
        for index, event in enumerate(events):
            num_closed_workers += type(event) is WorkerLost and not state.is_open
            fold_event(state, event, record.position, index)
            _judge(state, book, event, record.position, index)
        if record.position in contents.redacted:
            lost |= {handle: record.position for handle in erased_of(events) if handle not in lost}
        redacted.update(handle for event in events if isinstance(event, ContentRedacted) for handle in event.handles)
        totals.observe_all(events)
        kinds.update(map(type, events))
        head = head_after(record)
        if on_record is not None:
            on_record()
    _check_redacted(lost, redacted)
    return Verdict(
        totals=totals,
        num_records=head.position,
        num_events=kinds.total(),
        num_engines=kinds[EngineOpened],
        num_closed_workers=num_closed_workers,
        num_digests=kinds[StateDigest],
        num_erased_digests=book.num_erased_digests,
        num_redacted_records=len(contents.redacted),
        num_redacted_requests=len(redacted),
        laws=tuple(LAWS),
        head=head,
        state=state,
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


def _judge(state: State, book: LawBook, event: Event, position: int, index: int) -> None:
    """Let the laws look at one event; whatever they raise is a violation at that place."""
    try:
        book.observe(state, event)
    except Exception as error:
        law = _LAW.match(str(error)) if isinstance(error, InvariantViolation) else None
        detail = str(error) if law else " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise Contradiction(
            f"{type(event).__name__} (event {index} of record {position}): {detail}",
            position=position,
            index=index,
            law=law[1] if law else "unknown",
        ) from error
