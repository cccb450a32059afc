"""Which request uses which output of the encoder: appliers, for the fold."""

from refold.journal.events import EncoderInput
from refold.projections import encoder
from refold.projections.requests import Request
from refold.projections.steps import InFlightStep
from refold.scheduler.state import State


def hold_media(state: State, step: InFlightStep, request: Request, item: EncoderInput) -> None:
    """An entry of `step` needs one of its request's media: it is used from now on."""
    media = request.media[item.media]
    if item.computed:
        encoder.add(state.encoder, media.digest, media.num_tokens)
    encoder.use(state.encoder, media.digest, request.handle)
    request.media_held.add(item.media)
    step.encoded.append(media.digest)


def let_go_media(state: State, request: Request, frontier: int | None = None) -> None:
    """Stop using the media that end at or before `frontier`; all of them if None."""
    for index in sorted(request.media_held):
        media = request.media[index]
        if frontier is not None and media.start + media.num_tokens > frontier:
            continue
        request.media_held.remove(index)
        if not any(request.media[i].digest == media.digest for i in request.media_held):
            encoder.stop_using(state.encoder, media.digest, request.handle)
