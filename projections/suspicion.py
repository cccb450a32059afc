"""Suspicion: which requests may be what kills the worker, and what was found to do so.

A worker that dies takes the step with it that it was at. Every request of that step is under suspicion, once more than
before. A token delivered to it clears a request: it went further than where the worker died. What is left after some deaths
is either the culprit or has had bad luck; who is tried, and what a verdict takes, is told in `refold.scheduler.trials`.
"""

from collections.abc import Iterable


class Suspicion:
    """Who may be, and who was found to be, what kills workers.

    `num_losses`: workers lost with a live request in their last step, since its last token; `num_alone` of them with nobody
    else in that step. By handle.
    `quarantined`: digests of content that killed workers, with the request that was found out: its handle and its id.
    `is_unproved`: since the last one was, nobody has got a token; it may be the device that kills.
    """

    __slots__ = ("is_unproved", "num_alone", "num_losses", "quarantined")

    def __init__(self) -> None:
        self.num_losses: dict[int, int] = {}
        self.num_alone: dict[int, int] = {}
        self.is_unproved = False
        self.quarantined: dict[str, tuple[int, str]] = {}


def suspect(suspicion: Suspicion, handles: Iterable[int], *, alone: bool) -> None:
    """A worker died at a step with these requests; `alone`: there was one, and no other."""
    for handle in handles:
        suspicion.num_losses[handle] = suspicion.num_losses.get(handle, 0) + 1
        if alone:
            suspicion.num_alone[handle] = suspicion.num_alone.get(handle, 0) + 1


def got_tokens(suspicion: Suspicion, handles: Iterable[int]) -> None:
    """The worker gave these requests a token."""
    for handle in handles:
        forget(suspicion, handle)
        suspicion.is_unproved = False


def forget(suspicion: Suspicion, handle: int) -> None:
    """A request is above suspicion, or has ended."""
    suspicion.num_losses.pop(handle, None)
    suspicion.num_alone.pop(handle, None)


def quarantine(suspicion: Suspicion, content_digest: str, handle: int, request_id: str) -> None:
    """The content of a request is not to be computed again."""
    suspicion.quarantined[content_digest] = handle, request_id
    suspicion.is_unproved = True


def lift(suspicion: Suspicion, handles: Iterable[int]) -> None:
    """The content of these requests may be computed again."""
    freed = frozenset(handles)
    for digest in [digest for digest, (handle, _) in suspicion.quarantined.items() if handle in freed]:
        del suspicion.quarantined[digest]
