"""The torch worker: executes work orders on a Llama with a paged cache.

It holds a slot for each running request and rolls it forward with its own samples, so a step may be ordered before the
output of the one before it has been read. Every order is checked against the slots before anything is computed: an order
that doesn't fit means that scheduler and worker have drifted apart, and a worker that has drifted is lost.

With speculation an entry's last tokens are drafts: guesses at what follows the known tokens, the scheduler's or the worker's own.
All are computed in the one forward pass, each with logits of its own, and a token is chosen at every place as if the drafts
before it were right. A draft is accepted if it is the token chosen in its place; from the first that isn't, what was computed
is void. Noise is a function of (seed, position) and a row's bits don't depend on how many rows there are, so what comes out is
what comes out without drafts. Keys and values of rejected drafts stay in their slots, behind every position that anyone
reads, until the tokens that belong there overwrite them.
"""

import platform
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from refold.gpu.batch import AdmittedRequest, StepOutput, WorkOrder
from refold.gpu.company import Room
from refold.gpu.digest import digest_rows
from refold.gpu.drafting import DraftIndex
from refold.gpu.logprobs import entry_surprisals, surprisals
from refold.gpu.model_runner import Entry, Runner
from refold.gpu.sampler import Draw, accepted_run, check_finite, choose_tokens, draws_behind
from refold.gpu.trusted_runner import trusted_runner
from refold.gpu.weights import ModelDescription, load_weights
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Sampling, StepScheduled
from refold.journal.surprisals import EntrySurprisals

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Slot:
    """A running request as its worker knows it: all tokens, the block table, and how far the cache reaches."""

    __slots__ = (
        "block_ids",
        "drafter",
        "num_computed_tokens",
        "num_prompt_tokens",
        "prompt_surprisals",
        "sampling",
        "token_ids",
    )

    def __init__(self, admitted: AdmittedRequest, num_computed_tokens: int) -> None:
        self.token_ids = list(admitted.token_ids)
        self.block_ids = list(admitted.hit_block_ids)
        self.num_computed_tokens = num_computed_tokens
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.sampling: Sampling = admitted.sampling
        self.drafter = DraftIndex()
        # None: nobody asks, or it was told with the first output.
        asks = admitted.sampling.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens
        self.prompt_surprisals: list[int] | None = [] if asks else None
        assert not asks or not num_computed_tokens, (
            f"handle {admitted.handle}: a prompt to tell of, and a part not computed"
        )


class _Planned(NamedTuple):
    """An entry of the order with the slot that it advances, up to `stop`; the drafts are for the positions from there on.

    `num_prompt_rows`: so many rows of logits come before those that it samples from, to tell of the prompt.
    """

    handle: int
    slot: Slot
    stop: int
    samples: bool
    drafts: list[int]
    num_prompt_rows: int


class TorchWorker:
    """A worker on the CPU. Not thread-safe: orders come one at a time."""

    kind = "torch"

    def __init__(
        self, config: EngineConfig, description: ModelDescription, *, threads: int | None = None, dtype: str = "float32"
    ) -> None:
        """Load the model. Raises Rejected if it is not the one that `config` was made for, or doesn't fit in memory.

        `threads` sets torch's thread count for the whole process; None leaves it as it is.
        """
        _check_model(config, description, dtype)
        if threads is not None:
            torch.set_num_threads(threads)
        self._config = config
        self._slots: dict[int, Slot] = {}
        room = Room(config.num_blocks, config.block_size, config.max_model_len)
        runner, facts = trusted_runner(description.spec, load_weights(description), room, DTYPES[dtype])
        self._runner: Runner | None = runner
        self._environment = {**_machine(), "dtype": dtype, "weights": description.fingerprint, **facts}

    def environment(self) -> dict[str, str]:
        """What the numbers depend on."""
        return dict(self._environment)

    def execute(self, order: WorkOrder) -> StepOutput:
        """Run one step to its end. Raises AssertionError for an order that doesn't fit, WorkerLost for bad numbers."""
        assert self._runner is not None, "the worker is closed"
        planned = self._plan(order)
        logits = _read_prompts(planned, self._runner.run([_entry(each) for each in planned]).numpy())
        draws = [draw for each in planned if each.samples for draw in _draws(each)]
        chosen = iter(choose_tokens(logits, draws, self._config.eos_token_ids))
        sampled = [self._advance(each, list(islice(chosen, _num_draws(each)))) for each in planned]
        digests = digest_rows(logits) if self._config.record_logits is True else []
        return StepOutput(
            step=order.scheduled.step,
            generation=order.generation,
            counts=[len(tokens) for tokens in sampled],
            token_ids=[token for tokens in sampled for token in tokens],
            positions=[each.stop if each.samples else -1 for each in planned],
            digests=_of_tokens(digests, planned, sampled) if digests else [],
            logprobs=_logprobs(planned, sampled, logits),
            prompt_logprobs=_prompt_logprobs(planned, self._config.vocab_size),
        )

    def _advance(self, planned: _Planned, chosen: list[int]) -> list[int]:
        """Roll a slot forward: returns what the entry sampled, the accepted drafts and the token behind them."""
        slot, vocab_size = planned.slot, self._config.vocab_size
        sampled = accepted_run(planned.drafts, chosen) if planned.samples else []
        for token in sampled:
            assert 0 <= token < vocab_size, f"sampled token {token} of {vocab_size}"
        slot.token_ids += sampled
        # What was sampled last is known, but not computed.
        slot.num_computed_tokens = len(slot.token_ids) - 1 if sampled else planned.stop
        return sampled

    def close(self) -> None:
        """Free weights and cache. Idempotent."""
        self._runner = None
        self._slots.clear()

    def _plan(self, order: WorkOrder) -> list[_Planned]:
        """Bring the slots up to date with the order, and check every entry against its slot."""
        scheduled = order.scheduled
        _check_columns(scheduled)
        for handle in order.released:
            self._slots.pop(handle, None)
        self._admit(order)
        for allocation in scheduled.allocations:
            self._extend(scheduled.handles[allocation.entry], allocation.block_ids)
        chunks = set(scheduled.chunk_entries)
        given = {drafts.entry: drafts.token_ids for drafts in scheduled.drafts}
        num_drafts = scheduled.num_drafts or [0] * len(scheduled.handles)
        columns = zip(scheduled.handles, scheduled.first_positions, scheduled.num_tokens, num_drafts, strict=True)
        return [self._planned(*column, given.get(entry), entry in chunks) for entry, column in enumerate(columns)]

    def _admit(self, order: WorkOrder) -> None:
        admissions = order.scheduled.admissions
        assert len(order.admitted) == len(admissions), f"{len(order.admitted)} slots for {len(admissions)} admissions"
        for admitted, admission in zip(order.admitted, admissions, strict=True):
            assert admitted.entry == admission.entry, f"slot of entry {admitted.entry} for entry {admission.entry}"
            assert admitted.epoch == admission.epoch, f"slot of epoch {admitted.epoch}, admission of {admission.epoch}"
            assert admitted.handle == order.scheduled.handles[admission.entry], f"entry {admission.entry}: wrong handle"
            hits, first = admission.hit_block_ids, order.scheduled.first_positions[admission.entry]
            assert not hits or admitted.hit_block_ids == hits, f"handle {admitted.handle}: hits differ"
            assert first <= len(admitted.hit_block_ids) * self._config.block_size, (
                f"handle {admitted.handle}: from {first}"
            )
            assert 0 <= admitted.num_prompt_tokens <= len(admitted.token_ids), (
                f"handle {admitted.handle}: prompt too long"
            )
            self._check_blocks(admitted.handle, admitted.hit_block_ids)
            self._slots[admitted.handle] = Slot(admitted, first)

    def _extend(self, handle: int, block_ids: list[int]) -> None:
        assert handle in self._slots, f"blocks for handle {handle}, which has no slot"
        self._check_blocks(handle, block_ids)
        self._slots[handle].block_ids += block_ids

    def _check_blocks(self, handle: int, block_ids: list[int]) -> None:
        for block_id in block_ids:
            assert 0 <= block_id < self._config.num_blocks, (
                f"handle {handle}: block {block_id} of {self._config.num_blocks}"
            )

    def _planned(
        self, handle: int, first: int, count: int, num_drafts: int, given: list[int] | None, chunk: bool
    ) -> _Planned:
        """Check an entry against its slot. `first` is as if all drafts in flight were accepted; the slot knows better."""
        slot = self._slots.get(handle)
        assert slot is not None, f"handle {handle} has no slot"
        known, start, is_exact = len(slot.token_ids), slot.num_computed_tokens, self._config.speculation == "off"
        stop = start + count - num_drafts
        assert start < stop, f"handle {handle}: {count} tokens scheduled, {num_drafts} of them drafts"
        assert start == first if is_exact else start <= first, f"handle {handle}: from {first}, but {start} computed"
        assert stop <= known, f"handle {handle}: up to {stop}, but {known} tokens known"
        assert chunk == (stop < known), f"handle {handle}: up to {stop} of {known} known tokens, chunk {chunk}"
        assert not (chunk and num_drafts), f"handle {handle}: {num_drafts} drafts behind a chunk"
        end = first + count
        assert end <= self._config.max_model_len, f"handle {handle}: up to {end} of {self._config.max_model_len}"
        room = len(slot.block_ids) * self._config.block_size
        assert end <= room, f"handle {handle}: up to {end}, but its blocks hold {room}"
        num_prompt_rows = 0 if slot.prompt_surprisals is None else stop - start - (not chunk)
        return _Planned(handle, slot, stop, not chunk, self._drafts(slot, num_drafts, given), num_prompt_rows)

    def _drafts(self, slot: Slot, count: int, given: list[int] | None) -> list[int]:
        """The scheduler's drafts, or up to `count` of the worker's own: a guess that it doesn't have costs no row."""
        if given is None:
            assert not count or self._config.speculation != "off", f"{count} drafts of nobody's"
            return slot.drafter.propose(slot.token_ids, count) if count else []
        assert len(given) == count, f"{len(given)} drafts given, {count} scheduled"
        assert all(0 <= draft < self._config.vocab_size for draft in given), f"drafts {given} are no tokens"
        return given


def _entry(planned: _Planned) -> Entry:
    slot = planned.slot
    first = slot.num_computed_tokens
    tokens = [*slot.token_ids[first : planned.stop], *planned.drafts]
    return Entry(tokens, first, slot.block_ids, planned.num_prompt_rows + _num_draws(planned))


def _num_draws(planned: _Planned) -> int:
    return 1 + len(planned.drafts) if planned.samples else 0


def _draws(planned: _Planned) -> list[Draw]:
    """One for each row of logits: the token behind the known ones, and the one behind each draft if all before it are right."""
    slot = planned.slot
    draw = Draw(planned.handle, planned.stop, slot.num_prompt_tokens, slot.sampling, slot.token_ids)
    return draws_behind(draw, planned.drafts)


def _of_tokens(digests: list[int], planned: list[_Planned], sampled: list[list[int]]) -> list[int]:
    """Of the digests of all rows of logits, those of rows that a token was chosen from: rows behind a rejected draft are void."""
    rows = iter(digests)
    kept = [list(islice(rows, _num_draws(each)))[: len(tokens)] for each, tokens in zip(planned, sampled, strict=True)]
    return [digest for of_entry in kept for digest in of_entry]


def _read_prompts(planned: list[_Planned], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Take note of what the logits say of prompts; returns the rows that tokens are sampled from."""
    if not any(each.num_prompt_rows for each in planned):
        return logits
    sampled: list[int] = []
    row = 0
    for each in planned:
        _read_prompt(each, logits[row : row + each.num_prompt_rows])
        row += each.num_prompt_rows
        sampled += range(row, row + _num_draws(each))
        row += _num_draws(each)
    return logits[sampled]


def _read_prompt(planned: _Planned, rows: NDArray[np.float32]) -> None:
    slot, top = planned.slot, planned.slot.sampling.prompt_logprobs
    if not len(rows) or slot.prompt_surprisals is None or top is None:
        return
    first = slot.num_computed_tokens + 1
    tokens = slot.token_ids[first : first + len(rows)]
    draws = [Draw(planned.handle, first + i, slot.num_prompt_tokens, slot.sampling) for i in range(len(rows))]
    check_finite(rows, draws)
    for row, token in zip(rows, tokens, strict=True):
        slot.prompt_surprisals += surprisals(row, token, top)


def _logprobs(planned: list[_Planned], sampled: list[list[int]], logits: NDArray[np.float32]) -> list[EntrySurprisals]:
    """What the rows that tokens were sampled from say of them, for those who ask."""
    told: list[EntrySurprisals] = []
    row = 0
    for entry, (each, tokens) in enumerate(zip(planned, sampled, strict=True)):
        top = each.slot.sampling.logprobs
        if tokens and top is not None:
            told.append(entry_surprisals(entry, logits[row : row + len(tokens)], tokens, top))
        row += _num_draws(each)
    return told


def _prompt_logprobs(planned: list[_Planned], vocab_size: int) -> list[EntrySurprisals]:
    """What is known of prompts that are computed to their end; told once."""
    told: list[EntrySurprisals] = []
    for entry, each in enumerate(planned):
        numbers, top = each.slot.prompt_surprisals, each.slot.sampling.prompt_logprobs
        if each.samples and numbers is not None and top is not None:
            told.append(EntrySurprisals(entry=entry, num_top=min(top, vocab_size), surprisals=numbers))
            each.slot.prompt_surprisals = None
    return told


def _check_columns(scheduled: StepScheduled) -> None:
    entries = len(scheduled.handles)
    assert entries > 0, f"step {scheduled.step} has no entries"
    assert not scheduled.encoder_inputs, f"step {scheduled.step} has media, which this worker can't encode"
    assert len(scheduled.num_tokens) == len(scheduled.first_positions) == entries, (
        f"step {scheduled.step}: ragged columns"
    )
    assert len(scheduled.num_drafts) in {0, entries}, f"step {scheduled.step}: {len(scheduled.num_drafts)} draft counts"
    assert len(set(scheduled.handles)) == entries, f"step {scheduled.step} names a handle twice"
    named = [*scheduled.chunk_entries, *(each.entry for each in scheduled.admissions)]
    named += [each.entry for each in scheduled.allocations] + [each.entry for each in scheduled.drafts]
    assert all(0 <= entry < entries for entry in named), f"step {scheduled.step}: entry out of {entries}"


def _check_model(config: EngineConfig, description: ModelDescription, dtype: str) -> None:
    if dtype not in DTYPES:
        raise Rejected(f"dtype {dtype!r} is unknown: name one of {', '.join(DTYPES)}")
    if description.fingerprint != config.model_fingerprint:
        raise Rejected(
            f"model {config.model!r} has fingerprint {description.fingerprint[:12]}, this engine was opened with "
            f"{config.model_fingerprint[:12]}: restore the old weights or start a new journal"
        )
    if config.vocab_size != description.vocab_size:
        raise Rejected(
            f"model {config.model!r} has {description.vocab_size} tokens, the engine expects {config.vocab_size}"
        )
    if config.max_model_len > description.max_model_len:
        raise Rejected(
            f"max_model_len {config.max_model_len} is more than the model's {description.max_model_len}; lower it"
        )


def _machine() -> dict[str, str]:
    return {
        "device": "cpu",
        "machine": platform.machine(),
        "instruction_set": str(torch.backends.cpu.get_cpu_capability()),
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
    }
