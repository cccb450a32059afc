"""Who wants log-probabilities: kept, so that a step of many requests needn't ask each of them."""

from refold.projections.requests import Request, RequestTable


def note_wishes(table: RequestTable, request: Request) -> None:
    """A request's parameters are new."""
    if request.sampling.asks_logprobs:
        table.asking.add(request.handle)
    else:
        table.asking.discard(request.handle)
