"""Logits by the book: a plain forward pass of torch operators over the float32 weights, to hold faster forms against."""

from collections.abc import Callable

import torch
from torch.nn import functional

from refold.gpu.company import Room
from refold.gpu.model_runner import Entry
from refold.gpu.models.llama import rotary_tables
from refold.gpu.spec import ModelSpec

NUM_TOKENS = 5
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.int8: 0.3}
"""Of the largest logit. Rounded weights differ from float32 by less, a wrong sum by more."""


def find_error(
    run: Callable[[list[Entry]], torch.Tensor],
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    room: Room,
    dtype: torch.dtype,
) -> str | None:
    """How far the logits of `run` are off, in words; None: within what `dtype` rounds. The cache must be unused."""
    count = min(NUM_TOKENS, room.max_positions, room.num_blocks * room.block_size)
    tokens = [(7 * at + at * at) % spec.vocab_size for at in range(count)]
    found = run([Entry(tokens, 0, list(range(room.num_blocks)), count)])
    plain = plain_logits(spec, weights, tokens)
    distance = float((found - plain).abs().max() / plain.abs().max())
    # NaN is not less than anything.
    return None if distance < TOLERANCE[dtype] else f"its logits are off by {distance:.2g} of the largest"


def plain_logits(spec: ModelSpec, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits (tokens, vocabulary) of one sequence, by the book."""
    hidden = weights["embedding"][tokens]
    cosines, sines = (table[:, None] for table in rotary_tables(spec, weights.get("rope_factors"), len(tokens)))

    def normed(name: str) -> torch.Tensor:
        return functional.rms_norm(hidden, (spec.width,), weights[name], spec.norm_eps)

    def heads(rows: torch.Tensor, *, turned: bool) -> torch.Tensor:
        split = rows.view(len(tokens), -1, spec.head_dim)
        low, high = split.chunk(2, -1)
        if turned:
            split = torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1)
        return split.transpose(0, 1)

    for index in range(spec.num_layers):
        rows = normed(f"{index}.attention_norm")
        query, key, value = (rows @ weights[f"{index}.{name}"].T for name in ("query", "key", "value"))
        mixed = functional.scaled_dot_product_attention(
            heads(query, turned=True), heads(key, turned=True), heads(value, turned=False),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        hidden = hidden + mixed.transpose(0, 1).flatten(1) @ weights[f"{index}.output"].T
        rows = normed(f"{index}.mlp_norm")
        gate, up = (rows @ weights[f"{index}.{name}"].T for name in ("gate", "up"))
        hidden = hidden + (functional.silu(gate) * up) @ weights[f"{index}.down"].T
    return normed("final_norm") @ weights.get("lm_head", weights["embedding"]).T
