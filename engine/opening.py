"""Opening a journal: what was recorded is folded, and a new life of the engine begins where the last one ended.

Read and verify every record (of those that no snapshot spares), fold it, and compare each recorded digest with the state's own:
a fold that went another way than it did when the digest was recorded is found here, at its position, before anything is done
with it. What follows are ordinary commands: lose the worker that died with the last engine, open, start a worker.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

from refold import __version__
from refold.engine.folding import Base, Unsound, beginning, search, warn_of_unsound
from refold.engine.history.words import CLOSED
from refold.journal.codec import decode
from refold.journal.errors import InvariantViolation, JournalCorrupt, JournalError, NotFound
from refold.journal.events import EngineConfig, Event, StateDigest
from refold.journal.naming import naming
from refold.journal.record import Head, Record, head_after
from refold.journal.snapshots import SnapshotStore
from refold.journal.store import JournalReader, JournalStore
from refold.journal.verify import verified_part
from refold.projections.outbox import Outbox, Output
from refold.scheduler.commands import Command, LoseWorker, OpenEngine
from refold.scheduler.fold import fold
from refold.scheduler.snapshot import Folded
from refold.scheduler.state import State, digest


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening the journal did.

    Attributes:
        records: records in the journal.
        from_snapshot: how many of them a snapshot spared; the others were read, verified and folded.
        requests: unfinished requests that go on.
        request_ids: those of them that are no sessions, in order of admission. They may have ended since.
        tokens: output tokens that these requests had already.
        steps_lost: steps that were in flight when the last engine ended.
        was_closed: whether the last engine left in good order.
        seconds: how long it took, worker not included.
    """

    records: int
    requests: int
    tokens: int
    steps_lost: int
    was_closed: bool
    seconds: float
    from_snapshot: int = 0
    request_ids: tuple[str, ...] = ()


class Found(NamedTuple):
    """What a journal folds to, before anything of it is changed: the fold, where it began, and the snapshots that weren't used."""

    base: Base
    start: Head
    unsound: list[Unsound]
    seconds: float


def fold_journal(store: JournalStore, stream: str, head: Head) -> tuple[Base, Recovery]:
    """`fold_found` and `take_up` of a stream that is open, and ends at `head`."""
    return take_up(store, stream, fold_found(store, stream, head), head)


def fold_found(reader: JournalReader, stream: str, head: Head) -> Found:
    """Fold all records up to `head`, from the newest sound snapshot on if there is one.

    Raises:
        JournalCorrupt: a record is not what was written.
        InvariantViolation: a record contradicts the state that those before it make, or a recorded digest.
    """
    started_s = time.perf_counter()
    start, unsound = search(reader, stream, head.position)
    try:
        base, start = _fold_from(reader, stream, start, head, unsound)
    except BaseException:  # of a journal that is refused nothing is dropped
        for each in unsound:
            warn_of_unsound(reader, stream, each, start.head, dropped=False)
        raise
    return Found(base, start.head, unsound, time.perf_counter() - started_s)


def take_up(store: JournalStore, stream: str, found: Found, head: Head) -> tuple[Base, Recovery]:
    """Go on from what was found to `head`, where the stream ended when it was opened. What is unsound for good is dropped.

    Raises:
        As `fold_found`: of what came behind what was found.
    """
    started_s = time.perf_counter()
    found = _caught_up(store, stream, found, head)
    for each in found.unsound:
        warn_of_unsound(store, stream, each, found.start, dropped=_dropped(store, stream, each))
    state = found.base.folded.state
    live = state.requests.live()
    recovery = Recovery(
        records=head.position,
        requests=len(live),
        tokens=sum(request.num_output_tokens for request in live),
        steps_lost=len(state.window.in_flight),
        was_closed=not state.is_open,
        seconds=found.seconds + time.perf_counter() - started_s,
        from_snapshot=found.start.position,
        request_ids=tuple(request.request_id for request in live if not request.resumable),
    )
    return found.base, recovery


def _caught_up(store: JournalStore, stream: str, found: Found, head: Head) -> Found:
    """With the records that were found behind it on opening, or written meanwhile. If they don't fit, all is folded again."""
    try:
        if head.position >= found.base.head.position:
            return found._replace(base=fold_on(store, stream, found.base, head))
    except (JournalCorrupt, InvariantViolation):  # a snapshot may be to blame, which the records before didn't show
        pass
    return fold_found(store, stream, head)


def _fold_from(
    reader: JournalReader, stream: str, start: Base, head: Head, unsound: list[Unsound]
) -> tuple[Base, Base]:
    """Fold from a snapshot; from the first record, if that shows that the snapshot, now `unsound`, was wrong. Also where it began."""
    from_snapshot = start.head.position
    try:
        return fold_on(reader, stream, start, head), start
    except Exception as error:
        if not from_snapshot:
            raise
        unsound.append(Unsound(from_snapshot, str(error)[:200], is_for_good=True))
    return fold_on(reader, stream, beginning(), head), beginning()


def _dropped(store: JournalStore, stream: str, unsound: Unsound) -> bool:
    """Forget a snapshot that can never be used, so that it's warned of once. Whether it's gone."""
    if not unsound.is_for_good or not isinstance(store, SnapshotStore):
        return False
    try:
        store.drop_snapshots(stream, [unsound.position])
    except JournalError:  # nothing depends on it
        return False
    return True


def fold_on(reader: JournalReader, stream: str, base: Base, expect: Head, *, is_whole: bool = True) -> Base:
    """Fold the records from `base` up to `expect` into it; `is_whole`: that is the stream's end. Raises as `fold_journal`."""
    folded, head = base
    with naming(reader):
        for record in verified_part(reader, stream, head, expect.position, expect, is_whole=is_whole):
            fold_record(folded, record)
            head = head_after(record)
    return Base(folded, head)


def fold_record(folded: Folded, record: Record) -> None:
    """Fold one record, which has been verified, and compare a digest that it has. Raises as `fold_journal`."""
    events = decode(record)
    for event in events:
        _fold_checked(folded.state, event, record.position)
    folded.outbox.absorb(events)
    folded.totals.observe_all(events)


def _fold_checked(state: State, event: Event, position: int) -> None:
    if isinstance(event, StateDigest) and event.digest and event.digest != (found := digest(state)):
        raise InvariantViolation(
            f"record {position} says that the state hashed to {event.digest[:16]}, it folds to {found[:16]}: this refold "
            "folds otherwise than the one that wrote the journal; open it with that version"
        )
    try:
        fold(state, event)
    except (AssertionError, LookupError, ValueError) as error:
        raise JournalCorrupt(
            f"record {position}: {type(event).__name__} contradicts the state before it ({type(error).__name__}: "
            f"{error}); run `refold verify`, or restore a backup",
            position=position,
            kind="edited",
        ) from error


def opening_commands(
    head: Head, root_seed: int, config: EngineConfig, *, stream: str = "", was_closed: bool = True
) -> list[Command]:
    """The orders that begin a life on a stream; `was_closed`: the one before left in good order."""
    return [
        LoseWorker(reason=CLOSED if was_closed else "the engine that had it ended without a word"),
        OpenEngine(
            engine_epoch=head.engine_epoch,
            refold_version=__version__,
            root_seed=root_seed,
            config=config,
            stream=stream,
        ),
    ]


def find_output(reader: JournalReader, stream: str, request_id: str, durable_position: int) -> Output:
    """A request's output from the journal itself, for one that the outbox has forgotten. Reads every record.

    Raises:
        NotFound: the journal has no such request.
    """
    outbox, found = Outbox(), None
    for record in reader.read(stream, 0, durable_position):
        outbox.observe_all(decode(record))
        found = outbox.by_id.get(request_id, found)
    if found is None:
        raise NotFound(f"no request {request_id!r} in stream {stream!r} of this journal: check the id")
    return found
