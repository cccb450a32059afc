"""The laws: what holds after every event, whatever happened.

`check_state` looks at one state. The laws that need a memory (each entry resolved once, each output delivered once, each
block's content computed) are in `refold.scheduler.lawbook`.

A broken law is a bug of ours (`InvariantViolation`), never the fault of an input.
"""

from refold.journal.errors import InvariantViolation
from refold.journal.events import EngineConfig
from refold.projections.requests import FINISHED, IDLE, PREEMPTED, RUNNING, WAITING, Request
from refold.scheduler.state import State

LAWS: dict[str, str] = {
    "L1": "each entry of a step is resolved exactly once (delivered, stale-consumed or lost), steps in order",
    "L2": "the counters equal the sums over the window; 0 <= stale <= in flight; placeholders >= 0",
    "L3": "owned + fenced + blank + cached = all blocks; reference counts equal owners; a shared block is full and hashed",
    "L4": "a block's hash is the chain hash of the tokens computed into it",
    "L5": "output indices of a request are 0, 1, 2, ... without gap or repeat",
    "L6": "every live request is in exactly one queue, the one of its status, and the queues are in order",
    "L7": "who doesn't run has no placeholders, no drafts and, but for sessions between turns, nothing computed and no blocks",
    "L8": "token budget, sequence limit and model length hold; every entry has at least one token",
    "L9": "a request finishes once; after that only stale output names it",
    "L10": "with nothing live and nothing in flight, every block is free",
    "L11": "the recorded digest equals the digest of the fold",
    "L13": "the encoder cache holds what it counts, and only what nobody needs is evictable",
    "L14": "only live requests are under suspicion",
    "L15": "who is said to decode plainly needs no block and no limit, and has nothing to publish or to verify",
    "L16": "with a prefix cache, every full block of a live request's known tokens has its hash",
}


def broken(law: str, message: str) -> InvariantViolation:
    """The violation of a law, ready to be raised."""
    return InvariantViolation(f"{law} broken ({LAWS[law]}): {message}")


def check_state(state: State) -> None:
    """L2, L3, L6, L7, L8 (limits), L10, L13, L14, L15 and L16 on one state.

    Raises:
        InvariantViolation: a law is broken; the message names it.
    """
    _check_counters(state)
    _check_blocks(state)
    _check_queues(state)
    _check_each_request(state)
    _check_encoder(state)
    if state.suspicion.num_losses:
        _check_suspicion(state)
    if state.is_quiescent:
        free = state.pool.num_free
        if free != state.pool.num_blocks:
            raise broken("L10", f"{free} of {state.pool.num_blocks} blocks free")


def _check_counters(state: State) -> None:
    by_handle = state.requests.by_handle
    sums = {handle: [0, 0, 0, 0, 0] for handle in by_handle}
    for step in state.window.in_flight:
        stale, chunks, delivered = step.stale, step.chunk_entries, step.delivered
        for entry, (handle, n, epoch) in enumerate(zip(step.handles, step.num_tokens, step.epochs, strict=True)):
            row = sums.get(handle)
            if row is None:
                raise broken("L1", f"step {step.step} in flight names unknown handle {handle}")
            is_stale = epoch < by_handle[handle].epoch
            if is_stale != (entry in stale):
                request_id = by_handle[handle].request_id
                raise broken("L2", f"{request_id} in step {step.step}: the stale mark contradicts the epoch")
            if is_stale:
                row[0] += n
                row[1] += n
                row[2] += n * (stale[entry] == "deliver")
            elif not delivered:
                row[0] += n
                if entry not in chunks:
                    row[3] += 1 + (step.num_drafts[entry] if step.num_drafts else 0)
                    row[4] += 1
    for handle, request in by_handle.items():
        placeholders = request.num_output_placeholders
        kept = [
            request.num_in_flight_tokens,
            request.num_stale_output_tokens,
            request.num_deliverable_stale_tokens,
            placeholders,
            placeholders - request.num_drafts_in_flight,
        ]
        if kept != sums[handle]:
            raise broken("L2", f"{request.request_id}: {kept} kept, {sums[handle]} summed")


def _check_blocks(state: State) -> None:
    pool = state.pool
    owners = [0] * pool.num_blocks
    _check_runs(state)
    for request in state.requests.by_handle.values():
        for block in request.block_ids:
            owners[block] += 1
    if owners != pool.ref_counts:
        raise broken("L3", f"owners {owners}, reference counts {pool.ref_counts}")
    fenced = [block for _, idle in pool.fences for block in idle]
    if pool.num_fenced != len(fenced):
        raise broken("L3", f"{pool.num_fenced} counted fenced, {len(fenced)} are")
    unowned = [*fenced, *pool.free_blank, *pool.free_cached]
    in_two = any(map(owners.__getitem__, unowned)) or len(set(unowned)) != len(unowned)
    if in_two or owners.count(0) != len(unowned):
        raise broken("L3", f"a block is in no place, or in two: fenced {fenced}, owners {owners}")
    _check_hashes(state, owners)


def _check_runs(state: State) -> None:
    """Whoever holds a run begins with its blocks, and the holders are as many as are counted."""
    held: dict[int, int] = {}
    for request in state.requests.by_handle.values():
        if request.run is not None:
            run, last = request.run, request.run.block_ids[-1]
            if request.block_ids[: len(run.block_ids)] != run.block_ids or state.pool.runs.get(last) is not run:
                raise broken("L3", f"{request.request_id} holds a run that it doesn't begin with")
            held[last] = held.get(last, 0) + 1
    if held != {last: run.num_holders for last, run in state.pool.runs.items()}:
        raise broken("L3", f"runs are held by {held}, counted {[r.num_holders for r in state.pool.runs.values()]}")


def _check_hashes(state: State, owners: list[int]) -> None:
    pool, hashes = state.pool, state.pool.hashes
    found = pool.block_by_hash
    if found and list(map(hashes.__getitem__, found.values())) != list(found):
        raise broken("L4", "a hash finds a block that doesn't carry it")
    if len(found) != pool.num_blocks - hashes.count(None):
        raise broken("L4", f"{len(found)} hashes found, {pool.num_blocks - hashes.count(None)} blocks hashed")
    if max(owners, default=0) > 1:
        bare = [block for block, count in enumerate(owners) if count > 1 and hashes[block] is None]
        if bare:
            raise broken("L3", f"blocks {bare} are shared and not hashed")
    if any(map(hashes.__getitem__, pool.free_blank)) or not all(map(hashes.__getitem__, pool.free_cached)):
        raise broken("L3", f"a free block is in the wrong list: {list(pool.free_blank)}, {list(pool.free_cached)}")


_QUEUES = (
    ("running", frozenset((RUNNING,))),
    ("waiting", frozenset((WAITING, PREEMPTED))),
    ("idle", frozenset((IDLE,))),
)


def _check_queues(state: State) -> None:
    by_handle, queued = state.requests.by_handle, 0
    for name, statuses in _QUEUES:
        last = None
        for r in getattr(state.queues, name):
            key = r.queue_key
            if r.status not in statuses:
                raise broken("L6", f"{r.request_id} is {r.status} and in {name}")
            if last is not None and key <= last:
                raise broken("L6", f"{name} is out of order at {r.request_id}")
            if by_handle.get(r.handle) is not r:
                raise broken("L6", f"{r.request_id} is in {name} and not in the table")
            last = key
            queued += 1
    live = len(state.requests.live())
    if queued != live:
        raise broken("L6", f"{queued} requests are queued, {live} live")
    limit = state.config.max_num_seqs if state.was_opened else 0
    if len(state.queues.running) > limit:
        raise broken("L8", f"{len(state.queues.running)} running, limit {limit}")


def _check_each_request(state: State) -> None:
    config, block_size = state.opened_config, state.pool.block_size
    for r in state.requests.by_handle.values():
        known, status = len(r.tokens), r.status
        if len(r.block_hashes) != known // block_size and status is not FINISHED and _is_hashing(config):
            raise broken("L16", f"{r.request_id}: {len(r.block_hashes)} hashes of {known} tokens")
        if status is RUNNING:
            end = known + r.num_output_placeholders
            if not r.num_computed_tokens <= end <= r.max_total_tokens <= state.config.max_model_len:
                raise broken("L8", f"{r.request_id} overruns")
            if r.num_computed_tokens < r.plain_until and not _is_plain(r, state):
                raise broken(
                    "L15", f"{r.request_id} at {r.num_computed_tokens} is said to be plain until {r.plain_until}"
                )
            continue
        if r.num_output_placeholders or r.num_drafts_in_flight or r.drafts or not _may_hold(r):
            raise broken("L7", f"{r.request_id} is {r.status} with {r.num_computed_tokens} computed tokens")
        if status is FINISHED and r.num_in_flight_tokens == 0:
            raise broken("L9", f"{r.request_id} finished, drained and still kept")


def _is_hashing(config: EngineConfig | None) -> bool:
    return config is not None and config.enable_prefix_caching


def _is_plain(r: Request, state: State) -> bool:
    """Whether a request's next decode needs nothing but its token, with as many drafts as it may have."""
    end = r.num_computed_tokens + 1 + state.max_drafts
    has_room = end <= len(r.block_ids) * state.pool.block_size and end < r.max_total_tokens
    has_say = r.grammar or r.media or r.drafts or len(r.block_hashes) > r.num_published_blocks
    return has_room and not has_say and len(r.tokens) + r.num_output_placeholders == r.num_computed_tokens + 1


def _may_hold(r: Request) -> bool:
    """Whether what a request that doesn't run has computed and owns is what it may."""
    if r.block_ids:
        return r.resumable and r.status in (WAITING, IDLE) and r.num_computed_tokens <= len(r.tokens)
    return r.num_computed_tokens == 0 and not r.media_held


def _check_suspicion(state: State) -> None:
    for handle, losses in state.suspicion.num_losses.items():
        request = state.requests.by_handle.get(handle)
        if request is None or request.status is FINISHED or losses < 1:
            raise broken("L14", f"handle {handle} is suspected for {losses} lost workers")


def _check_encoder(state: State) -> None:
    cache = state.encoder
    if cache.used != sum(cache.sizes.values()) or cache.used > cache.capacity:
        raise broken("L13", f"{cache.used} of {cache.capacity} embeddings counted, {sum(cache.sizes.values())} held")
    users: dict[str, set[int]] = {digest: set() for digest in cache.sizes}
    for r in state.requests.by_handle.values():
        if r.media_held:
            for index in r.media_held:
                users.setdefault(r.media[index].digest, set()).add(r.handle)
    if users != cache.users:
        raise broken("L13", f"encoder entries used by {cache.users}, requests hold {users}")
    if not users and not cache.evictable:
        return
    unused = {digest for digest, handles in users.items() if not handles}
    if cache.evictable.keys() != unused:
        raise broken("L13", f"evictable {sorted(cache.evictable)}, unused {sorted(unused)}")
