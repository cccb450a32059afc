"""Llama weights in a GGUF file: its metadata as a `ModelSpec`, its tensors as float32 arrays under inner names.

GGUF stores the rows of the query and key projections permuted for interleaved rotary embedding (pairs 2i, 2i+1). They
are put back to the rotate-half order (pairs i, i + head_dim / 2), per head.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from math import prod
from typing import Any, NamedTuple, TypeVar

from refold.gpu.gguf_file import GgufFile, TensorEntry
from refold.gpu.spec import ModelSpec, RopeScaling, check_shapes, check_spec
from refold.journal.errors import Rejected

T = TypeVar("T")

_TOP = {"token_embd": "embedding", "output_norm": "final_norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_output": "output",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_ROPE_FACTORS = "rope_freqs.weight"
_PIECE_VALUES = 131_072


class Quantisation(NamedTuple):
    """How many values a block of a quantised tensor holds, and in how many bytes."""

    name: str
    block_values: int
    block_bytes: int


def quantisations(name: str) -> dict[int, Quantisation]:
    """Block sizes by type number, from the `gguf` package. Raises Rejected if it is not installed."""
    try:
        constants = import_module("gguf.constants")
    except ImportError as error:
        raise Rejected(
            f"{name} is a GGUF file: reading it needs the gguf package; pip install 'refold[gpu]'"
        ) from error
    sizes = constants.GGML_QUANT_SIZES
    return {int(kind): Quantisation(kind.name, values, size) for kind, (values, size) in sizes.items()}


def inner_name(name: str) -> str | None:
    """The inner name of a GGUF tensor, None if a Llama has no such tensor."""
    parts = name.split(".")
    if parts[-1] != "weight":
        return None
    if len(parts) == 2:
        return _TOP.get(parts[0])
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"{parts[1]}.{_LAYER[parts[2]]}"
    return None


def read_spec(file: GgufFile) -> ModelSpec:
    """The description in the metadata, checked against the tensors. Raises Rejected if the file holds no whole Llama."""
    name, metadata = str(file.path), file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise Rejected(
            f"{name} holds architecture {architecture!r}; refold runs 'llama' models only: name another model"
        )
    spec = check_spec(_spec(_Metadata(name, metadata), "output.weight" not in file.tensors), name)
    _check_tensors(file, spec, name)
    return spec


class _Metadata:
    """Typed look-ups with errors that name the key."""

    __slots__ = ("_values", "name")

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self._values = values

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self._values.get(key, default)
        if value is None:
            raise Rejected(f"{self.name}: metadata {key!r} is missing; the file is incomplete: fetch it again")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Rejected(f"{self.name}: metadata {key!r} is {value!r}, not of type {kind.__name__}")
        return value

    def optional(self, key: str) -> int | None:
        return self.get(key, int) if key in self._values else None


def _spec(metadata: _Metadata, tied: bool) -> ModelSpec:
    if metadata.get("llama.expert_count", int, 0):
        raise Rejected(f"{metadata.name}: mixture-of-experts models are not supported; name a dense Llama")
    width, heads = metadata.get("llama.embedding_length", int), metadata.get("llama.attention.head_count", int)
    if heads < 1:
        raise Rejected(f"{metadata.name}: {heads} attention heads; the file is broken: fetch it again")
    head_dim = metadata.get("llama.attention.key_length", int, width // heads)
    rotary = metadata.get("llama.rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        raise Rejected(f"{metadata.name}: rotary size {rotary} differs from head size {head_dim}; not supported")
    ends = (metadata.optional("tokenizer.ggml.eos_token_id"), metadata.optional("tokenizer.ggml.eot_token_id"))
    return ModelSpec(
        num_layers=metadata.get("llama.block_count", int),
        width=width,
        num_heads=heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        mlp_width=metadata.get("llama.feed_forward_length", int),
        vocab_size=metadata.get("llama.vocab_size", int, len(metadata.get("tokenizer.ggml.tokens", list))),
        max_positions=metadata.get("llama.context_length", int),
        rope_theta=metadata.get("llama.rope.freq_base", float, 10_000.0),
        norm_eps=metadata.get("llama.attention.layer_norm_rms_epsilon", float),
        tied_embeddings=tied,
        eos_token_ids=tuple(sorted({end for end in ends if end is not None})),
        bos_token_id=metadata.optional("tokenizer.ggml.bos_token_id"),
        rope_scaling=_rope_scaling(metadata),
    )


def _rope_scaling(metadata: _Metadata) -> RopeScaling | None:
    kind = metadata.get("llama.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise Rejected(f"{metadata.name}: rotary scaling {kind!r} is not supported (linear is); name another model")
    return RopeScaling(kind="linear", factor=metadata.get("llama.rope.scaling.factor", float))


def _check_tensors(file: GgufFile, spec: ModelSpec, name: str) -> None:
    """Every tensor is there, has its shape, a known quantisation, and lies within the file."""
    found = {inner: entry.shape for tensor, entry in file.tensors.items() if (inner := inner_name(tensor))}
    check_shapes(found, spec, name)
    known = quantisations(name)
    for tensor, entry in file.tensors.items():
        kind = known.get(entry.quantisation)
        if kind is None:
            raise Rejected(
                f"{name}: tensor {tensor!r} has unknown quantisation {entry.quantisation}; use Q4, Q8, F16..."
            )
        if entry.shape[-1] % kind.block_values:
            raise Rejected(
                f"{name}: tensor {tensor!r} of {list(entry.shape)} can't be {kind.name}; fetch the file again"
            )
        end = entry.offset + _size_bytes(entry, kind)
        if end > file.size_bytes:
            raise Rejected(
                f"{name} is truncated: tensor {tensor!r} ends at byte {end}, the file at {file.size_bytes}; fetch it again"
            )


def _size_bytes(entry: TensorEntry, kind: Quantisation) -> int:
    return prod(entry.shape) // kind.block_values * kind.block_bytes


def count_values(file: GgufFile) -> int:
    """How many numbers `read_arrays` reads."""
    return sum(prod(entry.shape) for tensor, entry in file.tensors.items() if _array_name(tensor))


def read_arrays(file: GgufFile, spec: ModelSpec, room: Any) -> Iterator[tuple[str, Any]]:
    """Yield (inner name, float32 numpy array of shape (out, in)) one tensor at a time; also `rope_factors` if present.

    They lie in `room`, a float32 array of `count_values` numbers, one behind the other.
    """
    import numpy as np  # noqa: PLC0415 - describing a model needs none of this

    known = quantisations(str(file.path))
    data = np.asarray(np.memmap(file.path, dtype=np.uint8, mode="r"))  # a plain array: each slice of a memmap costs
    start = 0
    for tensor, entry in file.tensors.items():
        name = _array_name(tensor)
        if name is None:
            continue
        kind, stop = known[entry.quantisation], start + prod(entry.shape)
        values, start = room[start:stop], stop
        try:
            _dequantise(data[entry.offset : entry.offset + _size_bytes(entry, kind)], entry.quantisation, kind, values)
        except NotImplementedError as error:
            raise Rejected(
                f"{file.path}: {kind.name} tensors can't be dequantised; use Q4, Q8 or F16 weights"
            ) from error
        yield name, _unpermuted(name, values.reshape(entry.shape), spec)


def _array_name(tensor: str) -> str | None:
    return "rope_factors" if tensor == _ROPE_FACTORS else inner_name(tensor)


def _dequantise(raw: Any, number: int, kind: Quantisation, values: Any) -> None:
    """Numbers from bytes, piece by piece: what gguf needs for one on the way stays in the processor's cache."""
    dequantise: Callable[[Any, Any], Any] = import_module("gguf.quants").dequantize
    gguf_kind = import_module("gguf.constants").GGMLQuantizationType(number)
    blocks = max(1, _PIECE_VALUES // kind.block_values)
    for first in range(0, len(raw) // kind.block_bytes, blocks):
        piece = raw[first * kind.block_bytes : (first + blocks) * kind.block_bytes]
        start = first * kind.block_values
        values[start : start + blocks * kind.block_values] = dequantise(piece, gguf_kind)


def _unpermuted(name: str, values: Any, spec: ModelSpec) -> Any:
    role = name.rpartition(".")[2]
    if role not in ("query", "key"):
        return values
    heads = spec.num_heads if role == "query" else spec.num_kv_heads
    pairs = values.reshape(heads, spec.head_dim // 2, 2, values.shape[-1])
    values[:] = pairs.swapaxes(1, 2).reshape(values.shape)
    return values
