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
    _check_requests(state)
    _check_blocks(state)
    _check_queues(state)
    _check_encoder(state)
    if state.suspicion.num_losses:
        _check_suspicion(state)
    if state.is_quiescent:
        free = state.pool.num_free
        if free != state.pool.num_blocks:
            raise broken("L10", f"{free} of {state.pool.num_blocks} blocks free")


def _check_requests(state: State) -> None:
    """Each request's counters are the sums over the window, and it is as its status says."""
    sums, config, block_size = _sums_in_flight(state), state.opened_config, state.pool.block_size
    hashed_block_size = block_size if config is not None and config.enable_prefix_caching else 0
    for handle, r in state.requests.by_handle.items():
        placeholders, in_flight, drafts = r.num_output_placeholders, r.num_in_flight_tokens, r.num_drafts_in_flight
        kept = [in_flight, r.num_stale_output_tokens, r.num_deliverable_stale_tokens, placeholders, placeholders - drafts]
        if kept != sums.get(handle, _NOTHING):
            raise broken("L2", f"{r.request_id}: {kept} kept, {sums.get(handle, _NOTHING)} summed")
        known, status = len(r.tokens), r.status
        if status is RUNNING:
            if not r.num_computed_tokens <= known + placeholders <= r.max_total_tokens <= state.config.max_model_len:
                raise broken("L8", f"{r.request_id} overruns")
            if r.num_computed_tokens < r.plain_until and not _is_plain(r, state):
                raise broken(
                    "L15", f"{r.request_id} at {r.num_computed_tokens} is said to be plain until {r.plain_until}"
                )
        elif placeholders or drafts or r.drafts or not _may_hold(r):
            raise broken("L7", f"{r.request_id} is {r.status} with {r.num_computed_tokens} computed tokens")
        elif status is FINISHED:
            if not in_flight:
                raise broken("L9", f"{r.request_id} finished, drained and still kept")
            continue
        if hashed_block_size and len(r.block_hashes) != known // hashed_block_size:
            raise broken("L16", f"{r.request_id}: {len(r.block_hashes)} hashes of {known} tokens")


_NOTHING = [0, 0, 0, 0, 0]


def _sums_in_flight(state: State) -> dict[int, list[int]]:
    """By handle: tokens in flight, stale ones, those of them to be delivered, placeholders, samples."""
    by_handle, sums = state.requests.by_handle, {}
    for step in state.window.in_flight:
        stale, chunks, delivered, epochs, num_drafts = (
            step.stale,
            step.chunk_entries,
            step.delivered,
            step.epochs,
            step.num_drafts,
        )
        for entry, (handle, n) in enumerate(zip(step.handles, step.num_tokens, strict=True)):
            request = by_handle.get(handle)
            if request is None:
                raise broken("L1", f"step {step.step} in flight names unknown handle {handle}")
            row = sums.get(handle)
            if row is None:
                row = sums[handle] = [0, 0, 0, 0, 0]
            is_stale = epochs[entry] < request.epoch
            if is_stale != (entry in stale):
                raise broken("L2", f"{request.request_id} in step {step.step}: the stale mark contradicts the epoch")
            if is_stale:
                row[0] += n
                row[1] += n
                row[2] += n * (stale[entry] == "deliver")
            elif not delivered:
                row[0] += n
                if entry not in chunks:
                    row[3] += 1 + (num_drafts[entry] if num_drafts else 0)
                    row[4] += 1
    return sums


def _check_blocks(state: State) -> None:
    pool, requests = state.pool, state.requests.by_handle.values()
    owners = [0] * pool.num_blocks
    for request in requests:
        for block in request.block_ids:
            owners[block] += 1
    if owners != pool.ref_counts:
        raise broken("L3", f"owners {owners}, reference counts {pool.ref_counts}")
    fenced = [block for _, idle in pool.fences for block in idle] if pool.fences else []
    if pool.num_fenced != len(fenced):
        raise broken("L3", f"{pool.num_fenced} counted fenced, {len(fenced)} are")
    unowned = [*fenced, *pool.free_blank, *pool.free_cached]
    in_two = any(map(owners.__getitem__, unowned)) or len(set(unowned)) != len(unowned)
    if in_two or owners.count(0) != len(unowned):
        raise broken("L3", f"a block is in no place, or in two: fenced {fenced}, owners {owners}")
    if pool.runs or any([request.run for request in requests]):
        _check_runs(state)
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
    found, num_hashed = pool.block_by_hash, pool.num_blocks - pool.hashes.count(None)
    if len(found) != num_hashed:
        raise broken("L4", f"{len(found)} hashes found, {num_hashed} blocks hashed")
    if found and list(map(hashes.__getitem__, found.values())) != list(found):
        raise broken("L4", "a hash finds a block that doesn't carry it")
    if max(owners, default=0) > 1:
        bare = [block for block, count in enumerate(owners) if count > 1 and hashes[block] is None]
        if bare:
            raise broken("L3", f"blocks {bare} are shared and not hashed")
    blank, cached = pool.free_blank, pool.free_cached
    if (found and any(map(hashes.__getitem__, blank))) or (cached and not all(map(hashes.__getitem__, cached))):
        raise broken("L3", f"a free block is in the wrong list: {list(blank)}, {list(cached)}")


_STATUSES = {
    "running": frozenset((RUNNING,)),
    "waiting": frozenset((WAITING, PREEMPTED)),
    "idle": frozenset((IDLE,)),
}


def _check_queues(state: State) -> None:
    by_handle, queued = state.requests.by_handle, 0
    queues = state.queues
    for name, queue in (("running", queues.running), ("waiting", queues.waiting), ("idle", queues.idle)):
        last, statuses = None, _STATUSES[name]
        for r in queue:
            key = r.queue_key
            if r.status not in statuses:
                raise broken("L6", f"{r.request_id} is {r.status} and in {name}")
            if last is not None and key <= last:
                raise broken("L6", f"{name} is out of order at {r.request_id}")
            if by_handle.get(r.handle) is not r:
                raise broken("L6", f"{r.request_id} is in {name} and not in the table")
            last = key
        queued += len(queue)
    live = len(state.requests.live())
    if queued != live:
        raise broken("L6", f"{queued} requests are queued, {live} live")
    limit = state.config.max_num_seqs if state.was_opened else 0
    if len(queues.running) > limit:
        raise broken("L8", f"{len(queues.running)} running, limit {limit}")


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
    cache, holders = state.encoder, [r for r in state.requests.by_handle.values() if r.media_held]
    if not (holders or cache.sizes or cache.users or cache.evictable or cache.used):
        return
    if cache.used != sum(cache.sizes.values()) or cache.used > cache.capacity:
        raise broken("L13", f"{cache.used} of {cache.capacity} embeddings counted, {sum(cache.sizes.values())} held")
    users: dict[str, set[int]] = {digest: set() for digest in cache.sizes}
    for r in holders:
        for index in r.media_held:
            users.setdefault(r.media[index].digest, set()).add(r.handle)
    if users != cache.users:
        raise broken("L13", f"encoder entries used by {cache.users}, requests hold {users}")
    unused = {digest for digest, handles in users.items() if not handles}
    if cache.evictable.keys() != unused:
        raise broken("L13", f"evictable {sorted(cache.evictable)}, unused {sorted(unused)}")
