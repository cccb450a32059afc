"""Quarantine: what killed workers, and letting it be computed again once the cause is mended.

The scheduler finds it (`refold.scheduler.trials`) and keeps it out. Here is how people look at it and lift it, in a live engine
and in a journal that rests.
"""

import time

from refold.engine.history.timeline import Timeline
from refold.engine.life import Life
from refold.engine.messages import Ask
from refold.engine.submissions import check_request_id
from refold.journal.codec import encode
from refold.journal.record import seal
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores import open_store
from refold.journal.writer import fresh_salt
from refold.scheduler.commands import LiftQuarantine
from refold.scheduler.decide import decide
from refold.scheduler.state import State


def quarantined(state: State) -> list[str]:
    """The ids of the requests whose content is quarantined, in the order in which they were found out."""
    return [request_id for _, request_id in state.suspicion.quarantined.values()]


def quarantined_at_rest(url: str, stream: str = DEFAULT_STREAM) -> list[str]:
    """As `quarantined`, of a journal; an engine may be writing it.

    Raises:
        NotFound, JournalError: there is no such journal, or it can't be read.
    """
    with Timeline.open(url, stream) as timeline:
        return quarantined(timeline.seek(len(timeline) - 1).state)


def lift_live(life: Life, request_id: str) -> None:
    """Lift the quarantine of a request's content, in an engine that runs. Blocks until this is in the journal.

    Raises:
        Rejected: nothing that it asked for is quarantined.
    """
    command = LiftQuarantine(request_id=check_request_id(request_id))
    life.core.ask(Ask(lambda _: command)).result()


def lift_at_rest(url: str, request_id: str, stream: str = DEFAULT_STREAM) -> None:
    """As `lift_live`, in a journal that no engine has open.

    Raises:
        NotFound, JournalError: there is no such journal, or it can't be read.
        JournalOwned: a live engine writes it.
        Rejected: nothing that the request asked for is quarantined; nothing was changed.
    """
    command = LiftQuarantine(request_id=check_request_id(request_id))
    with Timeline.open(url, stream) as timeline:
        decide(timeline.seek(len(timeline) - 1).state, command)  # refused before the stream is touched
        store = open_store(url)
        try:
            head = store.open_stream(stream)
            timeline.refresh()
            events = decide(timeline.seek(head.position - 1).state, command)
            store.append(stream, [seal(head, time.time_ns(), *encode(events, fresh_salt()))])
        finally:
            store.close()
