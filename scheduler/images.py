"""Images: the typed form that each class with slots has in a snapshot (`refold.scheduler.snapshot`).

An image has the same fields as its class, by the same names. Whoever adds a slot to one of the classes adds it here; the tests
say so if it was forgotten.
"""

from typing import NamedTuple

import msgspec

from refold.journal.events import EngineConfig, FinishReason, Media, PauseMode, Sampling, SessionExtended, StalePolicy
from refold.projections.blocks import BlockPool
from refold.projections.encoder import EncoderCache
from refold.projections.outbox import Outbox, Output
from refold.projections.queues import Queues
from refold.projections.requests import Request, RequestTable
from refold.projections.steps import InFlightStep, Window
from refold.projections.suspicion import Suspicion
from refold.projections.totals import Totals
from refold.scheduler.state import State


class Image(msgspec.Struct, array_like=True, gc=False):
    """The fields of one class with slots, by the names that they have there."""


class RequestImage(Image):
    """Of a `Request`. `num_run_blocks`: so many of the first of its blocks are held as a run."""

    adapter: str
    arrival_ns: int
    block_hashes: list[bytes]
    block_ids: list[int]
    cache_salt: str
    chunks: list[SessionExtended]
    drafts: list[int]
    epoch: int
    finish_reason: FinishReason | None
    first_output_position: int
    grammar: str
    handle: int
    idle_since_ns: int
    input_closed: bool
    last_sampling_step: int
    max_total_tokens: int
    media: list[Media]
    media_held: set[int]
    min_total_tokens: int
    num_computed_tokens: int
    num_deliverable_stale_tokens: int
    num_drafts_in_flight: int
    num_earlier_outputs: int
    num_preemptions: int
    num_prompt_tokens: int
    num_prompt_tokens_in_flight: int
    num_published_blocks: int
    num_run_blocks: int
    num_stale_output_tokens: int
    plain_until: int
    priority: int
    queue_key: tuple[int, int]
    request_id: str
    resumable: bool
    sampling: Sampling
    status: str
    stop_ids: frozenset[int]
    tenant: str
    tokens: list[int]
    waits_for_grammar: bool


class RequestTableImage(Image):
    """Of a `RequestTable`; `sessions` by handle."""

    by_handle: list[RequestImage]
    finished_ids: list[str]
    handle_by_id: dict[str, int]
    next_handle: int
    sessions: list[int]


class QueuesImage(Image):
    """Of `Queues`; requests by handle."""

    idle: list[int]
    running: list[int]
    tenant_tags: dict[str, int]
    virtual_now: int
    num_turns: int
    waiting: list[int]


class BlockPoolImage(Image):
    """Of a `BlockPool`. `block_by_hash` follows from `hashes`, `runs` from the requests."""

    block_size: int
    counts: list[int]
    fences: list[tuple[int, list[int]]]
    free_blank: list[int]
    free_cached: list[int]
    hashes: list[bytes | None]
    num_blocks: int
    num_fenced: int
    provisional: dict[int, set[int]]


class EncoderCacheImage(Image):
    """Of an `EncoderCache`."""

    capacity: int
    evictable: list[str]
    sizes: dict[str, int]
    used: int
    users: dict[str, set[int]]


class InFlightStepImage(Image):
    """Of an `InFlightStep` and its `Batch`; requests by handle."""

    chunk_entries: frozenset[int]
    delivered: bool
    due_entries: list[int]
    encoded: list[str]
    epochs: list[int]
    filled: list[int]
    first_output_positions: list[int]
    last_entries: list[int]
    handles: list[int]
    num_drafts: list[int]
    num_tokens: list[int]
    num_unresolved: int
    requests: list[int]
    sampled_positions: list[int]
    stale: dict[int, StalePolicy]
    stop_ids: frozenset[int]
    step: int
    written: list[int]


class WindowImage(Image):
    """Of a `Window`."""

    in_flight: list[InFlightStepImage]
    next_step: int


class SuspicionImage(Image):
    """Of a `Suspicion`."""

    is_unproved: bool
    num_alone: dict[int, int]
    num_losses: dict[int, int]
    quarantined: dict[str, tuple[int, str]]


class StateImage(Image):
    """Of a `State`. `drained`: requests that only a step in flight still names."""

    encoder: EncoderCacheImage
    engine_epoch: int
    is_open: bool
    opened_config: EngineConfig | None
    paused: PauseMode | None
    pool: BlockPoolImage
    queues: QueuesImage
    requests: RequestTableImage
    suspicion: SuspicionImage
    unknown: set[int]
    window: WindowImage
    worker_alive: bool
    worker_generation: int
    drained: list[RequestImage]


class OutputImage(Image):
    """Of an `Output`."""

    finish_reason: FinishReason | None
    handle: int
    is_redacted: bool
    is_session: bool
    message: str
    num_prompt_tokens: int
    num_turns: int
    request_id: str
    stop_token_id: int | None
    token_ids: list[int]
    turn_ends: list[tuple[int, FinishReason, int | None]]
    surprisals: dict[int, list[int]]
    prompt_surprisals: list[list[int]] | None
    prompt_token_ids: list[int]


class TotalsImage(Image):
    """Of `Totals`."""

    finished: dict[str, int]
    is_closed: bool
    lost_steps: int
    lost_workers: int
    preemptions: int
    prompt_tokens: int
    requests: int
    scheduled_tokens: int
    stale_tokens_delivered: int
    stale_tokens_dropped: int
    steps: int
    tokens: int


class OutboxImage(Image):
    """Of an `Outbox`, whose outputs have pieces of their own. `finished` are handles, in the order of their ends."""

    num_outputs: int
    finished: list[int]


class Imaged(NamedTuple):
    """How a class is told: its image, slots that follow from others, and fields that only the image has."""

    image: type[Image]
    derived: frozenset[str] = frozenset()
    extra: frozenset[str] = frozenset()


IMAGES: dict[type, Imaged] = {
    State: Imaged(StateImage, derived=frozenset({"config"}), extra=frozenset({"drained", "opened_config"})),
    Request: Imaged(RequestImage, derived=frozenset({"run"}), extra=frozenset({"num_run_blocks"})),
    RequestTable: Imaged(RequestTableImage, derived=frozenset({"asking"})),
    Queues: Imaged(QueuesImage),
    BlockPool: Imaged(BlockPoolImage, derived=frozenset({"block_by_hash", "runs"})),
    EncoderCache: Imaged(EncoderCacheImage),
    InFlightStep: Imaged(
        InFlightStepImage,
        derived=frozenset({"batch"}),
        extra=frozenset({"first_output_positions", "stop_ids"}),
    ),
    Window: Imaged(WindowImage, derived=frozenset({"last_batch"})),
    Output: Imaged(OutputImage),
    Suspicion: Imaged(SuspicionImage),
    Totals: Imaged(TotalsImage),
    Outbox: Imaged(
        OutboxImage,
        derived=frozenset({"_by_handle", "_by_id", "_columns", "_finished", "_max_finished"}),
        extra=frozenset({"finished", "num_outputs"}),
    ),
}
"""Every class that a snapshot holds. The tests compare it with the slots."""
