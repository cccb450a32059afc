"""Taking a stream over: it's read and judged before anything of it is changed.

Whoever opens a stream for writing changes it: its engine epoch is raised, a torn end is cut off, a WAL is folded into its file. Of a
damaged journal these are evidence, and what a backup of one of its parts has to fit. So others are kept out first, then the records
are read, checked and folded, once; and only if they are whole is the stream taken over, which must end where the fold did. Records that
lay behind its mark, whole and never acknowledged, are folded then.

A store that can't keep others out by itself is taken over first. So are segments in which a killed erasure is to be finished.
"""

from typing import NamedTuple

from refold.engine.anchoring import Anchor
from refold.engine.folding import Base
from refold.engine.opening import Found, Recovery, fold_found, take_up
from refold.engine.spared import SparedRecords
from refold.journal.ends import check_end
from refold.journal.own_name import check_not_renamed, check_own_name
from refold.journal.record import Head
from refold.journal.store import ClaimingStore, JournalReader, JournalStore


class TakenOver(NamedTuple):
    """A stream that is open for writing: its head, in the engine epoch that begins, and what it folds to."""

    head: Head
    base: Base
    recovery: Recovery
    spared: SparedRecords


def take_over(store: JournalStore, stream: str, anchor: Anchor) -> TakenOver:
    """Read and check a stream, and open it. One that is refused is left as it was, as far as the store can.

    Raises:
        JournalOwned: a live engine holds it.
        JournalCorrupt, InvariantViolation: it's damaged, or isn't the one that the anchor names.
        JournalError: it can't be read or written.
    """
    if not store.head(stream).position:
        check_not_renamed(
            store, stream
        )  # before there is a stream of that name, which would be in the way of the right one
    if isinstance(store, ClaimingStore) and store.claim_stream(stream):
        found, spared = _judged(store, stream, store.head(stream), anchor)
        head = store.open_stream(stream)
    else:
        head = store.open_stream(stream)
        found, spared = _judged(store, stream, head, anchor)
    return TakenOver(head, *take_up(store, stream, found, head), spared)


def check_may_go_on(reader: JournalReader, stream: str) -> None:
    """What no chain tells, asked before a record is added: is this the stream of that name, and does it end where it was acknowledged to?

    Raises:
        JournalCorrupt: it isn't (kind `renamed`), or doesn't, or nobody can tell.
    """
    check_own_name(reader, stream)
    check_end(reader, stream)


def _judged(store: JournalStore, stream: str, head: Head, anchor: Anchor) -> tuple[Found, SparedRecords]:
    """What the records up to `head` fold to, once everything that an engine asks before it opens was asked."""
    anchor.check(store, head)
    check_may_go_on(store, stream)
    found = fold_found(store, stream, head)
    spared = SparedRecords(store, stream, head, found.start.position)
    spared.check_before_opening()
    return found, spared
