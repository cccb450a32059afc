"""Drives a worker with hand-built orders: naive block allocation, any batch composition, no scheduler.

It knows a request as a scheduler would (its tokens, how far it is computed, its blocks) and never tells the worker a token
after admission: what a worker continues with are its own samples.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from refold.gpu.batch import AdmittedRequest, StepOutput, Worker, WorkOrder
from refold.journal.events import Admission, BlockAllocation, Drafts, EngineConfig, Sampling, StepScheduled


class Request:
    """A request as its driver knows it."""

    def __init__(self, handle: int, prompt: Sequence[int], sampling: Sampling) -> None:
        self.handle = handle
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        self.sampling = sampling
        self.computed = 0
        self.blocks: list[int] = []
        self.epoch = 0
        self.reserved: list[int] = []
        self.admitted = False

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def wanted(self) -> int:
        return self.sampling.max_tokens - len(self.outputs)


class WorkerDriver:
    """Makes orders, keeps the books, checks what comes back."""

    def __init__(self, worker: Worker, config: EngineConfig, *, seed: int = 0) -> None:
        self.worker = worker
        self.config = config
        self.requests: dict[int, Request] = {}
        self.owners: Counter[int] = Counter()
        self.released: list[int] = []
        self.steps = 0
        self.random = random.Random(seed)
        self._free = list(range(config.num_blocks))
        self.random.shuffle(self._free)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        request = Request(len(self.requests), prompt, sampling)
        self.requests[request.handle] = request
        return request

    def share(self, request: Request, other: Request, num_blocks: int) -> None:
        """Let a request that is not admitted yet start with the first blocks of another."""
        assert not request.blocks
        assert num_blocks * self.config.block_size < len(request.tokens)
        request.blocks = other.blocks[:num_blocks]
        request.computed = num_blocks * self.config.block_size
        self.owners.update(request.blocks)

    def reserve(self, request: Request) -> None:
        """Give a request the blocks for all its tokens before the step that computes them."""
        request.reserved = self._allocate(request, len(request.tokens))

    def drop(self, request: Request) -> None:
        """Take a request's slot and blocks away; its next step admits it anew, to be computed from the start."""
        self.released.append(request.handle)
        for block in request.blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self._free.append(block)
        request.blocks, request.computed, request.admitted = [], 0, False
        request.epoch += 1

    def order(
        self, entries: Sequence[tuple[Request, int]], drafts: Mapping[int, Sequence[int] | int] | None = None
    ) -> WorkOrder:
        """The order for `entries` (request, tokens to compute), with admissions and blocks as needed. Books are updated.

        `drafts` by entry, behind those tokens: ids to verify, or how many of its own the worker may verify.
        """
        guesses = drafts or {}
        counts = {entry: each if isinstance(each, int) else len(each) for entry, each in guesses.items()}
        num_drafts = [counts.get(entry, 0) for entry in range(len(entries))]
        firsts = [request.computed for request, _ in entries]
        admitted, admissions, allocations, chunks = [], [], [], []
        for entry, (request, count) in enumerate(entries):
            if not request.admitted:
                hits = [block for block in request.blocks if block not in request.reserved]
                admissions.append(Admission(entry=entry, epoch=request.epoch, hit_block_ids=hits))
                admitted.append(self._slot(entry, request, hits))
                request.admitted = True
            blocks = request.reserved + self._allocate(request, request.computed + count + num_drafts[entry])
            request.reserved = []
            if blocks:
                allocations.append(BlockAllocation(entry=entry, block_ids=blocks))
            request.computed += count
            if request.computed < len(request.tokens):
                chunks.append(entry)
        scheduled = StepScheduled(
            step=self.steps,
            handles=[request.handle for request, _ in entries],
            num_tokens=[count + more for (_, count), more in zip(entries, num_drafts, strict=True)],
            first_positions=firsts,
            chunk_entries=chunks,
            admissions=admissions,
            allocations=allocations,
            num_drafts=num_drafts if any(num_drafts) else [],
            drafts=[
                Drafts(entry=entry, token_ids=list(ids)) for entry, ids in guesses.items() if not isinstance(ids, int)
            ],
        )
        released, self.released = self.released, []
        self.steps += 1
        return WorkOrder(generation=1, scheduled=scheduled, admitted=admitted, released=released)

    def step(
        self, entries: Sequence[tuple[Request, int]], drafts: Mapping[int, Sequence[int] | int] | None = None
    ) -> StepOutput:
        """Order, execute, check the form of the output, take its tokens over. `drafts` as in `order`."""
        order = self.order(entries, drafts)
        num_drafts = order.scheduled.num_drafts or [0] * len(entries)
        output = self.worker.execute(order)
        assert (output.step, output.generation) == (order.scheduled.step, 1)
        assert len(output.counts) == len(output.positions) == len(entries)
        tokens = iter(output.token_ids)
        for entry, (request, _) in enumerate(entries):
            if entry in order.scheduled.chunk_entries:
                assert (output.counts[entry], output.positions[entry]) == (0, -1)
                continue
            assert output.positions[entry] == len(request.tokens)
            assert 1 <= output.counts[entry] <= 1 + num_drafts[entry]
            request.tokens += [next(tokens) for _ in range(output.counts[entry])]
            request.computed = len(request.tokens) - 1
        assert next(tokens, None) is None, "more tokens than counts"
        return output

    def run_alone(self, request: Request) -> list[int]:
        """The whole prompt in one step, then one token a step; the slot is given back."""
        while request.wanted:
            self.step([(request, len(request.tokens) - request.computed)])
        self.drop(request)
        return request.outputs

    def run_random(self, *, budget: int, drop_rate: float = 0.0) -> int:
        """Run all requests to their end in random batches, orders and chunk sizes. Returns how many were dropped."""
        drops = 0
        while waiting := [request for request in self.requests.values() if request.wanted]:
            batch = self.random.sample(waiting, self.random.randint(1, len(waiting)))
            entries = []
            left = budget
            for request in batch:
                if request.admitted and self.random.random() < drop_rate:
                    self.drop(request)
                    drops += 1
                behind = len(request.tokens) - request.computed
                count = min(behind, left, self.random.randint(1, budget))
                if count:
                    entries.append((request, count))
                    left -= count
            self.step(entries)
        return drops

    def _slot(self, entry: int, request: Request, hits: list[int]) -> AdmittedRequest:
        return AdmittedRequest(
            entry=entry,
            handle=request.handle,
            epoch=request.epoch,
            token_ids=list(request.tokens),
            num_prompt_tokens=len(request.prompt),
            sampling=request.sampling,
            hit_block_ids=hits,
        )

    def _allocate(self, request: Request, num_tokens: int) -> list[int]:
        needed = -(-num_tokens // self.config.block_size) - len(request.blocks)
        blocks = [self._free.pop() for _ in range(max(0, needed))]
        self.owners.update(blocks)
        request.blocks += blocks
        return blocks
