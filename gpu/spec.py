"""What a Llama-family model is, apart from its numbers: a small frozen description, and the tensors that it implies.

Both file formats end here. A description is built from metadata alone (no tensor is read, torch is not imported), so an
engine can plan its blocks and check a request before a worker has loaded anything. Tensors have one set of names inside,
whatever the file calls them; shapes are (out, in), as torch's `linear` wants them.
"""

import math
from typing import Literal

import msgspec

from refold.journal.errors import Rejected

MAX_LAYERS = 1_024
MAX_DIMENSION = 1 << 20


class RopeScaling(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """How rotary frequencies are stretched. `linear` divides all by `factor`, `llama3` only the slow ones."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8_192


class ModelSpec(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A Llama: RMSNorm, rotary embedding (rotate-half), grouped-query attention, SwiGLU, no biases."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    rope_scaling: RopeScaling | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


def check_spec(spec: ModelSpec, name: str) -> ModelSpec:
    """Return `spec`; raises Rejected, naming the first value that no Llama can have."""
    sizes = {
        "layers": (spec.num_layers, MAX_LAYERS),
        "width": (spec.width, MAX_DIMENSION),
        "attention heads": (spec.num_heads, MAX_DIMENSION),
        "key/value heads": (spec.num_kv_heads, MAX_DIMENSION),
        "head size": (spec.head_dim, MAX_DIMENSION),
        "MLP width": (spec.mlp_width, MAX_DIMENSION),
        "vocabulary": (spec.vocab_size, 1 << 24),
        "context length": (spec.max_positions, 1 << 24),
    }
    for what, (value, limit) in sizes.items():
        if not 1 <= value <= limit:
            raise Rejected(f"{name}: {what} is {value}, not within 1..{limit}; the file is broken or no Llama model")
    if spec.num_heads % spec.num_kv_heads:
        raise Rejected(f"{name}: {spec.num_heads} heads don't divide by {spec.num_kv_heads} key/value heads")
    if spec.head_dim % 2:
        raise Rejected(f"{name}: head size {spec.head_dim} is odd; rotary embedding needs pairs")
    if not (math.isfinite(spec.rope_theta) and spec.rope_theta > 0):
        raise Rejected(f"{name}: rotary base {spec.rope_theta} is not a positive number")
    if not 0 < spec.norm_eps < 1:
        raise Rejected(f"{name}: norm epsilon {spec.norm_eps} is not within 0..1")
    for token_id in spec.eos_token_ids:
        if not 0 <= token_id < spec.vocab_size:
            raise Rejected(f"{name}: end-of-sequence id {token_id} is outside the vocabulary of {spec.vocab_size}")
    return spec


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this description must have, by its inner name."""
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (spec.vocab_size, spec.width),
        "final_norm": (spec.width,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.width)
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (spec.width,),
        "query": (query, spec.width),
        "key": (kv, spec.width),
        "value": (kv, spec.width),
        "output": (spec.width, query),
        "mlp_norm": (spec.width,),
        "gate": (spec.mlp_width, spec.width),
        "up": (spec.mlp_width, spec.width),
        "down": (spec.width, spec.mlp_width),
    }
    for index in range(spec.num_layers):
        shapes.update({f"{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check_shapes(found: dict[str, tuple[int, ...]], spec: ModelSpec, name: str) -> None:
    """Raise Rejected unless `found` (by inner name) holds every expected tensor in its expected shape."""
    for tensor, shape in expected_shapes(spec).items():
        if tensor not in found:
            raise Rejected(f"{name}: tensor {tensor!r} is missing; fetch the model again or choose another file")
        if found[tensor] != shape:
            raise Rejected(
                f"{name}: tensor {tensor!r} has shape {list(found[tensor])}, the metadata says {list(shape)}; "
                "the file contradicts itself: fetch the model again"
            )
    for tensor in found:
        layer = tensor.partition(".")[0]
        if layer.isdecimal() and int(layer) >= spec.num_layers:
            raise Rejected(f"{name}: tensor {tensor!r} is beyond the {spec.num_layers} layers that the metadata says")


def inverse_frequencies(spec: ModelSpec) -> list[float]:
    """Rotary frequencies, radians per position, one for each pair of a head's dimensions."""
    pairs = range(0, spec.head_dim, 2)
    plain = [spec.rope_theta ** -(dimension / spec.head_dim) for dimension in pairs]
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [frequency / scaling.factor for frequency in plain]
    return [_llama3_frequency(frequency, scaling) for frequency in plain]


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Fast rotations stay, slow ones are stretched by `factor`, those between are blended (Llama 3.1)."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
        return frequency / scaling.factor
    turns = scaling.original_max_positions / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
