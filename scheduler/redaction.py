"""Redaction: tokens of finished requests are erased, and the engine goes on as if it had never known them.

Three parties must come to one state: the engine that lives on, the one that folds the redacted journal later, and the law
book. What they know of erased tokens differs, but only through the prefix index: block hashes, and with them which free block
is cached and which is blank. So the record of a redaction is where they meet again. There the index keeps only what live
requests share, whose tokens are all there, and the free blocks are put in an order that doesn't depend on the past.

Before it, a fold of the redacted journal has placeholders for tokens. Every counter, queue and block table comes out as it
was, because none depends on what a token is. Where the journal says that a block was shared, and the placeholders can't say
why, the fold believes it (`State.unknown`, `blocks.believe`).
"""

from refold.journal.errors import Rejected
from refold.journal.events import ContentRedacted, Event
from refold.projections import blocks, suspicion
from refold.projections.requests import FINISHED
from refold.scheduler.commands import RedactContent
from refold.scheduler.state import State


def redact_content(state: State, command: RedactContent) -> list[Event]:
    """The decision: is every one of these requests over, so that nothing will ever be read from its tokens again?"""
    for handle in command.handles:
        check_over(state, handle)
    event = ContentRedacted(
        handles=command.handles,
        positions=command.positions,
        content_hashes=command.content_hashes,
        reason=command.reason,
    )
    return [event]


def check_over(state: State, handle: int) -> None:
    """A request can be redacted once it has ended and the last of its tokens has come back.

    Raises:
        Rejected: it hasn't, or there never was one.
    """
    request = state.requests.by_handle.get(handle)
    if request is not None and request.status is not FINISHED:
        raise Rejected(
            f"request {request.request_id!r} is {request.status}: abort it or wait for its end, then redact it"
        )
    if request is not None:
        raise Rejected(
            f"request {request.request_id!r} has ended, but {request.num_in_flight_tokens} of its tokens are in flight: redact "
            "it when they have come back"
        )
    if not 0 < handle < state.requests.next_handle:
        raise Rejected(f"no request has handle {handle}: the last one given is {state.requests.next_handle - 1}")


def content_redacted(state: State, event: ContentRedacted) -> None:
    """The applier."""
    by_handle, pool = state.requests.by_handle, state.pool
    for handle in event.handles:
        assert 0 < handle < state.requests.next_handle, handle
        assert handle not in by_handle, f"handle {handle} is not over"
    shared: dict[int, bytes] = {}
    owners = pool.ref_counts
    for request in by_handle.values():
        for block, content_hash in zip(request.block_ids, request.block_hashes, strict=False):
            if owners[block] > 1 and pool.hashes[block] is not None:
                shared.setdefault(block, content_hash)
    provisional = {step.step: shared.keys() & step.written for step in state.window.in_flight}
    blocks.forget_unshared(pool, shared, provisional)
    state.unknown.difference_update(event.handles)
    suspicion.lift(state.suspicion, event.handles)


def owners_of_known(state: State) -> dict[int, tuple[int, int]]:
    """For each block that is known and owned: a request that owns it, and as which block of its table."""
    known: dict[int, tuple[int, int]] = {}
    for request in state.requests.by_handle.values():
        for index, block in enumerate(request.block_ids):
            if state.pool.hashes[block] is not None:
                known.setdefault(block, (request.handle, index))
    return known
