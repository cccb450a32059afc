"""The Llama family's forward pass over one flattened batch of rows.

A row is one token of one request at one position. Everything but attention treats rows alone, so decodes and chunks of
prefill run together. Per layer: all rows' keys and values are written to the cache before any row attends, because two
requests may share a block that this very step fills.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from refold.gpu.attention import AttentionPlan, attend
from refold.gpu.kv_cache import KvCache
from refold.gpu.linear import Linear, LinearKind
from refold.gpu.spec import ModelSpec, inverse_frequencies
from refold.gpu.workspace import Workspace


class Rows(NamedTuple):
    """A step's input, n rows (at least the model's minimum; padding repeats row 0)."""

    token_ids: torch.Tensor  # (n)
    positions: torch.Tensor  # (n)
    planes: torch.Tensor  # (2 * kv heads * n) where keys and values go
    attention: AttentionPlan
    sampled: torch.Tensor  # (m) rows whose logits are wanted


class Layer(NamedTuple):
    """One layer's weights. Query, key and value are one product, gate and up another."""

    attention_norm: torch.Tensor
    query_key_value: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """The weights, packed for this machine, and the forward pass."""

    __slots__ = ("_cosines", "_embedding", "_final_norm", "_layers", "_lm_head", "_sines", "_workspace", "spec")

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        *,
        max_positions: int,
        dtype: torch.dtype,
        linear: LinearKind,
    ) -> None:
        self.spec = spec
        cast = {name: tensor.to(dtype) for name, tensor in weights.items() if name != "rope_factors"}
        self._embedding = cast["embedding"]
        self._final_norm = cast["final_norm"]
        self._lm_head = Linear(cast.get("lm_head", self._embedding), linear)
        self._layers = [_layer(cast, index, linear) for index in range(spec.num_layers)]
        cosines, sines = rotary_tables(spec, weights.get("rope_factors"), max_positions)
        self._cosines = torch.cat([cosines, cosines], 1).to(dtype)
        self._sines = torch.cat([-sines, sines], 1).to(dtype)
        self._workspace = Workspace(dtype)

    @property
    def linears(self) -> list[Linear]:
        """One of each shape, for probing."""
        layer = self._layers[0]
        return [layer.query_key_value, layer.output, layer.gate_up, layer.down, self._lm_head]

    def forward(self, rows: Rows, cache: KvCache) -> torch.Tensor:
        """Logits of the sampled rows (m, vocabulary), float32; keys and values of all rows are in the cache after it."""
        spec, num_rows = self.spec, len(rows.token_ids)
        hidden = self._embedding.index_select(0, rows.token_ids)
        cosines = self._cosines.index_select(0, rows.positions).unsqueeze(1)
        sines = self._sines.index_select(0, rows.positions).unsqueeze(1)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(hidden, (spec.width,), layer.attention_norm, spec.norm_eps)
            heads = layer.query_key_value(normed).view(num_rows, -1, spec.head_dim)
            _rotate(heads[:, : spec.num_heads + spec.num_kv_heads], cosines, sines)
            cache.write(index, rows.planes, heads[:, spec.num_heads :].transpose(0, 1).reshape(-1, spec.head_dim))
            queries = heads[:, : spec.num_heads].view(num_rows, spec.num_kv_heads, spec.group, spec.head_dim)
            mixed = attend(queries, index, cache, rows.attention, self._workspace)
            hidden = hidden + layer.output(mixed.flatten(1))
            normed = functional.rms_norm(hidden, (spec.width,), layer.mlp_norm, spec.norm_eps)
            hidden = hidden + layer.down(gated(layer.gate_up(normed)))
        if not len(rows.sampled):
            return hidden.new_empty(0, spec.vocab_size, dtype=torch.float32)
        last = hidden.index_select(0, rows.sampled)
        return self._lm_head(functional.rms_norm(last, (spec.width,), self._final_norm, spec.norm_eps)).float()


def _layer(weights: dict[str, torch.Tensor], index: int, linear: LinearKind) -> Layer:
    def fused(*names: str) -> Linear:
        return Linear(torch.cat([weights[f"{index}.{name}"] for name in names]), linear)

    return Layer(
        attention_norm=weights[f"{index}.attention_norm"],
        query_key_value=fused("query", "key", "value"),
        output=fused("output"),
        mlp_norm=weights[f"{index}.mlp_norm"],
        gate_up=fused("gate", "up"),
        down=fused("down"),
    )


def rotary_tables(
    spec: ModelSpec, factors: torch.Tensor | None, max_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (positions, head_dim / 2), float32."""
    frequencies = torch.tensor(inverse_frequencies(spec), dtype=torch.float32)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return angles.cos(), angles.sin()


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU, x / (1 + exp(-x)) times the other half: (rows, 2 * width) → (rows, width).

    Not torch's `silu`: where a thread's share ends within a row, its last elements take a scalar path with other bits. Of
    these operations, each gives an element the same bits wherever it lies.
    """
    gate, up = gate_up.chunk(2, dim=1)
    return torch.exp(-gate).add_(1).reciprocal_().mul_(gate).mul_(up)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Rotary embedding in place on (rows, heads, head_dim): x * cos + swap_halves(x) * signed sin."""
    swapped = heads.view(*heads.shape[:2], 2, -1).flip(2).flatten(2).mul_(sines)
    heads.mul_(cosines).add_(swapped)
