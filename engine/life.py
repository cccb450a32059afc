"""One life of an engine on a journal: begun by opening it, ended by closing it or by a failure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refold.engine.anchoring import Anchor
from refold.engine.audit.inline import InlineAudit
from refold.engine.audit.witness import check_nothing_lost
from refold.engine.config import EngineArgs
from refold.engine.core import EngineCore
from refold.engine.delivery import Delivery
from refold.engine.folding import Base, warn, warn_of_doubt
from refold.engine.messages import CLOSED
from refold.engine.models import MakeWorker, Text, WorkerOptions, find_model
from refold.engine.opening import Recovery, find_output, opening_commands
from refold.engine.shared_fate import warn_if_shared
from refold.engine.snapshotting import SnapshotKeeper
from refold.engine.spared import SparedRecords
from refold.engine.submissions import Desk
from refold.engine.taking_over import take_over
from refold.gpu.batch import Worker
from refold.gpu.loading import Loading
from refold.journal.errors import InvariantViolation, JournalCorrupt, Rejected
from refold.journal.events import EngineConfig
from refold.journal.naming import name, place_of_reader
from refold.journal.record import Head
from refold.journal.store import JournalStore
from refold.journal.stores import doubt_of_end, open_store
from refold.journal.stores.location import place_of
from refold.journal.writer import JournalWriter
from refold.migrations import ensure
from refold.projections.outbox import Output
from refold.scheduler.commands import SubmitRequest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.snapshot import Folded
from refold.scheduler.state import State


@dataclass(frozen=True, slots=True)
class Life:
    """What an open engine consists of. `store` is closed with it if `owns_store`; `is_synced`: clients see only what is on disk."""

    stream: str
    desk: Desk
    core: EngineCore
    recovery: Recovery
    store: JournalStore
    owns_store: bool
    snapshots: SnapshotKeeper
    spared: SparedRecords
    is_synced: bool
    anchor: Anchor
    audit: InlineAudit
    loading: Loading

    @property
    def config(self) -> EngineConfig:
        """What the engine's decisions depend on."""
        return self.desk.config

    def output(self, request_id: str) -> Output:
        """The output of a request: the outbox's, or the journal's own, which takes reading all of it.

        Raises:
            NotFound: there is no such request.
            Rejected: it was redacted.
            RefoldError: the engine stopped before anybody knew.
        """
        output = self.core.delivery.find(request_id)
        if output is None:
            position = self.core.catch_up()
            output = self.core.delivery.find(request_id)
            # The outbox has forgotten none of these that goes on, so the journal's copy of one is complete.
            output = output or find_output(self.store, self.stream, request_id, position)
        return unredacted(output)

    def end(self, reason: str = CLOSED) -> None:
        """Finish what is in flight, close the journal in order, free everything. A model that is still loaded is given up on."""
        self.core.stop(reason)
        self.loading.give_up()
        self.core.join()
        self.spared.close()
        self.snapshots.close(self._last if self.core.cause is None else None)
        self.anchor.close()
        self.audit.close()
        if self.owns_store:
            self.store.close()

    def _last(self) -> Base:
        """What the engine ended with, which is what is on disk."""
        head = self.store.head(self.stream)
        assert head.position == self.core.durable_position, (head.position, self.core.durable_position)
        return Base(Folded(self.core.state, self.core.delivery.outbox, self.core.totals), head)


def unredacted(output: Output) -> Output:
    """An output that can be read.

    Raises:
        Rejected: it was redacted.
    """
    if output.is_redacted:
        raise Rejected(
            f"request {output.request_id!r} was redacted: what it said is erased; `refold request` tells the rest"
        )
    return output


class Prepared:
    """What can be known of an engine without its journal and without the model's weights.

    `is_worker_inside`: somebody asked for a worker in the engine's process, or for one of their own, which may be anywhere.
    """

    __slots__ = ("_stage", "desk", "is_worker_inside", "loading", "make_worker")

    def __init__(
        self, desk: Desk, make_worker: Callable[[], Worker], loading: Loading, *, is_worker_inside: bool
    ) -> None:
        self.desk = desk
        self.is_worker_inside = is_worker_inside
        self.loading = loading
        self.make_worker = make_worker
        self._stage: State | None = None

    def rehearse(self, *submission: Any, **options: Any) -> list[SubmitRequest]:
        """Make a submission to an engine like this one with an empty journal; returns what it is there, one for each completion.

        Raises:
            Rejected: as that would.
        """
        asks = self.desk.choices(*submission, **options)
        if self._stage is None:
            self._stage = State()
            for command in opening_commands(Head(0, b"", 1), self.desk.root_seed, self.desk.config):
                fold_all(self._stage, decide(self._stage, command))
        commands = [ask.make(self._stage) for ask in asks]
        for command in commands:
            decide(self._stage, command)
        return [command for command in commands if isinstance(command, SubmitRequest)]


def prepare(args: EngineArgs, given_worker: MakeWorker | None) -> Prepared:
    """Find the model and its tokenizer, and see that the options fit it. Opens no journal, loads no weights.

    Raises:
        Rejected: they don't, or there is no such model.
    """
    loading = Loading()
    options = WorkerOptions(
        args.threads, args.worker, args.step_timeout_s, args.dtype, args.start_timeout_s, loading=loading
    )
    model = find_model(args.model, options)
    config = args.resolve(model)
    make_worker = given_worker or model.make_worker
    text: Text | Rejected
    try:
        text = model.load_text()
    except Rejected as error:
        text = error
    desk = Desk(config, text) if args.seed is None else Desk(config, text, args.seed)
    is_inside = given_worker is not None or args.worker == "thread"
    return Prepared(desk, lambda: make_worker(config), loading, is_worker_inside=is_inside)


def begin(args: EngineArgs, prepared: Prepared, given_store: JournalStore | None) -> Life:
    """Open the journal, fold it, and start; `core.ready` is done when the first worker is.

    Raises:
        Rejected: the model isn't the one that the journal's unfinished requests run on.
        JournalError: the journal can't be opened, has an owner, or is damaged.
    """
    place = place_of(args.journal) if given_store is None else place_of_reader(given_store)
    try:
        return _begin(args, prepared, given_store, place)
    except (JournalCorrupt, InvariantViolation) as error:  # it names a record, and may not name the journal
        name(error, place)
        raise


def _begin(args: EngineArgs, prepared: Prepared, given_store: JournalStore | None, place: str) -> Life:
    anchor = Anchor(args.stream, args.anchor, args.anchor_every_s, args.anchor_key)
    anchor.check_place()
    if given_store is not None:
        warn_of_doubt(given_store)
    store = given_store or _open_store(args.journal, args.stream)
    audit = InlineAudit(store, args.stream, args.journal if args.audit else None)
    try:
        core, recovery, snapshots, spared = _start(args, store, prepared, audit, place, anchor)
    except BaseException:
        audit.close()
        if given_store is None:
            store.close()
        raise
    is_synced = args.durability == "synced"
    owns = given_store is None
    desk, loading = prepared.desk, prepared.loading
    return Life(args.stream, desk, core, recovery, store, owns, snapshots, spared, is_synced, anchor, audit, loading)


def _open_store(url: str, stream: str) -> JournalStore:
    check_nothing_lost(url, stream)
    if doubt := doubt_of_end(url):  # first: a journal that is gone is begun anew, without the marks of the old one
        warn("mark_ignored", journal=place_of(url), reason=doubt)
    ensure(url)
    return open_store(url)


def _start(
    args: EngineArgs, store: JournalStore, prepared: Prepared, audit: InlineAudit, place: str, anchor: Anchor
) -> tuple[EngineCore, Recovery, SnapshotKeeper, SparedRecords]:
    desk = prepared.desk
    head, base, recovery, spared = take_over(store, args.stream, anchor)
    snapshots = SnapshotKeeper(store, args.stream, recovery.from_snapshot, args.snapshot_every_records)
    snapshots.opened(base)
    state, outbox, totals = base.folded
    if prepared.is_worker_inside:
        warn_if_shared(state, was_closed=recovery.was_closed)
    delivery = Delivery(outbox, base.head.position)
    core = EngineCore(state, delivery, totals, prepared.make_worker, args.durability, args.session_idle_s, place)

    def on_durable(position: int) -> None:
        core.on_durable(position)
        snapshots.became_durable(position)
        audit.became_durable(position)
        anchor.committed(writer.durable_head)

    writer = JournalWriter(store, args.stream, head, on_durable=on_durable, on_failed=core.on_journal_failed)
    try:
        opening = opening_commands(
            head, desk.root_seed, desk.config, stream=args.stream, was_closed=recovery.was_closed
        )
        core.start(writer, opening)
    except BaseException:
        writer.close()
        snapshots.close(None)
        raise
    spared.check_many(lambda error: core.on_journal_failed(name(error, place)))
    return core, recovery, snapshots, spared
