"""The state: what the journal says, folded.

    state = State()
    for event in journal: fold(state, event)      # refold.scheduler.fold

Two folds of one journal have the same `digest` at every position, on any machine and under any hash seed (law L11).
"""

import hashlib

import msgspec

from refold.journal.events import EngineConfig, PauseMode
from refold.projections.blocks import BlockPool
from refold.projections.encoder import EncoderCache
from refold.projections.queues import Queues
from refold.projections.requests import Request, RequestTable
from refold.projections.steps import InFlightStep, Window
from refold.projections.suspicion import Suspicion


class State:
    """Everything that a decision may depend on.

    `config` is the configuration of the engine's current life: unset until one has opened the journal.
    `unknown` are requests whose tokens have been erased since: until the record that says so, the prefix index follows the
    journal's word where it can't be derived. A living engine has none.
    """

    __slots__ = (
        "config",
        "encoder",
        "engine_epoch",
        "is_open",
        "paused",
        "pool",
        "queues",
        "requests",
        "suspicion",
        "unknown",
        "window",
        "worker_alive",
        "worker_generation",
    )

    def __init__(self) -> None:
        self.config: EngineConfig
        self.engine_epoch = 0
        self.is_open = False
        self.worker_generation = 0
        self.worker_alive = False
        self.requests = RequestTable()
        self.paused: PauseMode | None = None
        self.queues = Queues()
        self.pool = BlockPool(0, 1)
        self.window = Window()
        self.encoder = EncoderCache(0)
        self.suspicion = Suspicion()
        self.unknown: set[int] = set()

    @property
    def was_opened(self) -> bool:
        """Whether any engine ever opened this journal."""
        return hasattr(self, "config")

    @property
    def opened_config(self) -> EngineConfig | None:
        """`config` where there is one."""
        return self.config if self.was_opened else None

    @property
    def max_drafts(self) -> int:
        """How many drafts an entry may have."""
        config = self.config
        return config.num_speculative_tokens if config.speculation != "off" else 0

    @property
    def is_quiescent(self) -> bool:
        """Nothing lives and nothing is in flight."""
        return not self.requests.by_handle and not self.window.in_flight


def digest(state: State) -> str:
    """SHA-256 (hex) over a canonical form of the whole state: every counter, queue, block and entry in flight."""
    return hashlib.sha256(msgspec.msgpack.encode(canonical(state))).hexdigest()


def canonical(state: State) -> dict[str, object]:
    """The state as plain lists and numbers, in an order that follows from the journal alone."""
    pool = state.pool
    form: dict[str, object] = {
        "config": state.opened_config,
        "engine": [state.engine_epoch, state.is_open, state.paused, state.worker_generation, state.worker_alive],
        "next": [state.requests.next_handle, state.window.next_step],
        "finished_ids": list(state.requests.finished_ids),
        "requests": [_canonical_request(r) for r in state.requests.by_handle.values()],
        "waiting": [r.handle for r in state.queues.waiting],
        "running": [r.handle for r in state.queues.running],
        "idle": [r.handle for r in state.queues.idle],
        "tenants": [state.queues.virtual_now, sorted(state.queues.tenant_tags.items())],
        "turns": state.queues.num_turns,
        "encoder": [
            [digest, size, sorted(state.encoder.users[digest])] for digest, size in state.encoder.sizes.items()
        ],
        "evictable": list(state.encoder.evictable),
        "ref_counts": pool.ref_counts,
        "hashes": pool.hashes,
        "free": [list(pool.free_blank), list(pool.free_cached)],
        "fences": [[step, blocks] for step, blocks in pool.fences],
        "provisional": sorted((block, step) for step, written in pool.provisional.items() for block in written),
        "in_flight": [_canonical_step(step) for step in state.window.in_flight],
    }
    # Only where there is any: recorded digests of journals without must stay what they are.
    known = state.suspicion
    if known.num_losses or known.quarantined or known.is_unproved:
        counts = [sorted(known.num_losses.items()), sorted(known.num_alone.items())]
        form["suspicion"] = [*counts, sorted(known.quarantined.items()), known.is_unproved]
    return form


def _canonical_request(r: Request) -> list[object]:
    columns = [getattr(r, name) for name in _REQUEST_FIELDS]
    columns[_REQUEST_FIELDS.index("tokens")] = list(r.tokens)
    return [*columns, sorted(r.media_held), list(r.chunks)]


def _canonical_step(s: InFlightStep) -> list[object]:
    columns = [s.step, s.handles, s.num_tokens, s.epochs, sorted(s.chunk_entries), s.num_drafts, s.encoded]
    return [*columns, sorted(s.stale.items()), s.delivered, s.num_unresolved, s.written, [r.handle for r in s.filled]]


# Spelled out, not read off the class: recorded digests must stay what they are when a slot is added for another reason.
_REQUEST_FIELDS = (
    "adapter",
    "arrival_ns",
    "block_hashes",
    "block_ids",
    "cache_salt",
    "drafts",
    "epoch",
    "finish_reason",
    "grammar",
    "handle",
    "idle_since_ns",
    "input_closed",
    "last_sampling_step",
    "max_total_tokens",
    "media",
    "min_total_tokens",
    "num_computed_tokens",
    "num_deliverable_stale_tokens",
    "num_earlier_outputs",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_preemptions",
    "num_prompt_tokens",
    "num_published_blocks",
    "num_sampling_in_flight",
    "num_stale_output_tokens",
    "priority",
    "queue_key",
    "request_id",
    "resumable",
    "sampling",
    "status",
    "tenant",
    "tokens",
    "waits_for_grammar",
)
