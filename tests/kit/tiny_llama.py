"""Tiny random Llamas on disk, in both file formats, and a plain forward pass to hold the fast one against."""

import json
import math
from pathlib import Path

import numpy as np

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, VOCAB = 64, 6, 2, 16, 96, 2, 160
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}

Tensors = dict[str, np.ndarray]


def tensors(seed: int = 0, *, tied: bool = True) -> Tensors:
    """Random weights under Hugging Face's names, large enough for tokens to differ."""
    random = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    found = {"model.embed_tokens.weight": draw((VOCAB, WIDTH), 1.0), "model.norm.weight": 1 + draw((WIDTH,), 0.1)}
    if not tied:
        found["lm_head.weight"] = draw((VOCAB, WIDTH), 1.0)
    for layer in range(LAYERS):
        for name, shape in _SHAPES.items():
            found[f"model.layers.{layer}.{name}.weight"] = draw(shape, 2 / math.sqrt(shape[1]))
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = 1 + draw((WIDTH,), 0.1)
    return found


def write_folder(path: Path, weights: Tensors, *, shards: int = 1, **config: object) -> Path:
    """Write `config.json` and safetensors, with an index if there are several shards."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    names = sorted(weights)
    homes = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
    for home in set(homes.values()):
        save_file({name: weights[name] for name in names if homes[name] == home}, path / home)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return path


def write_gguf(path: Path, weights: Tensors, *, quantisation: str = "F32", **metadata: object) -> Path:
    """Write a GGUF file as converters do: query and key rows permuted for interleaved rotary embedding."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    writer.add_token_merges([])
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), str(value))
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, values in weights.items():
        matrix = values.ndim == 2
        data = gguf.quants.quantize(_permuted(name, values), kind) if matrix else values
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind if matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(weights: Tensors, quantisation: str) -> Tensors:
    """What is left of the weights after quantisation (matrices only, as `write_gguf` does)."""
    import gguf

    kind = gguf.GGMLQuantizationType[quantisation]
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) if values.ndim == 2 else values
        for name, values in weights.items()
    }


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in top:
        return f"{top[name]}.weight"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _permuted(name: str, values: np.ndarray) -> np.ndarray:
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return values
    halves = values.reshape(heads, 2, HEAD_DIM // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def plain_logits(weights: Tensors, token_ids: list[int], frequencies: np.ndarray | None = None) -> np.ndarray:
    """Logits after every token (tokens, vocabulary), in float64, with a full attention matrix and a loop over heads."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    if frequencies is None:
        frequencies = 1000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.outer(np.arange(len(token_ids)), frequencies)
    hidden = w["model.embed_tokens.weight"][token_ids]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        normed = _norm(hidden, w[at + "input_layernorm.weight"])
        q, k, v = (normed @ w[at + f"self_attn.{each}_proj.weight"].T for each in "qkv")
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            query = _rotated(q[:, head * HEAD_DIM : (head + 1) * HEAD_DIM], angles)
            key = _rotated(k[:, group * HEAD_DIM : (group + 1) * HEAD_DIM], angles)
            scores = query @ key.T / math.sqrt(HEAD_DIM)
            scores[np.triu_indices(len(token_ids), 1)] = -np.inf
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            heads.append(shares @ v[:, group * HEAD_DIM : (group + 1) * HEAD_DIM])
        hidden = hidden + np.concatenate(heads, axis=1) @ w[at + "self_attn.o_proj.weight"].T
        normed = _norm(hidden, w[at + "post_attention_layernorm.weight"])
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(hidden, w["model.norm.weight"]) @ head.T


def _norm(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * weight


def _rotated(rows: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = rows[:, : HEAD_DIM // 2], rows[:, HEAD_DIM // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
