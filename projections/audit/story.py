"""What the projection remembers between records: what is unfinished, and nothing of what was said.

It's the working memory of `project`: live requests, steps in flight, who owns and who wrote which block. It holds no token and no
digest of tokens, so it may lie in the database beside a redacted journal.
"""

import msgspec

from refold.projections.audit.schema import IN_FLIGHT


class Stale(msgspec.Struct, gc=False):
    """An entry whose epoch ended while it was in flight. Fields as the columns of `audit_stale`."""

    step: int
    entry: int
    handle: int
    epoch: int
    num_tokens: int
    num_placeholders: int
    cause: str
    first_policy: str
    policy: str
    stale_position: int
    stale_event: int
    stale_ns: int
    preemption: int
    dropped_position: int | None = None
    dropped_event: int | None = None
    outcome: int = IN_FLIGHT
    resolved_position: int | None = None
    resolved_event: int | None = None
    resolved_ns: int | None = None
    num_outputs: int = 0


class Step(msgspec.Struct):
    """A step in flight. Fields as the columns of `audit_steps`, then its entries, column by column."""

    step: int
    position: int
    event_index: int
    time_ns: int
    engine_epoch: int
    num_entries: int
    num_tokens: int
    num_prefill_tokens: int
    num_decode_entries: int
    num_prefill_entries: int
    num_chunk_entries: int
    num_admitted: int
    num_hit_tokens: int
    num_drafts: int
    num_new_blocks: int
    num_evicted_blocks: int
    num_owned_blocks: int
    num_blocks: int
    num_running: int
    num_waiting: int
    num_steps_in_flight: int
    handles: list[int]
    tokens: list[int]
    first_positions: list[int]
    drafts: list[int]
    kinds: list[int]
    epochs: list[int]
    outcome: int = IN_FLIGHT
    resolved_position: int | None = None
    resolved_ns: int | None = None
    num_output_tokens: int = 0
    num_stale_entries: int = 0
    stale: dict[int, Stale] = {}
    is_delivered: bool = False
    is_written: bool = False


class Preemption(msgspec.Struct, gc=False):
    """A preemption that isn't over. Fields as the columns of `audit_preemptions`."""

    position: int
    event_index: int
    handle: int
    time_ns: int
    engine_epoch: int
    reason: str
    for_handle: int | None
    needed_blocks: int
    free_blocks: int
    num_released_blocks: int
    num_computed_tokens: int
    num_stale_tokens: int
    stale_policy: str
    epoch: int
    num_pending: int
    drained_position: int | None = None
    drained_ns: int | None = None
    resumed_position: int | None = None
    resumed_ns: int | None = None
    resumed_step: int | None = None
    num_hit_tokens: int | None = None
    num_recomputed_tokens: int | None = None
    is_over: bool = False


class Request(msgspec.Struct):
    """A request that isn't over. Fields as the columns of `audit_requests`, then what its blocks and epochs are told by."""

    handle: int
    request_id: str
    position: int
    submitted_ns: int
    arrival_ns: int
    priority: int
    tenant: str
    adapter: str
    cache_salt: str
    grammar: str
    is_session: int
    num_media: int
    num_prompt_tokens: int
    max_tokens: int
    num_known: int
    prompt_end: int
    status: str = "waiting"
    first_scheduled_ns: int | None = None
    first_scheduled_step: int | None = None
    num_cached_tokens: int = 0
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    finished_position: int | None = None
    finished_ns: int | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    abort_cause: str | None = None
    num_output_tokens: int = 0
    num_finished_output_tokens: int | None = None
    num_turns: int = 0
    num_scheduled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions: int = 0
    preempted_ns: int = 0
    num_worker_losses: int = 0
    num_stale_tokens_delivered: int = 0
    num_stale_tokens_dropped: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    max_inter_token_ns: int | None = None
    num_in_flight_tokens: int = 0
    num_aborted_in_flight_tokens: int = 0
    is_redacted: int = 0
    epoch: int = 0
    num_computed: int = 0
    num_published: int = 0
    block_ids: list[int] = []
    queued_chunks: list[int] = []
    preemption: int = 0


class Life(msgspec.Struct, gc=False):
    """The life of the engine that goes on. Fields as the columns of `audit_lives`."""

    engine_epoch: int
    opened_position: int
    opened_ns: int
    refold_version: str
    model: str
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_in_flight_steps: int
    num_blocks: int
    block_size: int
    num_recovered_requests: int
    last_ns: int
    num_steps: int = 0
    num_output_tokens: int = 0
    closed_position: int | None = None
    closed_ns: int | None = None
    close_reason: str | None = None
    num_lost_steps: int = 0
    num_lost_tokens: int = 0
    has_prefix_caching: bool = True


class Worker(msgspec.Struct, gc=False):
    """The worker that is there. Fields as the columns of `audit_workers`."""

    generation: int
    kind: str
    environment: str
    engine_epoch: int
    started_position: int
    started_ns: int
    lost_position: int | None = None
    lost_event: int | None = None
    lost_ns: int | None = None
    lost_reason: str | None = None
    num_lost_steps: int = 0
    num_lost_tokens: int = 0
    num_lost_requests: int = 0


class Written(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Who filled a block, as which block of its table, from which step on."""

    handle: int
    index: int
    step: int


class Story(msgspec.Struct):
    """All that is remembered of one stream."""

    requests: dict[int, Request] = {}
    steps: dict[int, Step] = {}
    preemptions: dict[int, Preemption] = {}
    owners: dict[int, int] = {}
    writers: dict[int, Written] = {}
    tenants: dict[str, int] = {}
    life: Life | None = None
    worker: Worker | None = None
    next_preemption: int = 1
    num_running: int = 0
    num_waiting: int = 0
    num_events: int = 0
    num_request_events: int = 0

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.life.block_size if self.life is not None else 1


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Story).decode


def pack(story: Story) -> bytes:
    """A story as bytes."""
    return _encode(story)


def unpack(body: bytes) -> Story:
    """The story in these bytes; its steps in flight have their rows already.

    Raises:
        msgspec.DecodeError: there is none.
    """
    return mark_written(_decode(body))


def mark_written(story: Story) -> Story:
    """Whatever is in flight has rows in the database."""
    for step in story.steps.values():
        step.is_written = True
    return story
