"""Records on their way to the disk: when each is encoded.

A record that carries texts of somebody else's, or that is rare, is encoded before it is queued: what can't be encoded (a lone
surrogate, say) fails there, has no position, and harms nobody else.

A step's records are all numbers, of types that were checked when they came in, and they come by the thousand. They are
encoded by the writer's thread, while the engine's has already given the worker its next order. Their events are frozen, and
nobody changes a list that an event holds: the state keeps its own, and what a worker says is copied before it is believed.
But a writer that lags behind gets its records encoded: it has enough to do, bytes are smaller than lists, and the garbage
collector doesn't go through them.
"""

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from refold.journal.codec import Encoded, encode
from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    StaleOutputConsumed,
    StepScheduled,
)

_WIDE = frozenset((StepScheduled, OutputDelivered, StaleOutputConsumed))
_NARROW = frozenset((RequestPreempted, RequestFinished))
_BYTES_PER_EVENT = 128
_BYTES_PER_ENTRY = 24  # a step's columns as JSON, about


def fresh_salt() -> str:
    """96 random bits: nobody finds a content that was erased by trying contents."""
    return b64encode(os.urandom(12)).decode()


class Queued:
    """A record on its way: its time, its parts, and the contents that are to be replaced with it, if any.

    `num_bytes` is what it counts for while it waits: its size, or an estimate where that isn't known yet.
    """

    __slots__ = ("_encoded", "_events", "contents", "num_bytes", "time_ns")

    def __init__(
        self,
        events: Sequence[Event],
        time_ns: int,
        contents: Mapping[int, bytes | None] | None = None,
        *,
        may_wait: bool = True,
    ) -> None:
        """Encode the events, unless that can wait and may.

        Raises:
            UnicodeEncodeError, TypeError: the events can't be encoded.
        """
        self.time_ns = time_ns
        self.contents = contents
        self._events: Sequence[Event] = ()
        self._encoded: Encoded | None = None
        self.num_bytes = _estimate(events) if may_wait else 0
        if self.num_bytes:
            self._events = events
        else:
            self._encoded = encode(events, fresh_salt())
            self.num_bytes = len(self._encoded.body) + len(self._encoded.content)

    @property
    def is_encoded(self) -> bool:
        """Whether it's bytes already."""
        return self._encoded is not None

    def encoded(self) -> Encoded:
        """The record's parts."""
        return self._encoded or encode(self._events, fresh_salt())


def _estimate(events: Sequence[Any]) -> int:
    """About how many bytes the events will be, if all are sure to be encodable: numbers, and names that are ours. Else 0."""
    size = 0
    for event in events:
        kind = type(event)
        if kind in _WIDE:
            size += _BYTES_PER_EVENT + _BYTES_PER_ENTRY * len(event.handles)
        elif kind in _NARROW and not (kind is RequestFinished and event.message):
            size += _BYTES_PER_EVENT
        else:
            return 0
    return size
