"""The scratch: what a plan may use up, in locals.

A plan looks at the state and changes nothing. What it takes (token budget, blocks, places in the batch) is kept here until
the plan is whole; then it becomes events, and the appliers do to the state what the scratch did to its copies. Nothing
half-planned is ever visible.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

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
from refold.projections.blocks import BlockPool
from refold.projections.encoder import EncoderCache
from refold.projections.requests import RUNNING, WAITING, Request
from refold.scheduler.state import State


class FreeBlocks:
    """The free blocks as this plan will leave them.

    `num_fenced` counts blocks that become free when a step in flight comes back: as good as free, one step later.
    """

    __slots__ = ("_blank", "_cached", "_pool", "_shared", "_yielded", "evicted", "num_fenced", "num_free", "released")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blank: Iterator[int] = reversed(pool.free_blank)
        self._cached: Iterator[int] = iter(pool.free_cached)
        self.released: dict[int, int] = {}
        self._yielded: list[int] = []
        self._shared: set[int] = set()
        self.evicted: dict[int, None] = {}
        self.num_free = pool.num_free
        self.num_fenced = pool.num_fenced

    def take(self, count: int) -> list[int]:
        """The next `count` free blocks: blank ones first, then the cached ones in order of disuse."""
        assert 0 < count <= self.num_free, (count, self.num_free)
        self.num_free -= count
        if self._yielded:
            return [self._next() for _ in range(count)]
        taken = list(islice(self._blank, count))
        if len(taken) < count:
            for block in self._cached:
                if block in self._shared:
                    continue
                self.evicted[block] = None
                taken.append(block)
                if len(taken) == count:
                    break
        assert len(taken) == count, (len(taken), count)
        return taken

    def idle(self, block_ids: list[int]) -> list[int]:
        """Which of these cached blocks nobody owns now: sharing them uses up free blocks."""
        counts = self._pool.ref_counts
        return [block for block in block_ids if counts[block] == 0 and block not in self._shared]

    def share(self, idle: list[int]) -> None:
        """Own cached blocks that nobody owned."""
        self.num_free -= len(idle)
        self._shared.update(idle)

    def own(self, block: int) -> None:
        """A block that this plan has taken already: whoever shares it uses up nothing."""
        self._shared.add(block)

    def release(self, block_ids: list[int], *, fenced: bool) -> None:
        """Count what a victim gives back: to the free blocks, or to the fence while a step may still write them."""
        for block in reversed(block_ids):
            released = self.released[block] = self.released.get(block, 0) + 1
            if released < self._pool.ref_counts[block]:
                continue
            if fenced:
                self.num_fenced += 1
            else:
                self.num_free += 1
                self._yielded.append(block)

    def _next(self) -> int:
        block = self._next_blank()
        if block is None:
            block = next(b for b in self._cached_then_yielded() if b not in self._shared)
            self.evicted[block] = None
        return block

    def _next_blank(self) -> int | None:
        for i in range(len(self._yielded) - 1, -1, -1):
            if self._pool.hashes[self._yielded[i]] is None:
                return self._yielded.pop(i)
        return next(self._blank, None)

    def _cached_then_yielded(self) -> Iterator[int]:
        yield from self._cached
        while self._yielded:
            yield self._yielded.pop(0)


class Hit(NamedTuple):
    """Cached blocks that hold a request's prefix; of them, `idle` belong to nobody yet and count as free."""

    block_ids: list[int]
    idle: list[int]


NO_HIT = Hit([], [])


class EncoderProposal(NamedTuple):
    """Media that an entry of `num_tokens` needs: (index, digest, size to compute or 0), and what must go for them."""

    num_tokens: int
    items: list[tuple[int, str, int]]
    evictions: list[str]


class Shape(NamedTuple):
    """An entry to be: `num_tokens` in all (0: not in this step), the last `num_drafts` of them drafts."""

    num_tokens: int
    is_chunk: bool
    num_drafts: int = 0
    draft_token_ids: Sequence[int] = ()
    encoder: EncoderProposal | None = None


class EncoderRoom:
    """The encoder's budget and cache as this plan will leave them."""

    __slots__ = ("_added", "_cache", "_in_use", "budget", "evictions", "used")

    def __init__(self, cache: EncoderCache, budget: int) -> None:
        self._cache = cache
        self._added: dict[str, int] = {}
        self._in_use: set[str] = set()
        self.budget = budget
        self.used = cache.used
        self.evictions: list[str] = []

    def propose(self, request: Request, first: int, n: int) -> EncoderProposal:
        """What computing places first..first+n-1 needs. Fewer places if the encoder's output for some can't be there."""
        items: list[tuple[int, str, int]] = []
        evictions: list[str] = []
        budget, used = self.budget, self.used
        for index, media in enumerate(request.media):
            if media.start >= first + n or media.start + media.num_tokens <= first or index in request.media_held:
                continue
            new = {digest for _, digest, size in items if size}
            if self._is_there(media.digest, evictions) or media.digest in new:
                items.append((index, media.digest, 0))
                continue
            going = self._make_room(used + media.num_tokens, {d for _, d, _ in items} | set(evictions))
            is_going = media.digest in self.evictions or media.digest in evictions
            if media.num_tokens > budget or going is None or is_going:
                return EncoderProposal(max(media.start - first, 0), items, evictions)
            evictions += going
            used += media.num_tokens - sum(self._cache.sizes[d] for d in going)
            budget -= media.num_tokens
            items.append((index, media.digest, media.num_tokens))
        return EncoderProposal(n, items, evictions)

    def commit(self, entry: int, proposal: EncoderProposal) -> list[EncoderInput]:
        """Use up what was proposed."""
        self.evictions += proposal.evictions
        self.used -= sum(self._cache.sizes[digest] for digest in proposal.evictions)
        for _, digest, size in proposal.items:
            self._in_use.add(digest)
            if size:
                self._added[digest] = size
                self.used += size
                self.budget -= size
        return [EncoderInput(entry=entry, media=index, computed=size > 0) for index, _, size in proposal.items]

    def _is_there(self, digest: str, going: list[str]) -> bool:
        held = digest in self._cache.sizes and digest not in self.evictions and digest not in going
        return held or digest in self._added

    def _make_room(self, wanted: int, kept: set[str]) -> list[str] | None:
        """Which unused entries must go so that `wanted` embeddings fit; None if they can't."""
        going: list[str] = []
        for digest in self._cache.evictable:
            if wanted <= self._cache.capacity:
                break
            if digest not in kept and digest not in self._in_use and digest not in self.evictions:
                going.append(digest)
                wanted -= self._cache.sizes[digest]
        return going if wanted <= self._cache.capacity else None


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
        "hashes",
        "is_special",
        "num_drafts",
        "num_running",
        "num_tokens",
        "preemptions",
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
        self.encoder = EncoderRoom(state.encoder, config.encoder_budget_tokens)
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
        self.hashes: dict[bytes, int] = {}

    def note_shape(self, n: int, shape: Shape) -> None:
        """Say what the entry that is added next is."""
        entry = len(self.handles)
        assert 1 <= n <= self.token_budget, (entry, n, self.token_budget)
        if shape.is_chunk:
            self.chunk_entries.append(entry)
        if self.num_drafts:
            self.draft_counts.append(shape.num_drafts)
        if shape.draft_token_ids:
            self.drafts.append(Drafts(entry=entry, token_ids=list(shape.draft_token_ids)))
        if shape.encoder is not None:
            self.encoder_inputs += self.encoder.commit(entry, shape.encoder)

    def allocate(self, block_ids: list[int]) -> None:
        """Give blocks to the entry that is added next."""
        self.allocations.append(BlockAllocation(entry=len(self.handles), block_ids=block_ids))

    def preempt(self, victim: Request, needy: Request, needed: int) -> None:
        """Take a running request's blocks and place."""
        self._take_from(victim, "kv_pressure", "deliver", needy, needed)
        self.num_running -= 1

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
        self, victim: Request, reason: PreemptReason, policy: StalePolicy, needy: Request, needed: int
    ) -> None:
        self.preemptions.append(preemption(victim, reason, policy, needy, needed, self.free.num_free))
        self.free.release(victim.block_ids, fenced=victim.num_in_flight_tokens > 0)

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
            encoder_evictions=self.encoder.evictions,
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
