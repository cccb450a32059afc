"""Quarantine: whose content killed workers, and letting it in again, in a live engine and in a journal that has none.

A quarantine is of a content. Several requests can be found out with the same one (the `n` completions of a prompt, say): the
state knows the last of them, the journal all.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from refold.engine.folding import warn_of_doubt
from refold.engine.history.timeline import Timeline
from refold.engine.life import Life
from refold.engine.messages import Ask
from refold.engine.submissions import check_request_id
from refold.engine.taking_over import check_may_go_on
from refold.journal.codec import encode, events_among
from refold.journal.errors import JournalError
from refold.journal.events import RequestQuarantined, RequestSubmitted
from refold.journal.naming import naming
from refold.journal.queued import fresh_salt
from refold.journal.record import seal
from refold.journal.store import DEFAULT_STREAM, JournalReader
from refold.journal.stores import open_store
from refold.scheduler.commands import LiftQuarantine
from refold.scheduler.decide import decide
from refold.scheduler.state import State

Kept = Mapping[str, tuple[int, str]]


class Quarantine(NamedTuple):
    """One content that is kept out: the ids of the requests that were found out with it, in order. Any of them lifts it."""

    request_ids: tuple[str, ...]

    @property
    def culprit(self) -> str:
        """The last of them, by which the engine knows it."""
        return self.request_ids[-1]


def quarantined_live(life: Life) -> list[Quarantine]:
    """What is kept out of an engine that runs."""
    kept = life.core.look(_kept).result()
    return _quarantines(life.store, life.stream, life.core.settle(), kept)


def quarantined_at_rest(url: str, stream: str = DEFAULT_STREAM) -> list[Quarantine]:
    """As `quarantined_live`, of a journal; an engine may be writing it.

    Raises:
        NotFound, JournalError: there is no such journal, or it can't be read.
    """
    with Timeline.open(url, stream) as timeline:
        stop = len(timeline)
        return _quarantines(timeline.reader, stream, stop, _kept(timeline.seek(stop - 1).state))


def lift_live(life: Life, request_id: str) -> None:
    """Lift the quarantine of a request's content, in an engine that runs. Blocks until this is in the journal.

    Raises:
        Rejected: nothing that it asked for is quarantined.
    """
    command = LiftQuarantine(request_id=_culprit(check_request_id(request_id), quarantined_live(life)))
    life.core.ask(Ask(lambda _: command)).result()


def lift_at_rest(url: str, request_id: str, stream: str = DEFAULT_STREAM) -> None:
    """As `lift_live`, in a journal that no engine has open.

    Raises:
        NotFound, JournalError: there is no such journal, or it can't be read.
        JournalOwned: a live engine writes it.
        Rejected: nothing that the request asked for is quarantined; nothing was changed.
    """
    command = LiftQuarantine(request_id=_culprit(check_request_id(request_id), quarantined_at_rest(url, stream)))
    with Timeline.open(url, stream) as timeline:
        decide(timeline.seek(len(timeline) - 1).state, command)  # refused before the stream is touched
        store = open_store(url)
        try:
            warn_of_doubt(store)
            with naming(store):
                check_may_go_on(store, stream)
            head = store.open_stream(stream)
            timeline.refresh()
            events = decide(timeline.seek(head.position - 1).state, command)
            store.append(stream, [seal(head, time.time_ns(), *encode(events, fresh_salt()))])
        finally:
            store.close()


def _kept(state: State) -> Kept:
    return dict(state.suspicion.quarantined)


def _culprit(request_id: str, found: Iterable[Quarantine]) -> str:
    """The id by which the engine knows the content of this request; the id itself if nothing of it is kept out, which is refused."""
    return next((each.culprit for each in found if request_id in each.request_ids), request_id)


def _quarantines(reader: JournalReader, stream: str, stop: int, kept: Kept) -> list[Quarantine]:
    """All ids of each content that is kept out. The journal is read only if there is any."""
    if not kept:
        return []
    names, found = dict[int, str](), {digest: list[str]() for digest in kept}
    with contextlib.suppress(JournalError):  # of records that are archived out of reach, the state still knows the last
        for event in events_among(reader.read(stream, 0, stop), (RequestSubmitted, RequestQuarantined)):
            if isinstance(event, RequestSubmitted):
                names[event.handle] = event.request_id
            elif isinstance(event, RequestQuarantined) and event.content_digest in found:
                found[event.content_digest].append(names[event.handle])
    return [Quarantine(tuple(dict.fromkeys([*ids, kept[digest][1]]))) for digest, ids in found.items()]
