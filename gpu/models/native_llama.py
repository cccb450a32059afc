"""A Llama whose whole step is one call into the compiled library. See `refold.gpu.native` for what that is and why."""

import weakref
from typing import NamedTuple

import numpy as np
import torch

from refold.gpu.kv_cache import KvCache
from refold.gpu.models.llama import rotary_tables
from refold.gpu.native import Library, Shape, Step
from refold.gpu.spec import ModelSpec
from refold.journal.errors import Rejected

ITEM_TOKENS = 16
"""Tokens of a request that are attended together, as in cpp/attention.h."""
MULTIPLE_OF = 16
"""What every width is a multiple of: the widest vector."""
_ATTENTION_NORM, _QUERY_KEY_VALUE, _OUTPUT, _MLP_NORM, _GATE_UP, _DOWN, _FINAL_NORM, _LM_HEAD = range(8)

_KINDS = (torch.float32, torch.bfloat16, torch.int8)


class Run(NamedTuple):
    """Consecutive tokens of one request, and which of its blocks they go to."""

    token_ids: list[int]
    first_position: int
    block_ids: list[int]
    num_logits: int


def why_not(spec: ModelSpec) -> str | None:
    """Why the library can't compute this model. None: it can."""
    widths = (spec.width, spec.num_heads * spec.head_dim, spec.head_dim, spec.mlp_width, spec.vocab_size)
    return None if all(width % MULTIPLE_OF == 0 for width in widths) else f"a width is no multiple of {MULTIPLE_OF}"


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """What embedding and cache are made of, with weights of `dtype`."""
    return torch.bfloat16 if dtype == torch.int8 else dtype


class NativeLlama:
    """Weights packed by the library, and a step's call. Not thread-safe."""

    __slots__ = (
        "__weakref__",
        "_functions",
        "_handle",
        "_held",
        "_logits",
        "_max_positions",
        "_spec",
        "build",
        "cache",
        "threads",
    )

    def __init__(
        self,
        library: Library,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        cache: KvCache,
        *,
        max_positions: int,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        """Pack float32 `weights`; with int8, embedding and cache are bfloat16. Raises Rejected if memory runs out."""
        assert why_not(spec) is None, why_not(spec)
        self._functions, self._spec, self.cache, self.build = library.functions, spec, cache, library.build
        self._max_positions = max_positions
        tables = rotary_tables(spec, weights.get("rope_factors"), max_positions)
        embedding = weights["embedding"].to(stored_dtype(dtype))
        # The library keeps addresses of these.
        self._held = {"embedding": embedding, **{name: each for name, each in weights.items() if name.endswith("norm")}}
        self._held |= dict(zip(("cosines", "sines"), tables, strict=True))
        self._logits = torch.empty(0, spec.vocab_size)
        shape = Shape(
            layers=spec.num_layers, width=spec.width, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, mlp_width=spec.mlp_width, vocab_size=spec.vocab_size, num_blocks=cache.num_blocks,
            block_size=cache.block_size, max_positions=max_positions, threads=threads, norm_eps=spec.norm_eps,
        )  # fmt: skip
        places = [*(table.data_ptr() for table in tables), embedding.data_ptr(), cache.data_ptr()]
        self._handle = self._functions.refold_create(shape, _KINDS.index(dtype), *places)
        _check_memory(self._handle)
        weakref.finalize(self, self._functions.refold_free, self._handle)
        widest = max(2 * spec.mlp_width, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        room = torch.empty(widest, spec.width)  # one for all layers: a new one for each is handed out page by page
        for index in range(spec.num_layers):
            self._pack_layer(weights, index, room)
        self._pack(0, _FINAL_NORM, weights["final_norm"])
        self._pack(0, _LM_HEAD, weights.get("lm_head", weights["embedding"]))
        self.threads = int(self._functions.refold_threads(self._handle))

    def _pack_layer(self, weights: dict[str, torch.Tensor], index: int, room: torch.Tensor) -> None:
        def fused(*names: str) -> torch.Tensor:
            parts = [weights[f"{index}.{name}"] for name in names]
            return torch.cat(parts, out=room[: sum(map(len, parts))])

        self._pack(index, _ATTENTION_NORM, weights[f"{index}.attention_norm"])
        self._pack(index, _QUERY_KEY_VALUE, fused("query", "key", "value"))
        self._pack(index, _OUTPUT, weights[f"{index}.output"])
        self._pack(index, _MLP_NORM, weights[f"{index}.mlp_norm"])
        self._pack(index, _GATE_UP, fused("gate", "up"))
        self._pack(index, _DOWN, weights[f"{index}.down"])

    def _pack(self, layer: int, kind: int, weight: torch.Tensor) -> None:
        assert weight.dtype == torch.float32, f"weight of {weight.dtype}"
        assert weight.is_contiguous(), "weight with gaps"
        _check_memory(self._functions.refold_set_weight(self._handle, layer, kind, weight.data_ptr()))

    def run(self, runs: list[Run], *, only_linears: bool = False) -> torch.Tensor:
        """Compute a step. Logits (sum of `num_logits`, vocabulary), float32, valid until the next call.

        `only_linears`: nothing but the products, over whatever the buffers hold; for measuring.
        """
        columns = _columns(runs, self.cache.block_size)
        num_rows, num_sampled = len(columns.token_ids), len(columns.sampled)
        self._check(columns)
        if len(self._logits) < num_sampled:
            self._logits = torch.zeros(num_sampled + num_sampled // 4, self._spec.vocab_size)
        arrays = [np.array(column, dtype=np.int32) for column in columns]
        step = Step(
            num_rows, len(columns.items) // 4, num_sampled, *(array.ctypes.data for array in arrays),
            self._logits.data_ptr(), int(only_linears),
        )  # fmt: skip
        _check_memory(self._functions.refold_run(self._handle, step))
        return self._logits[:num_sampled]

    def _check(self, columns: "_Columns") -> None:
        """The library trusts what it is given."""
        spec, cache = self._spec, self.cache
        assert columns.token_ids, "a step has at least one row"
        for name, values, limit in (
            ("token", columns.token_ids, spec.vocab_size),
            ("position", columns.positions, self._max_positions),
            ("slot", columns.slots, cache.num_slots),
            ("block", columns.blocks, cache.num_blocks),
        ):
            assert 0 <= min(values) <= max(values) < limit, f"{name} {min(values)}..{max(values)} of {limit}"


class _Columns(NamedTuple):
    """A step by rows; the order of the fields is that of `Step`."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    sampled: list[int]
    items: list[int]
    blocks: list[int]


def _columns(runs: list[Run], block_size: int) -> _Columns:
    columns = _Columns([], [], [], [], [], [])
    for run in runs:
        first_row, count = len(columns.token_ids), len(run.token_ids)
        stop = run.first_position + count
        num_blocks = -(-stop // block_size)
        assert count > 0, "a run without tokens"
        assert num_blocks <= len(run.block_ids), f"up to {stop}, but {len(run.block_ids)} blocks of {block_size}"
        assert 0 <= run.num_logits <= count, f"{run.num_logits} logits of {count} tokens"
        positions = range(run.first_position, stop)
        for start in range(0, count, ITEM_TOKENS):
            tokens = min(ITEM_TOKENS, count - start)
            columns.items.extend((first_row + start, run.first_position + start, tokens, len(columns.blocks)))
        columns.token_ids.extend(run.token_ids)
        columns.positions.extend(positions)
        columns.slots.extend(run.block_ids[at // block_size] * block_size + at % block_size for at in positions)
        columns.sampled.extend(range(first_row + count - run.num_logits, first_row + count))
        columns.blocks.extend(run.block_ids[:num_blocks])
    return columns


def _check_memory(found: int | None) -> None:
    if not found:
        raise Rejected("the model doesn't fit in memory; lower num_blocks or take a smaller model")
