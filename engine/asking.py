"""Asking the engine something, and not losing what was asked when the client goes away."""

import asyncio
import contextlib
from concurrent.futures import Future

from refold.engine.checked import plain_int, short
from refold.engine.core import EngineCore
from refold.engine.history.plain import count
from refold.engine.life import Life, unredacted
from refold.engine.messages import Ask
from refold.engine.submissions import abort_of, check_request_id
from refold.journal.errors import RefoldError, Rejected
from refold.projections.outbox import Output


async def obeyed(core: EngineCore, ask: Ask) -> Output | None:
    """Wait for a reply. A client that is cancelled meanwhile doesn't take the reply with it."""
    return await asyncio.shield(asyncio.wrap_future(core.ask(ask)))


async def accepted(core: EngineCore, ask: Ask) -> Output:
    """Wait for the reply to a submission."""
    return known(await obeyed(core, ask))


def abort_when_accepted(core: EngineCore, ask: Ask) -> None:
    """Abort a submission whose client is gone, as soon as it is accepted.

    Never before: if it is refused because its id is taken, the abort would hit the request that has the id.
    """

    def abort(reply: "Future[Output | None]") -> None:
        if reply.exception() is None and ask.request_id is not None:
            with contextlib.suppress(RefoldError):
                core.ask(abort_of(ask.request_id))

    ask.reply.add_done_callback(abort)


def known(output: Output | None) -> Output:
    """The output of a request that was accepted."""
    assert output is not None, "a request that is accepted is in the outbox"
    return output


async def found(life: Life, request_id: str, after: object) -> Output:
    """The output of a request that was submitted before, for a client that has it up to index `after`.

    Raises:
        NotFound: the journal has no such request.
        Rejected: one of the two can't be, or the request has no output at `after`.
    """
    check_request_id(request_id)
    last = plain_int(after)
    if last is None or not -1 <= last < 2**31:
        raise Rejected(f"after is {short(after)}: give the last index seen, or -1")
    output = life.core.delivery.find(request_id)
    output = await asyncio.to_thread(life.output, request_id) if output is None else unredacted(output)
    num_tokens = len(output.token_ids)
    # Where a crash may take back what clients have seen, it comes again: a live request may be asked to go on beyond its end.
    if last >= num_tokens and (life.is_synced or output.finish_reason is not None) and last >= 0:
        raise Rejected(
            f"after is {last}, and request {request_id!r} has {count(num_tokens, 'output')}: give {num_tokens - 1} at most"
        )
    return output


def is_live(life: Life, request_id: str) -> bool:
    """Whether a request was submitted and has not ended, as far as clients have been told."""
    output = life.core.delivery.find(check_request_id(request_id))
    return output is not None and output.finish_reason is None
