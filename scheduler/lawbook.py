"""The law book: laws that need a memory.

It follows a journal event by event beside the fold, keeps its own account of steps, outputs and block contents, and
compares. It shares no state with the appliers that it judges. It names a block's content by an identity of its own making,
so that a hash that leaves something out is found out by the first request that shares what isn't its own. A block is proved
once, when its hash is first seen; the account of a request that has ended is let go at the next check.
"""

from collections.abc import Callable
from typing import Any

from refold.journal.events import (
    CacheReset,
    ContentRedacted,
    EngineOpened,
    Event,
    LogprobsDelivered,
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
    WorkerLost,
)
from refold.projections.requests import Request
from refold.scheduler.lawbook_accounts import Account, Written
from refold.scheduler.laws import broken, check_state
from refold.scheduler.redaction import owners_of_known
from refold.scheduler.state import State, digest


class LawBook:
    """Follows a journal beside the fold and raises at the first event that breaks a law.

    `observe(state, event)` is called after `event` was folded into `state`; it is `follow` and `check` in one. Each event
    must be followed; whoever can't afford every check may check now and then. `num_checks` counts checks.

    Where tokens were erased, L4 isn't judged until the record that says so; `num_erased_digests` counts where L11 isn't.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self.num_erased_digests = 0
        self._unresolved: dict[int, list[int]] = {}
        self._writing: dict[int, set[int]] = {}
        self._next_step = 0
        self._accounts: dict[int, Account] = {}
        self._finished: set[int] = set()
        self._ended_since_check: list[Account] = []
        self._content: dict[int, Written] = {}
        self._proved: dict[bytes, int] = {}
        self._proved_hashes: dict[int, bytes] = {}
        self._identities: dict[int, bytes] = {}
        self._watchers: dict[type[Event], Callable[[State, Any], None]] = {
            EngineOpened: self._opened,
            RequestSubmitted: self._submitted,
            SessionExtended: self._extended,
            SessionTurnEnded: self._turn_ended,
            StepScheduled: self._scheduled,
            OutputDelivered: self._delivered,
            StaleOutputConsumed: self._stale,
            LogprobsDelivered: self._logprobs,
            RequestFinished: self._ended,
            WorkerLost: self._worker_lost,
            CacheReset: lambda *_: self._forget_content(),
            ContentRedacted: self._redacted,
            StateDigest: self._digested,
        }

    def observe(self, state: State, event: Event) -> None:
        """Judge one event and the state after it.

        Raises:
            InvariantViolation: a law is broken; the message names it.
        """
        self.follow(state, event)
        self.check(state)

    def follow(self, state: State, event: Event) -> None:
        """Account for one event, and judge what it says itself.

        Raises:
            InvariantViolation: a law is broken; the message names it.
        """
        watch = self._watchers.get(type(event))
        if watch is not None:
            watch(state, event)

    def check(self, state: State) -> None:
        """Judge the state as it is.

        Raises:
            InvariantViolation: a law is broken; the message names it.
        """
        self.num_checks += 1
        if self._proved != state.pool.block_by_hash and not state.unknown:
            self._check_published(state)
        if self._ended_since_check:
            for account in self._ended_since_check:
                account.let_go()
            self._ended_since_check.clear()
        check_state(state)

    def output_tokens(self, handle: int) -> list[int]:
        """What the journal delivered to a request so far, over all turns."""
        return self._accounts[handle].outputs

    # -- what each event must say -------------------------------------------------------------------------------------

    def _submitted(self, state: State, event: RequestSubmitted) -> None:  # noqa: ARG002
        if event.handle in self._accounts:
            raise broken("L9", f"handle {event.handle} was used before")
        self._accounts[event.handle] = Account(event)

    def _extended(self, state: State, event: SessionExtended) -> None:
        account = self._accounts[event.handle]
        account.chunks.append(event.token_ids)
        if account.is_idle:
            self._begin_turn(state, account)

    def _turn_ended(self, state: State, event: SessionTurnEnded) -> None:
        account = self._accounts[event.handle]
        if event.num_output_tokens != len(account.context) - account.turn_start:
            raise broken(
                "L5", f"handle {event.handle}: a turn of {event.num_output_tokens} outputs ended, others were seen"
            )
        account.is_idle = True
        if account.chunks:
            self._begin_turn(state, account)

    def _begin_turn(self, state: State, account: Account) -> None:
        account.is_idle = False
        del account.context[-1]
        account.forget_chain()
        account.context += account.chunks.popleft()
        account.turn_start = len(account.context)
        request = state.requests.by_handle[account.submitted.handle]
        size = state.pool.block_size
        for index, block in enumerate(request.block_ids):
            content = self._content[block]
            if content.handle == request.handle:
                content.places &= (1 << min(max(request.num_computed_tokens - index * size, 0), size)) - 1

    def _scheduled(self, state: State, event: StepScheduled) -> None:
        if event.step != self._next_step:
            raise broken("L1", f"step {event.step} scheduled, {self._next_step} is next")
        self._next_step += 1
        self._unresolved[event.step] = list(event.handles)
        gone = [h for h in event.handles if h in self._finished]
        if gone:
            raise broken("L9", f"finished handles {gone} scheduled in step {event.step}")
        total, limit = sum(event.num_tokens), state.config.max_num_batched_tokens
        if not total <= limit:
            raise broken("L8", f"step {event.step} has {total} tokens, budget {limit}")
        if not min(event.num_tokens) >= 1:
            raise broken("L8", f"step {event.step} has an entry without tokens")
        if not len(set(event.handles)) == len(event.handles):
            raise broken("L8", f"step {event.step} names a request twice")
        depth = len(self._unresolved)
        if not depth <= state.config.max_in_flight_steps:
            raise broken("L8", f"{depth} steps in flight")
        self._check_taken(event)
        again, size, by_handle = state.config.speculation != "off", state.pool.block_size, state.requests.by_handle
        writing = self._writing[event.step] = set()
        contents = self._content
        for handle, n, first in zip(event.handles, event.num_tokens, event.first_positions, strict=True):
            request, index = by_handle[handle], first // size
            if (
                n == 1 and index < len(request.block_ids) and not again
            ):  # the steady decode, where it is most of the work
                content = contents.get(request.block_ids[index])
                place = 1 << (first - index * size)
                is_own = content is not None and content.handle == handle and content.index == index
                if content is not None and is_own and not content.places & place:
                    content.places |= place
                    writing.add(request.block_ids[index])
                    continue
            self._write(request, first, first + n, size, writing, again=again)
        for admission in event.admissions if not state.unknown else ():
            self._check_shared(event.handles[admission.entry], admission.hit_block_ids, size)

    def _check_shared(self, handle: int, hit_block_ids: list[int], size: int) -> None:
        """What a request shares is what it would have computed: same tokens, same prefix, salt, adapter and media."""
        account = self._accounts[handle]
        for index, block in enumerate(hit_block_ids):
            held = self._identities.get(block)
            if held is None:
                content = self._content.get(block)
                if content is None:
                    raise broken("L4", f"handle {handle} shares block {block}, which was never written")
                held = self._accounts[content.handle].chain(content.index, size)[1]
            if held != account.chain(index, size)[1]:
                raise broken("L4", f"handle {handle} shares block {block}, which holds another content")

    def _check_taken(self, event: StepScheduled) -> None:
        """A block that is taken is forgotten, and no step in flight may still write it."""
        for allocation in event.allocations:
            for block in allocation.block_ids:
                self._content.pop(block, None)
                self._identities.pop(block, None)
                if block in self._proved_hashes:
                    del self._proved[self._proved_hashes.pop(block)]
                late = [step for step, blocks in self._writing.items() if block in blocks]
                if late:
                    raise broken("L3", f"block {block} is taken in step {event.step}, steps {late} still write it")

    def _write(self, request: Request, start: int, end: int, size: int, writing: set[int], *, again: bool) -> None:
        """A position is written once, into the request's own block; again only where drafts may have been rejected."""
        block_ids, contents, handle = request.block_ids, self._content, request.handle
        while start < end:
            index = start // size
            stop = (index + 1) * size
            stop = stop if stop < end else end
            if index >= len(block_ids):
                raise broken("L8", f"{request.request_id} has no block for {start}")
            block = block_ids[index]
            content = contents.get(block)
            if content is None:
                content = contents[block] = Written(handle, index)
            places = ((1 << (stop - start)) - 1) << (start - index * size)
            mine = content.handle == handle and content.index == index
            if not mine or (content.places & places and not again):
                raise broken(
                    "L4", f"{request.request_id} writes positions {start}..{stop - 1} into block {block} a second time"
                )
            content.places |= places
            writing.add(block)
            start = stop

    def _delivered(self, state: State, event: OutputDelivered) -> None:
        self._settle(event.step, event.handles)
        if not event.counts and state.config.speculation == "off":
            self._delivered_one_each(state, event)
            return
        counts = event.counts or [1] * len(event.handles)
        offset = 0
        for handle, count, index in zip(event.handles, counts, event.first_output_indices, strict=True):
            self._append(handle, event.token_ids[offset : offset + count], index)
            offset += count
            self._check_context(state, handle)
            if count and state.config.speculation != "off":
                self._settle_places(state, handle, count)

    def _delivered_one_each(self, state: State, event: OutputDelivered) -> None:
        """The same, of a steady decode."""
        accounts, finished, by_handle = self._accounts, self._finished, state.requests.by_handle
        for handle, token, index in zip(event.handles, event.token_ids, event.first_output_indices, strict=True):
            account = accounts[handle]
            if index != len(account.outputs) or handle in finished:
                self._append(handle, [token], index)
            account.context.append(token)
            account.outputs.append(token)
            if len(by_handle[handle].tokens) != len(account.context):
                self._check_context(state, handle)

    def _settle_places(self, state: State, handle: int, count: int) -> None:
        """What was rejected is not written: of this request, all but the last known token is, and that one if it is in flight."""
        request, size = state.requests.by_handle[handle], state.pool.block_size
        known = len(self._accounts[handle].context)
        certain = known if any(handle in handles for handles in self._unresolved.values()) else known - 1
        for index in range(max(known - 1 - count, 0) // size, len(request.block_ids)):
            content = self._content.get(request.block_ids[index])
            if content is not None and content.handle == handle:
                places = (1 << min(max(certain - index * size, 0), size)) - 1
                before = min(max(known - 1 - count - index * size, 0), size)
                content.places = (content.places & ((1 << before) - 1)) | (places & ~((1 << before) - 1))

    def _stale(self, state: State, event: StaleOutputConsumed) -> None:
        self._settle(event.step, event.handles)
        offset = 0
        for i, (handle, count) in enumerate(zip(event.handles, event.counts, strict=True)):
            tokens = event.token_ids[offset : offset + count]
            offset += count
            if event.delivered[i]:
                self._append(handle, tokens, event.first_output_indices[i])
                self._check_context(state, handle)

    def _logprobs(self, state: State, event: LogprobsDelivered) -> None:  # noqa: ARG002
        """Log-probabilities are those of the last tokens that their request got."""
        for handle, count, first in zip(event.handles, event.counts, event.first_output_indices, strict=True):
            if handle in self._finished:
                raise broken("L9", f"handle {handle} got log-probabilities after its end")
            outputs = len(self._accounts[handle].outputs)
            if first + count != outputs:
                raise broken(
                    "L5", f"handle {handle}: log-probabilities up to output {first + count}, {outputs} delivered"
                )

    def _settle(self, step: int, handles: list[int]) -> None:
        oldest = min(self._unresolved, default=-1)
        if step != oldest:
            raise broken("L1", f"output of step {step}, {oldest} is the oldest in flight")
        if self._unresolved[step] == handles:
            self._unresolved[step] = []
        for handle in handles if self._unresolved[step] else ():
            if handle not in self._unresolved[step]:
                raise broken("L1", f"handle {handle} resolved twice in step {step}")
            self._unresolved[step].remove(handle)
        if not self._unresolved[step]:
            del self._unresolved[step], self._writing[step]

    def _append(self, handle: int, tokens: list[int], index: int) -> None:
        account = self._accounts[handle]
        if tokens and handle in self._finished:
            raise broken("L9", f"handle {handle} got output after its end")
        if index != len(account.outputs):
            raise broken("L5", f"handle {handle}: output index {index} delivered, {len(account.outputs)} is next")
        account.context += tokens
        account.outputs += tokens

    def _check_context(self, state: State, handle: int) -> None:
        request = state.requests.by_handle.get(handle)
        if request is not None and len(request.tokens) != len(self._accounts[handle].context):
            raise broken("L5", f"{request.request_id} holds {len(request.tokens)} tokens, the journal tells otherwise")

    def _ended(self, state: State, event: RequestFinished) -> None:  # noqa: ARG002
        if event.handle in self._finished:
            raise broken("L9", f"handle {event.handle} finished twice")
        self._finished.add(event.handle)
        self._ended_since_check.append(self._accounts[event.handle])
        outputs = len(self._accounts[event.handle].outputs)
        if outputs != event.num_output_tokens:
            raise broken("L5", f"handle {event.handle} finished with {event.num_output_tokens} outputs, {outputs} seen")

    def _opened(self, state: State, event: EngineOpened) -> None:  # noqa: ARG002
        for account in self._accounts.values():
            account.forget_chain()

    def _worker_lost(self, state: State, event: WorkerLost) -> None:  # noqa: ARG002
        lost = sorted(self._unresolved)
        if event.steps != lost:
            raise broken("L1", f"steps {event.steps} lost, {lost} were in flight")
        self._unresolved.clear()
        self._writing.clear()
        self._forget_content()

    def _forget_content(self) -> None:
        self._content.clear()
        self._forget_proofs()

    def _forget_proofs(self) -> None:
        self._proved.clear()
        self._proved_hashes.clear()
        self._identities.clear()

    def _redacted(self, state: State, event: ContentRedacted) -> None:  # noqa: ARG002
        self._forget_proofs()
        for block, place in owners_of_known(state).items():
            self._content[block].handle, self._content[block].index = place

    def _digested(self, state: State, event: StateDigest) -> None:
        if not event.digest:
            self.num_erased_digests += 1
            return
        actual = digest(state)
        if actual != event.digest:
            raise broken("L11", f"recorded {event.digest[:16]}, folded {actual[:16]}")

    # -- L4: what is published was computed ---------------------------------------------------------------------------

    def _check_published(self, state: State) -> None:
        size, proved = state.pool.block_size, self._proved
        for content_hash, block in state.pool.block_by_hash.items():
            if proved.get(content_hash) == block:
                continue
            content = self._content.get(block)
            if content is None:
                raise broken("L4", f"block {block} is published and was never written")
            if content.places != (1 << size) - 1:
                raise broken(
                    "L4", f"block {block} is published with {content.places.bit_count()} of {size} places written"
                )
            expected, identity = self._accounts[content.handle].chain(content.index, size)
            if expected != content_hash:
                raise broken("L4", f"block {block} is published under another content's hash")
            proved[content_hash] = block
            self._proved_hashes[block] = content_hash
            self._identities[block] = identity
        if len(proved) != len(state.pool.block_by_hash):
            gone = proved.keys() - state.pool.block_by_hash.keys()
            raise broken("L4", f"blocks {sorted(proved[h] for h in gone)} are published no more and were not taken")
