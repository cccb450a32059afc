"""How long a session may wait for input: time, which the scheduler doesn't have, turned into commands.

A session goes idle at the end of a turn, and its blocks with it. Deadlines only ever move on, so the earliest one is looked
for only when the last one found has passed: a step costs one comparison, however many sessions are idle. The time before
this life of the engine doesn't count, because nobody could have brought input then.
"""

from refold.scheduler.commands import ExpireSessions
from refold.scheduler.state import State


class IdleLimit:
    """The limit, and the earliest time at which a session can come to it. Used by the engine's thread only."""

    __slots__ = ("_due_ns", "_limit_ns")

    def __init__(self, limit_s: float | None, opened_ns: int) -> None:
        self._limit_ns = None if limit_s is None else round(limit_s * 1e9)
        self._due_ns = opened_ns + (self._limit_ns or 0)

    def seconds_left(self, state: State, now_ns: int) -> float | None:
        """How long nobody can be overdue; None for as long as nothing else happens."""
        if self._limit_ns is None or not state.queues.idle:
            return None
        return max(self._due_ns - now_ns, 0) / 1e9

    def overdue(self, state: State, now_ns: int) -> ExpireSessions | None:
        """The order that closes the sessions whose time is over; None if there are none."""
        if self._limit_ns is None or now_ns < self._due_ns:
            return None
        before_ns = now_ns - self._limit_ns
        since_ns = [request.idle_since_ns for request in state.queues.idle]
        self._due_ns = self._limit_ns + min((each for each in since_ns if each > before_ns), default=now_ns)
        late = any(each <= before_ns for each in since_ns)
        return ExpireSessions(idle_before_ns=before_ns) if late else None
