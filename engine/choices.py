"""Several completions of one prompt: a fan at the edge.

A request with `n` more than 1 is `n` requests, `ID#0` to `ID#(n - 1)`, each with a seed made of the request's (or, where it brings
none, drawn for itself). The scheduler knows nothing of it: the prompt is computed once because the prefix cache shares it. All
are aborted together, and told together; each can be resumed by its own name.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import wait

from refold.engine.asking import abort_when_accepted, known
from refold.engine.life import Life
from refold.engine.messages import Ask
from refold.engine.sampling_params import MAX_CHOICES
from refold.engine.streams import Completion
from refold.engine.submissions import choice_id
from refold.journal.errors import NotFound
from refold.projections.outbox import Output


async def all_accepted(life: Life, asks: Sequence[Ask]) -> list[Output]:
    """Submit completions of one prompt. If the first is refused, all are; if a later one is, the others are aborted."""
    try:
        for ask in asks:
            life.core.ask(ask)
        replies = [asyncio.shield(asyncio.wrap_future(ask.reply)) for ask in asks]
        await asyncio.gather(*replies, return_exceptions=True)
        return [known(ask.reply.result()) for ask in asks]
    except BaseException:
        abort_all(life, asks)
        raise


def all_enqueued(life: Life, asks: Sequence[Ask]) -> list[Output]:
    """As `all_accepted`, for threads without an event loop. An interrupt aborts nothing: what was submitted goes on."""
    try:
        for ask in asks:
            life.core.ask(ask)
        wait([ask.reply for ask in asks])
        return [known(ask.reply.result()) for ask in asks]
    except Exception:
        abort_all(life, asks)
        raise


def abort_all(life: Life, asks: Sequence[Ask]) -> None:
    """Abort submissions whose client is gone, each as soon as it's accepted."""
    for ask in asks:
        abort_when_accepted(life.core, ask)


def name_of(asks: Sequence[Ask]) -> str:
    """What the client calls the request."""
    name = asks[0].request_id
    assert name is not None, "a submission has an id"
    return name if len(asks) == 1 else name.removesuffix("#0")


def living_choices(life: Life, request_id: str) -> list[str]:
    """The ids of a request's completions, as far as the engine remembers them; none if it has one only."""
    ids = (choice_id(request_id, number) for number in range(MAX_CHOICES))
    found: list[str] = []
    for each in ids:
        if life.core.delivery.find(each) is None:
            break
        found.append(each)
    return found


def names_under(life: Life, request_id: str) -> list[str]:
    """The ids that a request's name stands for: itself, or those of its completions.

    Only one of the two is known, except in journals of older engines. There a name stands for itself.
    """
    if life.core.delivery.find(request_id) is not None:
        return [request_id]
    return living_choices(life, request_id) or [request_id]


def outputs_of(life: Life, request_id: str) -> list[Output]:
    """The outputs of a request: its own, or those of its completions.

    Raises:
        NotFound: the journal has no such request.
        Rejected: it was redacted.
    """
    try:
        return [life.output(each) for each in names_under(life, request_id)]
    except NotFound:
        outputs = _recalled(life, request_id)
        if not outputs:
            raise
        return outputs


def _recalled(life: Life, request_id: str) -> list[Output]:
    """Completions that only the journal remembers."""
    outputs: list[Output] = []
    for number in range(MAX_CHOICES):
        try:
            outputs.append(life.output(choice_id(request_id, number)))
        except NotFound:
            break
    return outputs


def grouped(completions: Sequence[Completion], sizes: Sequence[int]) -> list[Completion]:
    """One completion for each prompt: its first, which has all of them as its choices if there are several."""
    rest, made = iter(completions), list[Completion]()
    for size in sizes:
        choices = tuple(next(rest) for _ in range(size))
        made.append(choices[0] if size == 1 else choices[0].among(choices))
    return made
