"""The scratch: what a plan may use up, in locals.

A plan looks at the state and changes nothing. What it takes (token budget, blocks, places in the batch) is kept here until
the plan is whole; then it becomes events, and the appliers do to the state what the scratch did to its copies. Nothing
half-planned is ever visible.
"""

from refold.journal.events import (
    Admission,
    BlockAllocation,
    Drafts,
    EncoderInput,
    EngineConfig,
    Event,
    PreemptReason,
    RequestPreempted,
    StalePolicy,
    StepScheduled,
)
from refold.projections.requests import RUNNING, WAITING, Request
from refold.scheduler.encoder_room import EncoderRoom
from refold.scheduler.free_blocks import FreeBlocks
from refold.scheduler.plan_parts import Promise, Shape
from refold.scheduler.state import State


class Plan:
    """A step being planned: its columns so far, and what is left of each budget."""

    __slots__ = (
        "admissions",
        "allocations",
        "block_size",
        "chunk_entries",
        "draft_counts",
        "drafts",
        "encoder",
        "encoder_inputs",
        "first_positions",
        "free",
        "handles",
        "is_special",
        "known_blocks",
        "known_hashes",
        "num_drafts",
        "num_known_owned",
        "num_running",
        "num_tokens",
        "preemptions",
        "promises",
        "reclaimed",
        "starved",
        "state",
        "token_budget",
    )

    def __init__(self, state: State) -> None:
        config = state.config
        self.state = state
        self.block_size = state.pool.block_size
        self.token_budget = config.max_num_batched_tokens
        self.num_running = len(state.queues.running)
        self.num_drafts = drafts_for_batch(config, self.num_running) if config.speculation != "off" else 0
        self.is_special = config.speculation == "ngram" or config.decode_stagger > 1
        self.free = FreeBlocks(state.pool)
        self.encoder: EncoderRoom | None = None  # made for the first who needs it
        self.starved = False
        self.preemptions: list[RequestPreempted] = []
        self.reclaimed: set[int] = set()
        self.handles: list[int] = []
        self.num_tokens: list[int] = []
        self.first_positions: list[int] = []
        self.chunk_entries: list[int] = []
        self.draft_counts: list[int] = []  # of every entry, where the plan drafts
        self.drafts: list[Drafts] = []
        self.encoder_inputs: list[EncoderInput] = []
        self.admissions: list[Admission] = []
        self.allocations: list[BlockAllocation] = []
        self.promises: dict[bytes, Promise] = {}  # by the hash of the first block that nobody has
        self.known_hashes: list[bytes] = []  # of the last look-up, and what it found: the next one often begins alike
        self.known_blocks: list[int] = []
        self.num_known_owned = 0  # so many of the first of them have an owner

    def encoder_room(self) -> EncoderRoom:
        """What this plan leaves of the encoder's budget and cache."""
        if self.encoder is None:
            self.encoder = EncoderRoom(self.state.encoder, self.state.config.encoder_budget_tokens)
        return self.encoder

    def note_shape(self, shape: Shape) -> None:
        """Say what the entry that is added next is."""
        entry = len(self.handles)
        assert 1 <= shape.num_tokens <= self.token_budget, (entry, shape, self.token_budget)
        if shape.is_chunk:
            self.chunk_entries.append(entry)
        if self.num_drafts:
            self.draft_counts.append(shape.num_drafts)
        if shape.draft_token_ids:
            self.drafts.append(Drafts(entry=entry, token_ids=list(shape.draft_token_ids)))
        if shape.encoder is not None:
            self.encoder_inputs += self.encoder_room().commit(entry, shape.encoder)

    def preempt(self, victim: Request, needy: Request, needed: int) -> None:
        """Take a running request's blocks and place."""
        self._take_from(victim, "kv_pressure", "deliver", needy, needed)
        self.num_running -= 1

    def isolate(self, trial: frozenset[int]) -> bool:
        """Take the places of all who run and aren't on trial; whether there were any."""
        for victim in reversed(self.state.queues.running):
            if victim.handle not in trial:
                self._take_from(victim, "isolated", "deliver", None, 0)
        return bool(self.preemptions)

    def reclaim_session(self, needy: Request, needed: int) -> bool:
        """Take the blocks of the last idle session, or else of the last session that waits; False if there is none.

        One that waits gives way to whoever runs and to whoever comes before it; if nobody runs, to anyone.
        """
        for queue in (self.state.queues.idle, self._giving_way_to(needy)):
            for session in reversed(queue):
                if session.block_ids and not self._keeps_blocks(session):
                    self._take_from(session, "session_reclaimed", "drop", needy, needed)
                    self.reclaimed.add(session.handle)
                    return True
        return False

    def _keeps_blocks(self, session: Request) -> bool:
        """Whose blocks somebody shares who comes in with this very plan keeps them for now."""
        if session.handle in self.reclaimed:
            return True
        return any(not set(session.block_ids).isdisjoint(newcomer.hit_block_ids) for newcomer in self.admissions)

    def _giving_way_to(self, needy: Request) -> list[Request]:
        sessions = [r for r in self.state.requests.sessions.values() if r.status is WAITING and r is not needy]
        if needy.status is not RUNNING and self.num_running:
            sessions = [r for r in sessions if r.queue_key > needy.queue_key]
        return sorted(sessions, key=lambda r: r.queue_key)

    def _take_from(
        self, victim: Request, reason: PreemptReason, policy: StalePolicy, needy: Request | None, needed: int
    ) -> None:
        self.preemptions.append(preemption(victim, reason, policy, needy, needed, self.free.num_free))
        self.free.release(victim.block_ids, victim.run, fenced=victim.num_in_flight_tokens > 0)

    def events(self) -> list[Event]:
        """The plan as facts: the preemptions, then the step if it has an entry."""
        if not self.handles:
            return list(self.preemptions)
        step = StepScheduled(
            step=self.state.window.next_step,
            handles=self.handles,
            num_tokens=self.num_tokens,
            first_positions=self.first_positions,
            chunk_entries=self.chunk_entries,
            admissions=self.admissions,
            allocations=self.allocations,
            evicted_block_ids=list(self.free.evicted),
            num_drafts=self.draft_counts if any(self.draft_counts) else [],
            drafts=self.drafts,
            encoder_inputs=self.encoder_inputs,
            encoder_evictions=self.encoder.evictions if self.encoder else [],
        )
        return [*self.preemptions, step]


def drafts_for_batch(config: EngineConfig, num_running: int) -> int:
    """How many drafts a request may have in a batch of this size: verifying is free in a small batch and dear in a large."""
    if not config.speculation_by_batch:
        return config.num_speculative_tokens
    for batch, drafts in config.speculation_by_batch:
        if num_running <= batch:
            return min(drafts, config.num_speculative_tokens)
    return 0


def preemption(
    victim: Request, reason: PreemptReason, policy: StalePolicy, needy: Request | None, needed: int, free: int
) -> RequestPreempted:
    """The fact that `victim` was preempted, as the state is now."""
    return RequestPreempted(
        handle=victim.handle,
        reason=reason,
        stale_policy=policy,
        released_block_ids=victim.block_ids,
        num_computed_tokens=victim.num_computed_tokens,
        num_stale_output_tokens=victim.num_in_flight_tokens,
        for_handle=None if needy is None else needy.handle,
        needed_blocks=needed,
        free_blocks=free,
    )
