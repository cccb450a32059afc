"""Output tokens per second of the whole engine on the packaged model, beside Hugging Face `generate` and the machine's limit.

    python -m benchmarks.throughput [--dtype bfloat16] [--threads 2] [--concurrency 1 8 32] [--prompts 64] [--rounds 3]
                                    [--peer PEER/bin/python]

64 prompts of 128 tokens, 64 output tokens each, greedy, end-of-sequence ignored. Contestants take turns, `--rounds` times, and
the medians count.

- refold: `Engine.run` with its worker in a process of its own, a SQLite journal on disk and the default durability, batch
  invariant as always. `concurrency` is `max_num_seqs`: requests join as others leave.
- `generate`: Hugging Face transformers on the same weights (our loader's, written as a folder of safetensors), in batches
  of `concurrency` prompts of the same length, so without padding. It has no journal. Its environment is its own:

      python -m venv PEER && PEER/bin/pip install torch==2.13.0 transformers==5.24.0

  Without `--peer` its columns stay empty, and a line says so.
- roofline: packed products alone, of the same rows: prompts in steps of up to 512 rows, then a step of `concurrency` rows
  per token. Each product as fast as the faster of oneDNN's packed operator and the compiled library does it.
- outside: the part of the time in which no forward pass runs, from a clock in the worker's process: scheduler, journal,
  delivery, sampling, and the way to the process and back.

On a busy machine wall times mean little: `cpu` is the ratio of CPU seconds, all processes of a contestant together.
"""

import argparse
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from refold import Engine, SamplingParams
from refold.gpu.kv_cache import KvCache
from refold.gpu.linear import Linear, choose_linear
from refold.gpu.models.native_llama import NativeLlama, Run
from refold.gpu.native import load_library
from refold.gpu.process import ProcessWorker
from refold.gpu.spec import ModelSpec
from refold.gpu.weights import describe_model, load_weights
from refold.gpu.worker import DTYPES

PROMPT_TOKENS, OUTPUT_TOKENS, MAX_STEP_ROWS = 128, 64, 512


class Took(NamedTuple):
    """One turn of one contestant, seconds; `forward_s` is the part in forward passes, where it is known."""

    wall_s: float
    cpu_s: float
    forward_s: float = 0.0
    outputs: list[list[int]] = []  # noqa: RUF012 - read only


Contestant = Callable[[list[list[int]], int], Took]
"""Takes prompts and a concurrency."""


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Different from their first token on, so that no prefix is shared."""
    return [
        [(977 * at * at + 31 * at + 7919 * number + 1000) % vocab_size for at in range(PROMPT_TOKENS)]
        for number in range(count)
    ]


@contextmanager
def refold(dtype: str, threads: int, folder: Path, concurrency: int) -> Iterator[Contestant]:
    """An engine that stays open between its turns."""
    clock = folder / f"clock-{concurrency}"
    started: list[ProcessWorker] = []

    def make_worker(config: Any) -> ProcessWorker:
        command = [sys.executable, "-m", "benchmarks.timed_worker", str(clock)]
        started.append(ProcessWorker(config, threads=threads, dtype=dtype, command=command))
        return started[-1]

    journal = f"sqlite:///{folder}/{dtype}-{concurrency}.db"
    options = {"max_num_seqs": concurrency, "max_num_batched_tokens": MAX_STEP_ROWS, "dtype": dtype}
    with Engine("smollm2", journal, make_worker=make_worker, enable_prefix_caching=False, **options) as engine:  # type: ignore[arg-type]

        def turn(prompts: list[list[int]], _: int) -> Took:
            before_s, before_cpu_s = _forward_seconds(clock), time.process_time() + _cpu_seconds(started[0].pid)
            started_s = time.perf_counter()
            found = engine.run(prompts, SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True))
            wall_s = time.perf_counter() - started_s
            cpu_s = time.process_time() + _cpu_seconds(started[0].pid) - before_cpu_s
            outputs = [list(each.token_ids) for each in found]
            return Took(wall_s, cpu_s, _forward_seconds(clock) - before_s, outputs)

        yield turn


def _forward_seconds(clock: Path) -> float:
    return float(struct.unpack("<qd", clock.read_bytes())[1])


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def generate(python: str, dtype: str, threads: int, folder: Path) -> Iterator[Contestant]:
    """Hugging Face in its own process, which sleeps while others have their turn."""
    command = [python, str(Path(__file__).parent / "throughput_peer.py"), str(folder), dtype, str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        to, answers = process.stdin, process.stdout
        print("peer:", json.loads(answers.readline())["version"], flush=True)

        def turn(prompts: list[list[int]], concurrency: int) -> Took:
            to.write(json.dumps({"prompts": prompts, "tokens": OUTPUT_TOKENS, "batch": concurrency}) + "\n")
            to.flush()
            answer = json.loads(answers.readline())
            return Took(answer["seconds"], answer["cpu_seconds"], 0.0, answer["outputs"])

        yield turn
        to.close()


def write_peer_folder(spec: ModelSpec, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """The weights as Hugging Face wants them."""
    from safetensors.torch import save_file

    outer = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    inner = {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    named = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        named[f"{f'model.layers.{layer}.{inner[kind]}' if layer else outer[name]}.weight"] = tensor
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.width,
        "intermediate_size": spec.mlp_width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))


class Products:
    """All products of one step, and nothing else, by two libraries."""

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype, threads: int) -> None:
        torch.set_num_threads(threads)
        kind = choose_linear(dtype)
        self._dtype = dtype
        self._head = Linear(weights.get("lm_head", weights["embedding"]).to(dtype), kind)
        self._layers = [
            Linear(torch.cat([weights[f"{layer}.{name}"] for name in names]).to(dtype), kind)
            for layer in range(spec.num_layers)
            for names in (("query", "key", "value"), ("output",), ("gate", "up"), ("down",))
        ]
        self._widths = [spec.width, spec.num_heads * spec.head_dim, spec.width, spec.mlp_width] * spec.num_layers
        library = load_library()
        self._native = None
        if not isinstance(library, str):
            cache = KvCache(spec, num_blocks=32, block_size=16, dtype=dtype, are_keys_transposed=True)
            sizes = {"max_positions": MAX_STEP_ROWS, "threads": threads}
            self._native = NativeLlama(library, spec, weights, cache, dtype=dtype, **sizes)  # type: ignore[arg-type]

    def seconds(self, rows: int, sampled: int, repeats: int = 3) -> dict[str, float]:
        """By library, the best of some: what else runs on the machine can only add."""
        inputs = {width: torch.randn(rows, width, dtype=self._dtype) for width in set(self._widths)}

        def by_onednn() -> None:
            with torch.inference_mode():
                for linear, width in zip(self._layers, self._widths, strict=True):
                    linear(inputs[width])
                self._head(inputs[self._widths[0]][:sampled])

        ways = {"onednn": by_onednn}
        native = self._native
        if native is not None:
            runs = [Run([0], 0, [0], int(at < sampled)) for at in range(rows)]
            ways["library"] = lambda: native.run(runs, only_linears=True)
        return {name: min(_seconds(way) for _ in range(repeats)) for name, way in ways.items()}


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def roofline(products: Products, concurrency: int) -> tuple[float, str]:
    """Output tokens per second if there were nothing but products; and by which library, for prompts and for tokens."""
    together = min(concurrency, MAX_STEP_ROWS // PROMPT_TOKENS)
    prompts = products.seconds(PROMPT_TOKENS * together, together)
    tokens = products.seconds(concurrency, concurrency)
    per_prompt_s = min(prompts.values()) / together + (OUTPUT_TOKENS - 1) * min(tokens.values()) / concurrency
    ways = [min(each, key=each.__getitem__) for each in (prompts, tokens)]
    return OUTPUT_TOKENS / per_prompt_s, "/".join(ways)


def measure(arguments: argparse.Namespace, concurrency: int, generated: Contestant | None, products: Products) -> str:
    """One line of the table."""
    prompts = make_prompts(arguments.prompts, describe_model("smollm2").vocab_size)
    tokens = len(prompts) * OUTPUT_TOKENS
    ours: list[Took] = []
    theirs: list[Took] = []
    limits: list[tuple[float, str]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        refold(arguments.dtype, arguments.threads, Path(folder), concurrency) as run,
    ):
        run(prompts[:concurrency], concurrency)
        for _ in range(arguments.rounds):
            ours.append(run(prompts, concurrency))
            if generated is not None:
                theirs.append(generated(prompts, concurrency))
            limits.append(roofline(products, concurrency))
    assert len({json.dumps(each.outputs) for each in ours}) == 1, "the same prompts, other tokens"
    limit = max(limits)
    speed = tokens / statistics.median(each.wall_s for each in ours)
    outside = statistics.median(1 - each.forward_s / each.wall_s for each in ours)
    columns = [str(concurrency), f"{speed:.0f}"]
    if theirs:
        peer = tokens / statistics.median(each.wall_s for each in theirs)
        ratio = statistics.median(b.wall_s / a.wall_s for a, b in zip(ours, theirs, strict=True))
        cpu = statistics.median(b.cpu_s / a.cpu_s for a, b in zip(ours, theirs, strict=True))
        equal = sum(
            a == b for x, y in zip(ours[0].outputs, theirs[0].outputs, strict=True) for a, b in zip(x, y, strict=True)
        )
        columns += [f"{peer:.0f}", f"x {ratio:.2f}", f"x {cpu:.2f}", f"{equal / tokens:.0%}"]
    else:
        columns += [""] * 4
    columns += [f"{limit[0]:.0f} ({limit[1]})", f"{speed / limit[0]:.0%}", f"{outside:.1%}"]
    return "| " + " | ".join(columns) + " |"


HEAD = [
    "| concurrency | refold, tokens/s | `generate` | ratio | cpu | same tokens | roofline | of it | outside |",
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Output tokens per second of the engine, and beside what.")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="Python of an environment with transformers")
    arguments = parser.parse_args()
    description = describe_model("smollm2")
    weights = load_weights(description)
    products = Products(description.spec, weights, DTYPES[arguments.dtype], arguments.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        generated = None
        if arguments.peer:
            write_peer_folder(description.spec, weights, Path(folder))
            generated = stack.enter_context(generate(arguments.peer, arguments.dtype, arguments.threads, Path(folder)))
        else:
            print("peer: none given, so no ratio; the text of this file says how to get one")
        del weights
        print(f"{arguments.dtype}, {arguments.threads} threads, {platform.machine()}, load {os.getloadavg()[0]:.1f}")
        print("\n".join(HEAD), flush=True)
        for concurrency in arguments.concurrency:
            print(measure(arguments, concurrency, generated, products), flush=True)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
