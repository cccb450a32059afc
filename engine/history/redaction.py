"""Planning a redaction: which contents lose what, so that nothing of a request's words is left and everything else is.

A content belongs to a step, and a step to many requests. So the plan reads the whole journal and keeps, of each content, what
is not the request's: the tokens of the others stay as they are, those of the request become null. A content of which nothing
is left goes whole. Each new content has a salt of its own.

The journal also holds digests of the folded state. Those of states that held erased tokens have to go too: with few tokens
unknown, a digest tells whether a guess at them is right. Which ones these are is found by folding: the journal as it is beside
the journal as it will be. Where both agree with the recorded digest, it stays, and is checked as before. Where the first
disagrees, the journal is not what its engine wrote, and nothing is redacted.
"""

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

from refold.engine.history.replay import Contradiction, fold_event
from refold.journal.codec import columns_of, decode, encode_content, stored_events
from refold.journal.content import TAKEN, Column, has_column, is_placeholder, put_back
from refold.journal.contents import left_of
from refold.journal.errors import NotFound, Rejected
from refold.journal.events import (
    DraftsProposed,
    Event,
    LogitsRecorded,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    RequestQuarantined,
    RequestSubmitted,
    SessionExtended,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
)
from refold.journal.queued import fresh_salt
from refold.journal.record import FIRST_WITH_CONTENT, Record
from refold.journal.surprisals import numbers_per_token
from refold.journal.verify import Chain
from refold.scheduler.commands import RedactContent
from refold.scheduler.redaction import check_over
from refold.scheduler.state import State, digest


class RedactionPlan:
    """Reads a journal from its first record on and works out what is left of it without what a request said.

    `follow` may be called again as the journal grows; `command` and `contents` are for the state after the last record.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.handles: list[int] = []
        self.contents: dict[int, bytes | None] = {}
        self.state = State()
        self._chain = Chain()
        self._without = State()
        self._num_old = 0

    @property
    def position(self) -> int:
        """Of the next record that it wants."""
        return self._chain.head.position

    def follow(self, records: Iterable[Record]) -> None:
        """Read on.

        Raises:
            JournalCorrupt: a record isn't what was written.
            Contradiction: an event doesn't fit, or a recorded digest isn't the state's.
        """
        for record in self._chain.follow(records):
            self._read(record)

    def command(self, reason: str) -> RedactContent:
        """The order to journal.

        Raises:
            NotFound: there is no such request.
            Rejected: it isn't over, its words were written by an older refold, or nothing is left of them.
        """
        self._chain.settle()
        if not self.handles:
            raise NotFound(f"no request {self.request_id!r} in this journal: check the id")
        for handle in self.handles:
            check_over(self.state, handle)
        if self._num_old:
            raise Rejected(
                f"what request {self.request_id!r} said was written under schema version 1, in {self._num_old} records whose "
                "content can't be erased: copy what you need of this journal, then delete the file"
            )
        if not self.contents:
            raise Rejected(f"nothing is left of what request {self.request_id!r} said: it was redacted before")
        positions = sorted(self.contents)
        hashes = [left_of(self.contents[position]) for position in positions]
        return RedactContent(handles=self.handles, positions=positions, content_hashes=hashes, reason=reason)

    def _read(self, record: Record) -> None:
        events = decode(record)
        names = [e.handle for e in events if isinstance(e, RequestSubmitted) and e.request_id == self.request_id]
        self.handles += names
        others = events
        if record.schema_version < FIRST_WITH_CONTENT:
            self._num_old += any(handle in self.handles for event in events for handle, _ in said_by(event))
        elif self.handles and (columns := columns_of(record.content)):
            others = self._take_out(record, events, columns)
        for index, (event, other) in enumerate(zip(events, others, strict=True)):
            fold_event(self.state, event, record.position, index)
            fold_event(self._without, other, record.position, index)

    def _take_out(self, record: Record, events: list[Event], columns: list[Column]) -> list[Event]:
        """Plan what is left of one content; returns the events without it."""
        stored, left = stored_events(record), iter(columns)
        kept = [
            self._kept(event, next(left), record.position)
            for event, form in zip(events, stored, strict=True)
            if has_column(form)
        ]
        if kept == columns:
            return events
        nothing = all(column is None for column in kept)
        self.contents[record.position] = None if nothing else encode_content(fresh_salt(), kept)
        return put_back(stored, kept, record.position)

    def _kept(self, event: Event, column: Column, position: int) -> Column:
        """What is left of an event's column."""
        if column is None:
            return None
        if isinstance(event, StateDigest):
            return self._kept_digest(event, column, position)
        if isinstance(event, RequestQuarantined):
            return None if event.handle in self.handles else column
        assert isinstance(column, list), "digests of states and prompts apart, columns hold numbers"
        kept: list[int | None] = []
        for handle, count in said_by(event):
            erased = handle in self.handles
            kept += [None] * count if erased else column[len(kept) : len(kept) + count]
        assert len(kept) == len(column), "every number is somebody's"
        return None if all(number is None for number in kept) else kept

    def _kept_digest(self, event: StateDigest, column: Column, position: int) -> Column:
        found = digest(self.state)
        if found != event.digest:
            raise Contradiction(
                f"record {position} says that the state hashed to {event.digest[:16]}, it folds to {found[:16]}: nothing was "
                "redacted",
                position=position,
                index=0,
                law="L11",
            )
        return column if digest(self._without) == found else None


def said_by(event: Event) -> Iterable[tuple[int, int]]:
    """Whose tokens or numbers an event's column holds, in order: handle and how many."""
    spans = _SPANS.get(type(event))
    return () if spans is None else spans(event)


def erased_of(events: Iterable[Event]) -> set[int]:
    """The requests that have lost tokens, or what tells of them, in these events."""
    lost: set[int] = set()
    for event in events:
        if isinstance(event, RequestQuarantined) and not event.content_digest:
            lost.add(event.handle)
        numbers, start = _numbers_of(event), 0
        for handle, count in said_by(event):
            is_empty = not numbers and count > 0  # numbers that are no tokens, all of them erased
            if is_empty or any(is_placeholder(number) for number in numbers[start : start + count]):
                lost.add(handle)
            start += count
    return lost


def _numbers_of(event: Any) -> list[int]:
    if isinstance(event, StepScheduled):
        return [token for drafts in event.drafts for token in drafts.token_ids]
    column = getattr(event, TAKEN.get(type(event), ""), [])
    return column if isinstance(column, list) else []


_SPANS: dict[type[Event], Callable[[Any], Iterable[tuple[int, int]]]] = {
    RequestSubmitted: lambda e: [(e.handle, len(e.prompt_token_ids))],
    SessionExtended: lambda e: [(e.handle, len(e.token_ids))],
    DraftsProposed: lambda e: [(e.handle, len(e.token_ids))],
    StepScheduled: lambda e: [(e.handles[d.entry], len(d.token_ids)) for d in e.drafts],
    OutputDelivered: lambda e: zip(e.handles, e.counts or repeat(1, len(e.handles)), strict=True),
    StaleOutputConsumed: lambda e: zip(e.handles, e.counts, strict=True),
    LogprobsDelivered: lambda e: [
        (handle, count * numbers_per_token(top))
        for handle, count, top in zip(e.handles, e.counts, e.num_top, strict=True)
    ],
    PromptLogprobsDelivered: lambda e: [(e.handle, e.count * numbers_per_token(e.num_top))],
    LogitsRecorded: lambda e: zip(e.handles, repeat(1), strict=False),
}
