"""Before the compiled library is trusted with a model: are its logits right, and a row's bits the same in any company?

Some tokens are computed as one run and cut into small ones, and compared bit by bit; the first few also with a plain forward
pass of torch operators over the float32 weights. It takes some tens of milliseconds for a small model, and writes into
the first blocks of a cache that nobody has read yet.
"""

import torch
from torch.nn import functional

from refold.gpu.models.llama import rotary_tables
from refold.gpu.models.native_llama import NativeLlama, Run
from refold.gpu.spec import ModelSpec

NUM_PROBE_TOKENS = 40
CUTS = (1, 1, 2, 3, 13, 20)
NUM_PLAIN_TOKENS = 5
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.int8: 0.5}
"""Of the largest logit. The plain pass keeps float32; bfloat16 weights differ from it by that much, a wrong sum by more."""


def find_fault(
    model: NativeLlama,
    spec: ModelSpec,
    weights: dict[str, torch.Tensor],
    *,
    num_tokens: int,
    blocks: list[int],
    dtype: torch.dtype,
) -> str | None:
    """What is wrong with the library, in words. None: nothing. `blocks` hold `num_tokens` positions at least."""
    tokens = [(7 * at + at * at) % spec.vocab_size for at in range(min(NUM_PROBE_TOKENS, num_tokens))]
    whole = model.run([Run(tokens, 0, blocks, len(tokens))]).clone()
    if not bool(whole.isfinite().all()):
        return "its logits are not finite"
    start = 0
    for cut in CUTS:
        part = tokens[start : start + cut]
        if part and not torch.equal(model.run([Run(part, start, blocks, len(part))]), whole[start : start + len(part)]):
            return f"{len(part)} rows from position {start} have other bits alone"
        start += cut
    plain = _plain(spec, weights, tokens[:NUM_PLAIN_TOKENS])
    distance = float((whole[: len(plain)] - plain).abs().max() / plain.abs().max())
    return None if distance < TOLERANCE[dtype] else f"its logits are off by {distance:.2g} of the largest"


def _plain(spec: ModelSpec, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
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
