"""The simulated worker: a deterministic twin of the real one, without torch.

Its token is a hash of (request seed, position), so what a request must produce is known in advance, whatever the schedule
does. It keeps slots like the real worker (tokens, block table, length), rolls them forward with its own samples, and keeps
a KV cache of its own: each place of each block holds which token was computed into it at which position. Before it samples
it reads the whole context back through the block table. A scheduler that hands out a block twice, shares a block that was
never written, or forgets a rejected token is caught by what the worker reads, as a real model would silently not be.
"""

import time
from itertools import chain, islice

from refold.gpu.batch import AdmittedRequest, StepOutput, WorkOrder
from refold.journal.events import EngineConfig, Sampling
from refold.journal.surprisals import EntrySurprisals

_MASK = (1 << 64) - 1


def simulated_token(sampling: Sampling, position: int, num_prompt_tokens: int, config: EngineConfig) -> int:
    """The token that a request has at `position`, a pure function of its seed. Stop tokens are masked until `min_tokens`, unless that leaves none."""
    token = _mix((sampling.seed << 20) ^ position)
    if position - num_prompt_tokens >= sampling.min_tokens:
        return token % config.vocab_size
    eos = () if sampling.ignore_eos else config.eos_token_ids
    masked = {*sampling.stop_token_ids, *eos}
    if len(masked) >= config.vocab_size:
        return token % config.vocab_size
    while token % config.vocab_size in masked:
        token = _mix(token)
    return token % config.vocab_size


def simulated_surprisals(seed: int, position: int, token_id: int, num_top: int, vocab_size: int) -> list[int]:
    """What a model could have thought of a token, a pure function of all that; see `refold.journal.surprisals`.

    The token is among the three likeliest; the less likely, the more surprising.
    """
    noise = _mix((seed << 21) ^ position)
    rank = 1 + noise % min(3, vocab_size)
    surprisals = [1 + (noise >> 8) % 500_000 + place * (1 + (noise >> 32) % 900_000) for place in range(20)]
    others = [other % vocab_size for other in range(token_id + 1, token_id + vocab_size)]
    top = [*others[: rank - 1], token_id, *others[rank - 1 :]][: min(num_top, vocab_size)]
    return [rank, surprisals[rank - 1], *(n for pair in zip(top, surprisals, strict=False) for n in pair)]


def _mix(x: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class _Slot:
    """What the worker knows of one running request."""

    __slots__ = ("block_ids", "num_computed", "num_prompt_tokens", "sampling", "tokens")

    def __init__(self, admitted: AdmittedRequest, num_computed: int) -> None:
        self.tokens = list(admitted.token_ids)
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.sampling = admitted.sampling
        self.block_ids = list(admitted.hit_block_ids)
        self.num_computed = num_computed


class SimulatedWorker:
    """See the module's text. `step_seconds` is how long a step takes; `check_context` reads the context back.

    `draft_acceptance` is the share of its own drafts that turn out right.
    """

    kind = "simulated"

    def __init__(
        self,
        config: EngineConfig,
        step_seconds: float = 0.0,
        *,
        check_context: bool = True,
        draft_acceptance: float = 0.7,
    ) -> None:
        self._config = config
        self._step_seconds = step_seconds
        self._check_context = check_context
        self._draft_threshold = int(draft_acceptance * _MASK)
        self._slots: dict[int, _Slot] = {}
        self._content: list[list[tuple[int, int]]] = [[(-1, -1)] * config.block_size for _ in range(config.num_blocks)]

    def environment(self) -> dict[str, str]:
        """Nothing that its numbers depend on varies."""
        return {"device": "none", "worker": "simulated"}

    def execute(self, order: WorkOrder) -> StepOutput:
        """Run one step."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        self._take_over(order)
        scheduled = order.scheduled
        chunks = frozenset(scheduled.chunk_entries)
        num_drafts = scheduled.num_drafts or [0] * len(scheduled.handles)
        given = {drafts.entry: drafts.token_ids for drafts in scheduled.drafts}
        drafts: list[list[int]] = []
        for entry, (handle, n, first) in enumerate(
            zip(scheduled.handles, scheduled.num_tokens, scheduled.first_positions, strict=True)
        ):
            slot, count = self._slots[handle], num_drafts[entry]
            drafts.append(given[entry] if entry in given else self._propose(slot, count))
            assert len(drafts[-1]) == count, (handle, count)
            self._write(slot, first, n - count, drafts[-1])
        counts, token_ids, positions = [], [], []
        for entry, handle in enumerate(scheduled.handles):
            slot = self._slots[handle]
            sampled = [] if entry in chunks else self._sample(slot, drafts[entry])
            counts.append(len(sampled))
            positions.append(len(slot.tokens) - len(sampled) if sampled else -1)
            token_ids += sampled
        return StepOutput(
            step=scheduled.step,
            generation=order.generation,
            counts=counts,
            token_ids=token_ids,
            positions=positions,
            logprobs=self._logprobs(scheduled.handles, counts),
            prompt_logprobs=self._prompt_logprobs(scheduled.handles, positions),
        )

    def close(self) -> None:
        """Forget everything."""
        self._slots.clear()

    def _take_over(self, order: WorkOrder) -> None:
        for handle in order.released:
            self._slots.pop(handle, None)
        for admitted in order.admitted:
            self._slots[admitted.handle] = _Slot(admitted, order.scheduled.first_positions[admitted.entry])
        for allocation in order.scheduled.allocations:
            slot = self._slots[order.scheduled.handles[allocation.entry]]
            slot.block_ids.extend(allocation.block_ids)

    def _propose(self, slot: _Slot, count: int) -> list[int]:
        """Drafts of its own: the right token, or a wrong one, as the request's seed and the position have it."""
        drafts = []
        for position in range(len(slot.tokens), len(slot.tokens) + count):
            right = self._token(slot, position)
            is_right = _mix((slot.sampling.seed << 24) ^ position ^ _MASK) <= self._draft_threshold
            drafts.append(right if is_right else (right + 1) % self._config.vocab_size)
        return drafts

    def _write(self, slot: _Slot, first: int, n: int, drafts: list[int]) -> None:
        """Compute `n` known positions, then the drafts, into the cache.

        The scheduler's `first` is as if all drafts in flight were accepted; the worker knows better.
        """
        start = slot.num_computed
        assert start <= first, (start, first)
        assert start == first or self._config.speculation != "off", (start, first)
        assert start + n <= len(slot.tokens), (start, n, len(slot.tokens))
        assert not drafts or start + n == len(slot.tokens), (start, n, len(slot.tokens))
        for position, token in enumerate([*slot.tokens[start : start + n], *drafts], start):
            block = slot.block_ids[position // self._config.block_size]
            self._content[block][position % self._config.block_size] = (position, token)
        slot.num_computed += n

    def _sample(self, slot: _Slot, drafts: list[int]) -> list[int]:
        """Verify the drafts, then one token more."""
        assert slot.num_computed == len(slot.tokens), (slot.num_computed, len(slot.tokens))
        if self._check_context:
            self._read_back(slot)
        sampled: list[int] = []
        for draft in (*drafts, -1):
            token = self._token(slot, len(slot.tokens))
            slot.tokens.append(token)
            sampled.append(token)
            if token != draft:
                break
            slot.num_computed += 1
        return sampled

    def _token(self, slot: _Slot, position: int) -> int:
        return simulated_token(slot.sampling, position, slot.num_prompt_tokens, self._config)

    def _logprobs(self, handles: list[int], counts: list[int]) -> list[EntrySurprisals]:
        told = []
        for entry, handle in enumerate(handles):
            slot = self._slots[handle]
            if slot.sampling.logprobs is not None and counts[entry]:
                known = len(slot.tokens)
                told.append(self._told(entry, slot, range(known - counts[entry], known), slot.sampling.logprobs))
        return told

    def _prompt_logprobs(self, handles: list[int], positions: list[int]) -> list[EntrySurprisals]:
        told = []
        for entry, handle in enumerate(handles):
            slot = self._slots[handle]
            if slot.sampling.prompt_logprobs is not None and positions[entry] == slot.num_prompt_tokens:
                prompt = range(1, slot.num_prompt_tokens)
                told.append(self._told(entry, slot, prompt, slot.sampling.prompt_logprobs))
        return told

    def _told(self, entry: int, slot: _Slot, positions: range, num_top: int) -> EntrySurprisals:
        size, seed = self._config.vocab_size, slot.sampling.seed
        numbers = chain.from_iterable(
            simulated_surprisals(seed, position, slot.tokens[position], num_top, size) for position in positions
        )
        return EntrySurprisals(entry=entry, num_top=min(num_top, size), surprisals=list(numbers))

    def _read_back(self, slot: _Slot) -> None:
        places = chain.from_iterable(map(self._content.__getitem__, slot.block_ids))
        content, known = list(islice(places, len(slot.tokens))), list(enumerate(slot.tokens))
        assert content == known, f"blocks {slot.block_ids} hold {content}, not {known}"
