"""A story of one request: what `blame` and `why` gather while they follow a whole journal."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from refold.engine.history.relations import Names
from refold.engine.history.replay import replay
from refold.journal.events import Event, RequestSubmitted
from refold.journal.record import Record
from refold.journal.store import JournalReader
from refold.scheduler.state import State

NOBODY = 0  # no handle: they begin at 1


class RequestStory:
    """Follows the last request with a client's id. `names` are those of all requests so far."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.names = Names()
        self._handle = NOBODY

    @property
    def is_known(self) -> bool:
        """Whether there was such a request."""
        return self._handle != NOBODY

    def observe(self, record: Record, events: Sequence[Event], state: State) -> None:
        """Follow one record; the state is the one behind it."""
        raise NotImplementedError

    def _is_begun_by(self, event: RequestSubmitted) -> bool:
        """Whether this is the request, or the next one with its id: the story begins anew."""
        self.names.observe(event)
        if event.request_id != self.request_id:
            return False
        self._handle = event.handle
        return True


S = TypeVar("S", bound=RequestStory)


def told(story: S, reader: JournalReader, stream: str, on_record: Callable[[], object]) -> S:
    """The story of a whole journal. Raises as `replay`."""
    for record, events, state in replay(reader, stream, expect=reader.head(stream)):
        story.observe(record, events, state)
        on_record()
    return story
