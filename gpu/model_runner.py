"""From a step's entries to its logits: lays rows out, plans attention, runs the model over the cache.

An entry is a run of consecutive tokens of one request, of any length: a decode is an entry of one. All entries of a step are
one batch of rows. Logits are computed for the last rows of entries that sample (one, and one more per draft to verify), and
for no other.

Two forms of the same model compute them: the compiled library (`refold.gpu.native`) where it can be had and passes its
self-test, torch operators elsewhere. Their last bits differ, so `facts` names the form, and why it isn't the library.
"""

from typing import NamedTuple

import torch

from refold.gpu.attention import Span, plan_attention, smallest_invariant_query_rows
from refold.gpu.kv_cache import KvCache
from refold.gpu.linear import choose_linear, smallest_invariant_rows
from refold.gpu.models.llama import Llama, Rows
from refold.gpu.models.native_llama import NativeLlama, Run, stored_dtype, why_not
from refold.gpu.native import Library, load_library
from refold.gpu.self_test import find_fault
from refold.gpu.spec import ModelSpec
from refold.journal.errors import Rejected

# Where no number of rows is invariant, some number must still be chosen.
FALLBACK_ROWS = 8


class Entry(NamedTuple):
    """Tokens of one request to compute, from `first_position` on; `block_ids` is its block table, long enough for them.

    Logits are wanted for the last `num_logits` of them.
    """

    token_ids: list[int]
    first_position: int
    block_ids: list[int]
    num_logits: int


class ModelRunner:
    """A model and its cache. `facts` says what was chosen for this machine."""

    __slots__ = ("_cache", "_model", "facts")

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        dtype: torch.dtype,
        library: Library | str | None = None,
    ) -> None:
        """`library`: the compiled one; as a string, why there is none; None for what this machine has."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_positions": max_positions}
        found = _native(spec, weights, dtype, library or load_library(), **sizes)
        if isinstance(found, str):
            if dtype == torch.int8:
                raise Rejected(f"dtype 'int8' needs the compiled library: {found}; take 'bfloat16' or 'float32'")
            model = TorchModel(spec, weights, dtype=dtype, **sizes)
            self.facts = {"step": "torch", "not_native": found, **model.facts}
            self._model: TorchModel | NativeLlama = model
            return
        self.facts = {"step": "native", "native": found.build, "batch_invariant": "yes"}
        self._model = found

    @property
    def cache(self) -> KvCache:
        """Keys and values."""
        return self._model.cache

    def run(self, entries: list[Entry]) -> torch.Tensor:
        """Compute a step. Logits (sum of `num_logits`, vocabulary), float32, in the order of `entries` and their tokens.

        They are valid until the next call.
        """
        assert entries, "a step has at least one entry"
        if isinstance(self._model, NativeLlama):
            return self._model.run([Run(*entry) for entry in entries])
        return self._model.run(entries)


def _native(
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    library: Library | str,
    *,
    num_blocks: int,
    block_size: int,
    max_positions: int,
) -> NativeLlama | str:
    """The model in the library, its self-test passed; or why not."""
    reason = library if isinstance(library, str) else why_not(spec)
    if reason is not None:
        return reason
    assert not isinstance(library, str)
    cache = KvCache(
        spec, num_blocks=num_blocks, block_size=block_size, dtype=stored_dtype(dtype), are_keys_transposed=True
    )
    model = NativeLlama(
        library, spec, weights, cache, max_positions=max_positions, dtype=dtype, threads=torch.get_num_threads()
    )
    num_tokens = min(cache.num_slots, max_positions)
    fault = find_fault(model, spec, weights, num_tokens=num_tokens, blocks=list(range(num_blocks)), dtype=dtype)
    return model if fault is None else f"self-test: {fault}"


class TorchModel:
    """The model as torch operators."""

    __slots__ = ("_dtype", "_min_query_rows", "_min_rows", "_model", "cache", "facts")

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        dtype: torch.dtype,
        may_pack: bool = True,
    ) -> None:
        kind = choose_linear(dtype) if may_pack else "plain"
        self._dtype = dtype
        self._model = Llama(spec, weights, max_positions=max_positions, dtype=dtype, linear=kind)
        self.cache = KvCache(spec, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        query, width = spec.num_heads * spec.head_dim, spec.width
        widths = (width, query, width, spec.mlp_width, width)
        linear_rows = [
            smallest_invariant_rows(linear, columns, dtype)
            for linear, columns in zip(self._model.linears, widths, strict=True)
        ]
        query_rows = smallest_invariant_query_rows(spec.head_dim, dtype)
        self._min_rows = max(rows or FALLBACK_ROWS for rows in linear_rows)
        self._min_query_rows = query_rows or FALLBACK_ROWS
        self.facts = {
            "linear": kind,
            "min_linear_rows": str(self._min_rows),
            "min_query_rows": str(self._min_query_rows),
            "batch_invariant": "yes" if query_rows and all(linear_rows) else "no",
        }

    def run(self, entries: list[Entry]) -> torch.Tensor:
        """As `ModelRunner.run`."""
        with torch.inference_mode():
            rows, num_sampled = self._rows(entries)
            return self._model.forward(rows, self.cache)[:num_sampled]

    def _rows(self, entries: list[Entry]) -> tuple[Rows, int]:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        spans: list[Span] = []
        size = self.cache.block_size
        for entry in entries:
            stop = entry.first_position + len(entry.token_ids)
            spans.append(Span(len(token_ids), entry.first_position, len(entry.token_ids), entry.block_ids))
            token_ids += entry.token_ids
            positions += range(entry.first_position, stop)
            slots += [
                entry.block_ids[position // size] * size + position % size
                for position in range(entry.first_position, stop)
            ]
            sampled += range(len(token_ids) - entry.num_logits, len(token_ids))
        plan = plan_attention(spans, self.cache, self._model.spec, min_rows=self._min_query_rows, dtype=self._dtype)
        # Padding repeats row 0 in every respect, so it writes what row 0 writes, where row 0 writes it.
        padding = max(0, self._min_rows - len(token_ids))
        chosen = sampled + [0] * (self._min_rows - len(sampled)) if sampled else []
        rows = Rows(
            token_ids=_padded(token_ids, padding),
            positions=_padded(positions, padding),
            planes=self.cache.planes(_padded(slots, padding)),
            attention=plan._replace(sources=torch.cat([plan.sources, plan.sources[:1].expand(padding)])),
            sampled=torch.tensor(chosen, dtype=torch.int64),
        )
        return rows, len(sampled)


def _padded(values: list[int], padding: int) -> torch.Tensor:
    return torch.tensor(values + values[:1] * padding, dtype=torch.int64)
