"""Llama weights in a folder: `config.json`, `*.safetensors` (with an index if sharded), `tokenizer.json`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from refold.gpu.spec import ModelSpec, RopeScaling, check_shapes, check_spec
from refold.journal.errors import Rejected

_TOP = {"model.embed_tokens.weight": "embedding", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"}
_LAYER = {
    "input_layernorm.weight": "attention_norm",
    "self_attn.q_proj.weight": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.o_proj.weight": "output",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_PREFIX = "model.layers."


class ModelFolder(msgspec.Struct, frozen=True):
    """A folder whose config and tensor heads have been read. `tensors` maps an inner name to (shard, name in it)."""

    path: Path
    config: dict[str, Any]
    shards: list[Path]
    tensors: dict[str, tuple[Path, str]]
    shapes: dict[str, tuple[int, ...]]


class _Config:
    """Typed look-ups in `config.json` with errors that name the key."""

    __slots__ = ("name", "values")

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, (int, float), default))

    def _number(self, key: str, kind: Any, default: float | None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise Rejected(f"{self.name}: {key!r} is missing; the folder is no Llama model")
        if not isinstance(value, kind) or isinstance(value, bool):
            raise Rejected(f"{self.name}: {key!r} is {value!r}, not a number of the right type")
        return float(value) if kind is not int else int(value)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises Rejected if it can't be read or is something else."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Rejected(f"{path} can't be read as JSON ({error}); the model folder is incomplete or broken") from error
    if not isinstance(value, dict):
        raise Rejected(f"{path} holds no JSON object; the model folder is broken")
    return value


def read_folder(path: Path) -> ModelFolder:
    """Read config and tensor heads. Raises Rejected if a file is missing, unreadable or broken."""
    if not (path / "config.json").is_file():
        raise Rejected(f"{path} has no config.json; name a folder with config.json, *.safetensors and tokenizer.json")
    config = read_json(path / "config.json")
    shards = _shards(path)
    tensors: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for name, shape in _head(shard).items():
            inner = inner_name(name)
            if inner is not None:
                tensors[inner], shapes[inner] = (shard, name), shape
    return ModelFolder(path, config, shards, tensors, shapes)


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
            raise Rejected(f"{index} has no weight_map; the model folder is broken")
        shards = sorted({path / Path(shard).name for shard in listed.values()})
    else:
        shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise Rejected(f"{path} has no *.safetensors; weights in other formats are not read")
    for shard in shards:
        if not shard.is_file():
            raise Rejected(f"{shard} is missing (the index lists it); fetch the model again")
    return shards


def _head(shard: Path) -> dict[str, tuple[int, ...]]:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only where such a file is read
    except ImportError as error:
        raise Rejected(f"{shard}: reading it needs the safetensors package; pip install 'refold[gpu]'") from error
    try:
        with safe_open(shard, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise Rejected(f"{shard} is no whole safetensors file ({error}); fetch it again") from error


def inner_name(name: str) -> str | None:
    """The inner name of a tensor, None if a Llama has no such tensor."""
    if not name.startswith(_PREFIX):
        return _TOP.get(name)
    index, _, role = name.removeprefix(_PREFIX).partition(".")
    return f"{index}.{_LAYER[role]}" if role in _LAYER and index.isdecimal() else None


def read_spec(folder: ModelFolder) -> ModelSpec:
    """The description in `config.json`, checked against the tensor heads. Raises Rejected if it is no whole Llama."""
    name = str(folder.path / "config.json")
    _check_family(name, folder.config)
    spec = check_spec(_spec(_Config(name, folder.config), folder), name)
    check_shapes(folder.shapes, spec, str(folder.path))
    return spec


def _check_family(name: str, config: dict[str, Any]) -> None:
    architectures = config.get("architectures") or []
    if config.get("model_type") != "llama" or (architectures and "LlamaForCausalLM" not in architectures):
        raise Rejected(
            f"{name}: model_type {config.get('model_type')!r} ({architectures}) is not supported; "
            "refold runs 'llama' models only: name another model"
        )
    for key, allowed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(key, allowed) != allowed:
            raise Rejected(f"{name}: {key} = {config[key]!r} is not supported ({allowed!r} is); name another model")
    if "quantization_config" in config:
        raise Rejected(f"{name}: quantised safetensors are not supported; use float weights or a GGUF file")


def _spec(config: _Config, folder: ModelFolder) -> ModelSpec:
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if heads < 1:
        raise Rejected(f"{config.name}: num_attention_heads is {heads}; the folder is broken")
    rope = _Config(config.name, _rope(config))
    return ModelSpec(
        num_layers=config.integer("num_hidden_layers"),
        width=width,
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", width // heads),
        mlp_width=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        rope_theta=rope.number("rope_theta", config.number("rope_theta", 10_000.0)),
        norm_eps=config.number("rms_norm_eps"),
        tied_embeddings=bool(config.values.get("tie_word_embeddings", False)) or "lm_head" not in folder.tensors,
        eos_token_ids=_eos(config, folder.path),
        bos_token_id=config.integer("bos_token_id", -1) if config.values.get("bos_token_id") is not None else None,
        rope_scaling=_rope_scaling(rope),
    )


def _rope(config: _Config) -> dict[str, Any]:
    """Older configs call it `rope_scaling` (may be null), newer ones `rope_parameters`."""
    rope = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise Rejected(f"{config.name}: rope_scaling is {rope!r}, not an object; the folder is broken")
    return rope


def _rope_scaling(rope: _Config) -> RopeScaling | None:
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=rope.integer("original_max_position_embeddings"),
        )
    raise Rejected(f"{rope.name}: rotary scaling {kind!r} is not supported (linear, llama3 are); name another model")


def _eos(config: _Config, path: Path) -> tuple[int, ...]:
    """Ends of sequence: the generation config adds to the model's (a chat model ends its turn with a token of its own)."""
    sources = [config.values]
    if (path / "generation_config.json").is_file():
        sources.append(read_json(path / "generation_config.json"))
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise Rejected(f"{config.name}: eos_token_id is {value!r}, not a token id or a list of them")
        found.update(ids)
    return tuple(sorted(found))


def read_tensors(folder: ModelFolder) -> Iterator[tuple[str, Any]]:
    """Yield (inner name, torch tensor in the file's dtype) one at a time."""
    from safetensors import safe_open  # noqa: PLC0415 - as above

    for shard in folder.shards:
        with safe_open(shard, framework="pt") as file:
            for inner, (home, name) in folder.tensors.items():
                if home == shard:
                    yield inner, file.get_tensor(name)
