"""Content: what was said, taken out of a record's events so that it can be erased without breaking the chain.

A record is stored as a body and a content. The body keeps all that was decided and counted; in place of each list of
tokens it has the list's length. The content is a JSON array: a salt, then the columns that were taken out, in the order in
which their lengths stand in the body. The chain covers the content by its digest only, so whoever erases the content leaves
the chain as it is. The salt goes with the content: without it, a digest of few tokens could be undone by trying them all.

An erased token is null, an erased column is null, and an erased content is no content at all. The fold needs a token all the
same: it gets a placeholder, a negative number that no vocabulary has and that names its place in the stream, so that no two
are equal and a block of them never has the hash of another block.

A recorded digest of the state, of logits or of a prompt counts as content too: with few unknowns left, it would tell whether a
guess at them is right. Erased numbers that are no tokens need no names: each reads as `ERASED`, and an erased column of them is empty.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Any

import msgspec

from refold.journal.events import (
    EVENT_TYPES,
    Drafts,
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
from refold.journal.taken import TakenDrafts

Column = list[int | None] | str | None
NO_CONTENT = b""
ERASED = -1
_OFFSET_BITS = 23

TAKEN: dict[type[Event], str] = {
    RequestSubmitted: "prompt_token_ids",
    SessionExtended: "token_ids",
    StepScheduled: "drafts",
    DraftsProposed: "token_ids",
    OutputDelivered: "token_ids",
    StaleOutputConsumed: "token_ids",
    LogprobsDelivered: "surprisals",
    PromptLogprobsDelivered: "surprisals",
    LogitsRecorded: "digests",
    RequestQuarantined: "content_digest",
    StateDigest: "digest",
}
"""The column that each kind of event may lose. Of drafts, the entries stay and the tokens go."""


class ContentMismatch(ValueError):
    """A content doesn't fit the body that it was taken from."""


def placeholder(position: int, offset: int) -> int:
    """What stands for the erased token number `offset` of the record at `position`, in the order of its content."""
    assert 0 <= offset < 1 << _OFFSET_BITS, offset
    return -1 - (position << _OFFSET_BITS | offset)


def is_placeholder(token_id: int) -> bool:
    """Whether a token stands for one that was erased."""
    return token_id < 0


def take_out(events: Sequence[Event]) -> tuple[Sequence[Event], list[Column]]:
    """The events as the body holds them, and the columns that were taken out."""
    columns: list[Column] = []
    stored = [event if (take := _TAKE.get(type(event))) is None else take(event, columns) for event in events]
    return stored, columns


def _take_token_ids(event: Any, columns: list[Column]) -> Event:
    """As `_taker("token_ids")`, written out: it's done for every step."""
    if event.token_ids:
        columns.append(event.token_ids)
    left: Event = msgspec.structs.replace(event, token_ids=len(event.token_ids))
    return left


def _take_drafts(event: Any, columns: list[Column]) -> Event:
    if not event.drafts:
        return event  # type: ignore[no-any-return]
    columns.append([token for drafts in event.drafts for token in drafts.token_ids])
    taken = [TakenDrafts(entry=d.entry, token_ids=len(d.token_ids)) for d in event.drafts]
    left: Event = msgspec.structs.replace(event, drafts=taken)
    return left


def _taker(field: str) -> Callable[[Any, list[Column]], Event]:
    """For the rarer kinds."""

    def take(event: Any, columns: list[Column]) -> Event:
        column = getattr(event, field)
        if column:
            columns.append(column)
        left: Event = msgspec.structs.replace(event, **{field: len(column)})
        return left

    return take


_BY_FIELD: dict[str, Callable[[Any, list[Column]], Event]] = {
    "token_ids": _take_token_ids,
    "drafts": _take_drafts,
    **{field: _taker(field) for field in ("prompt_token_ids", "digest", "surprisals", "digests", "content_digest")},
}
_TAKE = {event_type: _BY_FIELD[field] for event_type, field in TAKEN.items()}


_Restore = Callable[[Any, "_Columns"], Event]


def put_back(stored: Sequence[Any], columns: Sequence[Column] | None, position: int) -> list[Event]:
    """The events as they were, placeholders where tokens were erased. `columns` None: all were.

    Raises:
        ContentMismatch: the columns aren't those that the body lacks.
    """
    rest = _Columns(columns, position)
    events = [restore(event, rest) if (restore := _RESTORE.get(type(event))) else event for event in stored]
    rest.check_used_up()
    return events


def has_column(stored: Any) -> bool:
    """Whether an event, as the body holds it, has a column in the content."""
    field = _FIELD_OF_STORED.get(type(stored))
    return field is not None and bool(getattr(stored, field))


class _Columns:
    """The columns of one content, handed out in order. None: the content is gone."""

    __slots__ = ("_columns", "_offset", "_position")

    def __init__(self, columns: Sequence[Column] | None, position: int) -> None:
        self._columns = None if columns is None else list(reversed(columns))
        self._position = position
        self._offset = 0

    def tokens(self, count: int) -> list[int]:
        """The next column, of `count` tokens."""
        column, start = self._take(count), self._offset
        self._offset += count
        if column is None:
            if self._offset > 1 << _OFFSET_BITS:
                raise ContentMismatch(f"{self._offset} tokens in one record")
            return [placeholder(self._position, offset) for offset in range(start, self._offset)]
        if isinstance(column, str):
            raise ContentMismatch(f"a column of {count} tokens is a text")
        if None in column:
            return [placeholder(self._position, start + i) if t is None else t for i, t in enumerate(column)]
        return column  # type: ignore[return-value]

    def numbers(self, count: int) -> list[int]:
        """The next column, of `count` numbers that are no tokens; empty if all of it was erased."""
        column = self._take(count)
        if isinstance(column, str):
            raise ContentMismatch(f"a column of {count} numbers is a text")
        return [ERASED if number is None else number for number in column or ()]

    def text(self, count: int) -> str:
        """The next column, a text of `count` characters; empty if it was erased."""
        column = self._take(count)
        if not column:
            return ""
        if isinstance(column, list):
            raise ContentMismatch(f"a text of {count} characters is a list")
        return column

    def check_used_up(self) -> None:
        """Every column has found its place."""
        if self._columns:
            raise ContentMismatch(f"the content has {len(self._columns)} columns more than the body lacks")

    def _take(self, count: int) -> Column:
        if count < 0:
            raise ContentMismatch(f"a column of length {count}")
        if self._columns is None:
            return None
        if count == 0:
            return []
        if not self._columns:
            raise ContentMismatch("the content has fewer columns than the body lacks")
        column = self._columns.pop()
        if column is not None and len(column) != count:
            raise ContentMismatch(f"a column is {len(column)} long, the body says {count}")
        return column


def _stored_form(event_type: type[Event], field: str) -> type[msgspec.Struct]:
    """The event as a body holds it: in the place of `field` is its length."""
    fields: list[Any] = []
    for known in msgspec.structs.fields(event_type):
        kind: Any = known.type
        if known.name == field:
            kind = list[TakenDrafts] if field == "drafts" else int
        if known.required:
            fields.append((known.name, kind))
        elif known.default is not msgspec.NODEFAULT:
            fields.append((known.name, kind, known.default))
        else:
            fields.append((known.name, kind, msgspec.field(default_factory=known.default_factory)))
    options: Any = {"frozen": True, "gc": False, "kw_only": True, "forbid_unknown_fields": True}
    return msgspec.defstruct(
        f"Stored{event_type.__name__}", fields, tag=event_type.__name__, module=__name__, **options
    )


def _tokens(stored: int, columns: _Columns) -> list[int]:
    return columns.tokens(stored)


def _text(stored: int, columns: _Columns) -> str:
    return columns.text(stored)


def _numbers(stored: int, columns: _Columns) -> list[int]:
    return columns.numbers(stored)


def _drafts(stored: list[TakenDrafts], columns: _Columns) -> list[Drafts]:
    tokens = iter(columns.tokens(sum(drafts.token_ids for drafts in stored)))
    return [Drafts(entry=d.entry, token_ids=[next(tokens) for _ in range(d.token_ids)]) for d in stored]


def _restorer(event_type: type[Event], field: str) -> _Restore:
    special: dict[str, Callable[[Any, _Columns], Any]] = {
        "drafts": _drafts,
        "digest": _text,
        "content_digest": _text,
        "surprisals": _numbers,
        "digests": _numbers,
    }
    column_of = special.get(field, _tokens)

    def restore(stored: Any, columns: _Columns) -> Event:
        values = msgspec.structs.asdict(stored)
        values[field] = column_of(values[field], columns)
        return event_type(**values)

    return restore


_STORED = {event_type: _stored_form(event_type, field) for event_type, field in TAKEN.items()}
_RESTORE = {form: _restorer(event_type, TAKEN[event_type]) for event_type, form in _STORED.items()}
_FIELD_OF_STORED = {_STORED[event_type]: field for event_type, field in TAKEN.items()}
_FORMS = [_STORED.get(event_type, event_type) for event_type in EVENT_TYPES]
StoredEvents: Any = GenericAlias(list, (reduce(or_, _FORMS),))
"""The type of a body: what a decoder of it needs to know."""

PlainEvents: Any = GenericAlias(list, (reduce(or_, [e for e in EVENT_TYPES if e not in TAKEN or e is StepScheduled]),))
"""The type of a body from which nothing was taken, of most records without content: it needs no putting back."""


def is_plain(events: Sequence[Event]) -> bool:
    """Whether `PlainEvents` were stored with all that they say: only drafts could have been taken out of them."""
    return not [event for event in events if type(event) is StepScheduled and event.drafts]
