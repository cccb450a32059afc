"""Snapshots: everything that a fold has made of the records so far, as bytes, and back.

A snapshot saves folding; it never replaces the journal. In it are the whole `State`, the `Outbox` and the `Totals`, class by
class and field by field: each class with slots has an *image* (`refold.scheduler.images`), a typed struct with the same
fields. No pickle: decoding makes values of those types and nothing else, or fails.

Requests are named by handle where a queue or a step refers to one, so that what was one object is one object again. Texts that
the code compares by identity (a request's status) are the code's own again.

The bytes come in pieces, each a length and a MessagePack value: first the state, then the totals, then the outputs by the
dozen. Whoever makes them beside a running engine can rest between two pieces.
"""

import struct
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import msgspec

from refold.journal.events import EngineConfig, RequestSubmitted, Sampling, StepScheduled
from refold.projections.batch import Batch
from refold.projections.blocks import BlockPool
from refold.projections.encoder import EncoderCache
from refold.projections.outbox import MAX_FINISHED, Outbox, Output, TurnEnd
from refold.projections.queues import Queues
from refold.projections.requests import FINISHED, IDLE, PREEMPTED, RUNNING, WAITING, Request, RequestTable
from refold.projections.runs import Run
from refold.projections.steps import NOBODY, InFlightStep, Window
from refold.projections.suspicion import Suspicion
from refold.projections.totals import Totals
from refold.scheduler.images import (
    IMAGES,
    BlockPoolImage,
    EncoderCacheImage,
    Image,
    InFlightStepImage,
    OutboxImage,
    OutputImage,
    QueuesImage,
    RequestImage,
    RequestTableImage,
    StateImage,
    SuspicionImage,
    TotalsImage,
    WindowImage,
)
from refold.scheduler.state import State

# For constructors. They can't be left out (of a compiled class, `__new__` calls `__init__`), and nothing of these stays in what is restored.
_NO_REQUEST = RequestSubmitted(
    handle=0, request_id="", prompt_token_ids=[], sampling=Sampling(seed=0, max_tokens=1), arrival_ns=0
)
_NO_STEP = StepScheduled(step=0, handles=[], num_tokens=[], first_positions=[])
_NO_CONFIG = EngineConfig(
    model="",
    model_fingerprint="",
    vocab_size=1,
    eos_token_ids=(),
    max_model_len=1,
    block_size=1,
    num_blocks=0,
    max_num_seqs=1,
    max_num_batched_tokens=1,
)
OUTPUTS_PER_PIECE = 64
_LENGTH = struct.Struct(">Q")
_STATUSES = {status: status for status in (WAITING, RUNNING, PREEMPTED, IDLE, FINISHED)}
T = TypeVar("T")


class Folded(NamedTuple):
    """What a fold makes of a journal: all that an engine needs to go on."""

    state: State
    outbox: Outbox
    totals: Totals


_ENCODER = msgspec.msgpack.Encoder(enc_hook=list)  # deques and arrays are what MessagePack doesn't know
_STATE = msgspec.msgpack.Decoder(StateImage)
_REST = msgspec.msgpack.Decoder(tuple[TotalsImage, OutboxImage])
_OUTPUTS = msgspec.msgpack.Decoder(list[OutputImage])


def pack(folded: Folded) -> Iterator[bytes]:
    """The pieces of a snapshot, in order."""
    yield _piece(_state_image(folded.state))
    outputs = list(folded.outbox.by_handle.values())
    finished = [output.handle for output in folded.outbox._finished]  # noqa: SLF001 - an image tells a class's slots
    yield _piece((_image(TotalsImage, folded.totals), OutboxImage(len(outputs), finished)))
    for start in range(0, len(outputs), OUTPUTS_PER_PIECE):
        yield _piece([_image(OutputImage, output) for output in outputs[start : start + OUTPUTS_PER_PIECE]])


def unpack(body: bytes, max_finished: int = MAX_FINISHED) -> Folded:
    """The fold that `pack` made pieces of; `body` is all of them, joined.

    Raises:
        ValueError: the bytes are no snapshot of this refold's.
    """
    first, second, *pieces = _pieces(body)
    state = _state_of(_STATE.decode(first))
    totals_image, outbox_image = _REST.decode(second)
    totals = _filled(Totals(), totals_image)
    outputs = [_output_of(image) for piece in pieces for image in _OUTPUTS.decode(piece)]
    return Folded(state, _outbox_of(outputs, outbox_image, max_finished), totals)


def _piece(value: object) -> bytes:
    encoded = _ENCODER.encode(value)
    return _LENGTH.pack(len(encoded)) + encoded


def _pieces(body: bytes) -> Iterator[memoryview]:
    view, offset = memoryview(body), 0
    while offset < len(view):
        if len(view) - offset < _LENGTH.size:
            raise ValueError("the snapshot ends in the middle of a length")
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += _LENGTH.size
        if length > len(view) - offset:
            raise ValueError("the snapshot ends in the middle of a piece")
        yield view[offset : offset + length]
        offset += length


def _image(kind: type[Any], thing: object, **told: object) -> Any:
    """The image of a thing; `told` are fields that it tells in another way than the thing has them."""
    return kind(*[told[name] if name in told else getattr(thing, name) for name in kind.__struct_fields__])


def _filled(thing: T, image: Image, **told: object) -> T:
    """A new thing with what its image has, in every slot; `told` are slots that it has in another way, or beside it."""
    skipped = IMAGES[type(thing)].extra
    for name in image.__struct_fields__:
        if name not in skipped and name not in told:
            setattr(thing, name, getattr(image, name))
    for name, value in told.items():
        setattr(thing, name, value)
    return thing


# -- to images --------------------------------------------------------------------------------------------------------


def _state_image(state: State) -> StateImage:
    known = state.requests.by_handle
    drained = {
        request.handle: request
        for step in state.window.in_flight
        for request in (*step.requests, *step.filled)
        if known.get(request.handle) is not request
    }
    assert not drained.keys() & known.keys(), "two requests with one handle"
    image: StateImage = _image(
        StateImage,
        state,
        encoder=_image(EncoderCacheImage, state.encoder, evictable=list(state.encoder.evictable)),
        pool=_pool_image(state.pool),
        queues=_queues_image(state.queues),
        requests=_table_image(state.requests),
        suspicion=_image(SuspicionImage, state.suspicion),
        window=WindowImage([_step_image(step) for step in state.window.in_flight], state.window.next_step),
        drained=[_request_image(request) for request in drained.values()],
    )
    return image


def _table_image(table: RequestTable) -> Any:
    requests = [_request_image(request) for request in table.by_handle.values()]
    return _image(RequestTableImage, table, by_handle=requests, sessions=list(table.sessions))


def _request_image(request: Request) -> Any:
    return _image(RequestImage, request, num_run_blocks=len(request.run.block_ids) if request.run else 0)


def _queues_image(queues: Queues) -> Any:
    orders = {name: _handles(getattr(queues, name)) for name in ("idle", "running", "waiting")}
    return _image(QueuesImage, queues, **orders)


def _pool_image(pool: BlockPool) -> Any:
    return _image(BlockPoolImage, pool, free_blank=list(pool.free_blank), free_cached=list(pool.free_cached))


def _step_image(step: InFlightStep) -> Any:
    return _image(
        InFlightStepImage,
        step,
        requests=_handles(step.requests),
        filled=_handles(step.filled),
        first_output_positions=step.batch.first_output_positions,
        stop_ids=step.batch.stop_ids,
    )


def _handles(requests: Iterable[Request]) -> list[int]:
    return [request.handle for request in requests]


# -- and back ---------------------------------------------------------------------------------------------------------


def _state_of(image: StateImage) -> State:
    by_handle = {r.handle: _request_of(r) for r in image.requests.by_handle}
    known = by_handle | {r.handle: _request_of(r) for r in image.drained}
    try:
        sessions = {handle: by_handle[handle] for handle in image.requests.sessions}
        orders = {
            name: [by_handle[handle] for handle in getattr(image.queues, name)]
            for name in ("idle", "running", "waiting")
        }
        in_flight = deque(_step_of(step, known) for step in image.window.in_flight)
    except KeyError as error:
        raise ValueError(f"the snapshot names request {error} and doesn't have it") from error
    table = _filled(
        RequestTable(),
        image.requests,
        by_handle=by_handle,
        finished_ids=deque(image.requests.finished_ids),
        sessions=sessions,
        asking={handle for handle, request in by_handle.items() if request.sampling.asks_logprobs},
    )
    cache = _filled(EncoderCache(0), image.encoder, evictable=OrderedDict.fromkeys(image.encoder.evictable))
    opened = {} if image.opened_config is None else {"config": image.opened_config}
    return _filled(
        State(),
        image,
        **opened,
        requests=table,
        queues=_filled(Queues(), image.queues, **orders),
        pool=_pool_of(image.pool, _runs_of(by_handle.values(), image.requests.by_handle)),
        window=_filled(
            Window(),
            image.window,
            in_flight=in_flight,
            last_batch=in_flight[-1].batch if in_flight else NOBODY,
        ),
        encoder=cache,
        suspicion=_filled(Suspicion(), image.suspicion),
    )


def _request_of(image: RequestImage) -> Request:
    status = _STATUSES.get(image.status)
    if status is None:
        raise ValueError(f"{image.status!r} is no status of a request")
    return _filled(
        Request(_NO_REQUEST, _NO_CONFIG),
        image,
        chunks=deque(image.chunks),
        run=None,
        status=status,
        tokens=array("q", image.tokens),
    )


def _runs_of(requests: Iterable[Request], images: Iterable[RequestImage]) -> dict[int, Run]:
    """The runs, by their last block, and given to those who hold them."""
    runs: dict[int, Run] = {}
    for request, image in zip(requests, images, strict=True):
        if not image.num_run_blocks:
            continue
        block_ids = request.block_ids[: image.num_run_blocks]
        run = runs.get(block_ids[-1])
        if run is None:
            run = runs[block_ids[-1]] = Run(block_ids)
        else:
            run.num_holders += 1
        request.run = run
    return runs


def _pool_of(image: BlockPoolImage, runs: dict[int, Run]) -> BlockPool:
    return _filled(
        BlockPool(0, 1),
        image,
        block_by_hash={content: block for block, content in enumerate(image.hashes) if content is not None},
        runs=runs,
        fences=deque(image.fences),
        free_blank=OrderedDict.fromkeys(image.free_blank),
        free_cached=OrderedDict.fromkeys(image.free_cached),
    )


def _step_of(image: InFlightStepImage, known: dict[int, Request]) -> InFlightStep:
    requests, filled = ([known[handle] for handle in handles] for handles in (image.requests, image.filled))
    batch = Batch(requests)
    batch.epochs, batch.handles = image.epochs, image.handles
    batch.first_output_positions, batch.stop_ids = image.first_output_positions, image.stop_ids
    return _filled(InFlightStep(_NO_STEP, batch), image, batch=batch, requests=batch.requests, filled=filled)


def _output_of(image: OutputImage) -> Output:
    return _filled(Output(_NO_REQUEST), image, turn_ends=[TurnEnd(*end) for end in image.turn_ends])


def _outbox_of(outputs: list[Output], image: OutboxImage, max_finished: int) -> Outbox:
    """Of two outputs with one client id, the later is the one that the id names."""
    if len(outputs) != image.num_outputs:
        raise ValueError(f"the snapshot has {len(outputs)} outputs and says {image.num_outputs}")
    outbox = Outbox(max_finished)
    outbox.by_handle.update((output.handle, output) for output in outputs)
    outbox.by_id.update((output.request_id, output) for output in outputs)
    try:
        outbox._finished.extend(outbox.by_handle[handle] for handle in image.finished)  # noqa: SLF001
    except KeyError as error:
        raise ValueError(f"the snapshot names output {error} and doesn't have it") from error
    return outbox
