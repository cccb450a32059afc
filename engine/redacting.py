"""Redacting: the plan of `refold.engine.history.redaction`, carried out on a journal that rests or on a live engine.

On a live engine most of the reading is done in the caller's thread. Only the last stretch, and the record itself, are the turn
loop's: it waits until all it has decided is on disk, so that the plan covers everything up to the redaction.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from refold.engine.audit.place import forget_beside
from refold.engine.folding import warn_of_doubt
from refold.engine.history.redaction import RedactionPlan
from refold.engine.life import Life
from refold.engine.messages import Ask
from refold.engine.submissions import check_line, check_request_id
from refold.engine.taking_over import check_may_go_on
from refold.journal.archives import border_of
from refold.journal.codec import encode
from refold.journal.errors import Rejected
from refold.journal.naming import naming
from refold.journal.queued import fresh_salt
from refold.journal.record import seal
from refold.journal.store import DEFAULT_STREAM, ErasingStore, JournalStore
from refold.journal.stores import open_reader, open_store
from refold.scheduler.commands import RedactContent
from refold.scheduler.decide import decide
from refold.scheduler.state import State

_SHORT_TAIL_RECORDS = 256
_MAX_ROUNDS = 8
_MAX_REASON_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Redaction:
    """What was redacted.

    Attributes:
        request_id: whose words.
        records: how many records lost some of their content.
        left: where the erased bytes may still be, and what to do about it; empty if they are gone.
    """

    request_id: str
    records: int
    left: str


def redact_at_rest(url: str, request_id: str, reason: str = "", stream: str = DEFAULT_STREAM) -> Redaction:
    """Redact a request in a journal that no engine has open.

    Raises:
        NotFound: there is no such journal or request.
        Rejected: the request isn't over, or its words can't be erased.
        JournalOwned: a live engine writes the journal.
        JournalCorrupt, Contradiction: the journal isn't what its engine wrote; nothing was changed.
    """
    plan = RedactionPlan(check_request_id(request_id))
    reader = open_reader(url)
    try:
        with naming(reader):
            plan.follow(reader.read(stream))
            check_may_go_on(reader, stream)
        reason = check_line("reason", reason, _MAX_REASON_CHARS)
        plan.command(reason)
    finally:
        reader.close()
    store = open_store(url)
    try:
        warn_of_doubt(store)
        head = _erasing(store).open_stream(stream)
        plan.follow(store.read(stream, plan.position, head.position))
        (event,) = decide(plan.state, _command(plan, store, stream, reason))
        record = seal(head, time.time_ns(), *encode([event], fresh_salt()))
        erased = _erasing(store).erase_content(stream, [record], plan.contents)
    finally:
        store.close()
    return Redaction(request_id, len(plan.contents), erased.left or forget_beside(url))


def redact_live(life: Life, request_id: str, reason: str, url: str) -> Redaction:
    """Redact a request in the journal, at `url`, of an engine that goes on. Blocking. Raises as `redact_at_rest`."""
    store, stream, core = _erasing(life.store), life.stream, life.core
    plan = RedactionPlan(check_request_id(request_id))
    reason = check_line("reason", reason, _MAX_REASON_CHARS)
    for _ in range(_MAX_ROUNDS):  # an engine that writes faster than this reads would never be caught
        durable = core.durable_position
        plan.follow(store.read(stream, plan.position, durable))
        if core.durable_position - durable < _SHORT_TAIL_RECORDS:
            break

    def command(state: State) -> RedactContent:  # noqa: ARG001 - the journal's state is this one, once all is on disk
        plan.follow(store.read(stream, plan.position, core.settle()))
        return _command(plan, store, stream, reason)

    def contents() -> Mapping[int, bytes | None]:
        return plan.contents

    core.ask(Ask(command, contents=contents)).result()
    return Redaction(request_id, len(plan.contents), core.erasure_left or forget_beside(url))


def _command(plan: RedactionPlan, store: JournalStore, stream: str, reason: str) -> RedactContent:
    command = plan.command(reason)
    border = border_of(store, stream)
    if command.positions[0] < border.position:
        raise Rejected(
            f"record {command.positions[0]} is archived, with all before {border.position}: what it says can't be erased from "
            "an archive"
        )
    return command


def _erasing(store: JournalStore) -> ErasingStore:
    if not isinstance(store, ErasingStore):
        raise Rejected(
            f"a {type(store).__name__} can't erase: copy the journal to SQLite or PostgreSQL, and redact it there"
        )
    return store
