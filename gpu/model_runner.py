"""From a step's entries to its logits: lays rows out, plans attention, runs the model over the cache.

An entry is a run of consecutive tokens of one request, of any length: a decode is an entry of one. All entries of a step are
one batch of rows. Logits are computed for the last rows of entries that sample (one, and one more per draft to verify), and
for no other.
"""

from typing import NamedTuple, Protocol

import torch

from refold.gpu.attention import Span, plan_attention, smallest_invariant_query_rows
from refold.gpu.kv_cache import KvCache
from refold.gpu.linear import choose_linear, smallest_invariant_rows
from refold.gpu.models.llama import Llama, Rows
from refold.gpu.spec import ModelSpec

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


class Runner(Protocol):
    """A model and its cache, in some form. `facts` says what was chosen for this machine."""

    facts: dict[str, str]

    def run(self, entries: list[Entry]) -> torch.Tensor:
        """Compute a step. Logits (sum of `num_logits`, vocabulary), float32, in the order of `entries` and their tokens.

        They are valid until the next step.
        """
        ...


class ModelRunner:
    """The form made of torch operators."""

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
            "step": "torch",
            "linear": kind,
            "min_linear_rows": str(self._min_rows),
            "min_query_rows": str(self._min_query_rows),
            "batch_invariant": "yes" if query_rows and all(linear_rows) else "no",
        }

    def run(self, entries: list[Entry]) -> torch.Tensor:
        """See `Runner`."""
        assert entries, "a step has at least one entry"
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
