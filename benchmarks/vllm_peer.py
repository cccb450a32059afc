"""The same loads on vLLM's scheduler: what a step costs there, and with `--compare` the ratio of ours to it.

    python benchmarks/vllm_peer.py [--requests 16 64 256 1024] [--steps 200] [--scenario steady ...] [--log-stats]
    python benchmarks/vllm_peer.py --compare [--journal sqlite] [--outbox]

Needs a `vllm` in the running interpreter that has `AsyncScheduler` (written against 0.33.0); no GPU, no model, no network.
Loads, lengths, pool sizes and the token budget are those of `benchmarks/scheduler.py`. Figures are CPU time of the calling
thread in µs per step, `schedule` and `update_from_output` together, two steps in flight, as `EngineCore` has them.

`--compare` runs ours and theirs by turns of ten steps (`benchmarks/in_turn.py`). p50 and p99 are over all steps; the ratio is the
median of those of neighbouring turns, with the middle half of them. Ours writes the journal named by `--journal`; vLLM has none.

Equal on both sides:
- prompts of 120 tokens and a little (2,148 in `prefix`), the same output lengths; in `steady` and `speculation` nothing ends;
- prefix caching is on, block size 16, chunked prefill, the same number of blocks under `pressure`, `prefix` and `churn`;
- admission of requests and the worker's answer are made outside the measured time; each draft is accepted with 70 %;
- so the same requests and tokens are scheduled per step, to the last one; only under `pressure` they differ by a few %;
- the garbage collector is on, with everything frozen that lives when the warm-up begins.

Not equal, in vLLM's favour:
- ours encodes every event and queues it for the journal inside the measured time (the disk is the writer's thread, and doesn't
  count; that thread shares the interpreter's lock and the caches, which was measured to cost 5 to 10 % of a step);
- drafts are those of `ngram_gpu`, which reserves no look-ahead blocks; its statistics are off unless `--log-stats`, though a
  server has them on; what serialising outputs for the front end costs is left out.
Not equal, in ours:
- `update_from_output` makes an output object for each request. Ours delivers by folding the record into the outbox, later in
  the same thread: `--outbox` puts that fold, and the fold of the totals, inside the measured time. With the journal "off"
  it has no effect;
- `schedule` makes the whole of the worker's order, with the prompts of new requests. Ours makes the order from the event
  after the turn, outside the measured time (for a decode step there is nothing to make), and takes a digest of its state
  every 256 records, also outside.
Different by design: vLLM's block hash is SHA-256 over a pickle; its admission wants blocks for a request's whole known
length, and its choices under pressure aren't ours, so the number of preemptions differs (it is printed). For `steady` and
`speculation` our pool is practically without end, vLLM's is as large as the run needs: its blocks are objects, and the
cost of a step doesn't depend on their number. The model runner is declared to be V2, vLLM's default on a GPU.
"""

import argparse
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from in_turn import Paired, Side, in_turn

import scheduler as ours
from refold.journal.events import EngineConfig, Event
from refold.projections.outbox import Outbox
from refold.projections.totals import Totals

EOS_TOKEN_ID = 2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 50_000,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}
"""The configuration of a model that nobody loads."""


class Scheduled(NamedTuple):
    """A step in flight: vLLM's order, and the requests whose prompt it doesn't finish."""

    order: Any
    chunks: set[str]


def vllm_config(config: EngineConfig, num_blocks: int) -> Any:
    """vLLM's configuration, with the sizes of ours."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, max_model_len=config.max_model_len, dtype="float16", seed=0
        )
    speculative = None
    if config.num_speculative_tokens:
        speculative = SpeculativeConfig(
            method="ngram_gpu",
            num_speculative_tokens=config.num_speculative_tokens,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )
    cache = CacheConfig(block_size=config.block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    scheduler = SchedulerConfig(
        max_model_len=config.max_model_len,
        is_encoder_decoder=False,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        async_scheduling=True,
    )
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        scheduler_config=scheduler,
        speculative_config=speculative,
        device_config=DeviceConfig(device="cpu"),
    )


def vllm_scheduler(config: Any, *, log_stats: bool) -> Any:
    """An `AsyncScheduler` for one group of full-attention layers."""
    import torch
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    assert config.max_concurrent_batches == 2, config.max_concurrent_batches
    block_size = config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float16)
    kv_cache = KVCacheConfig(
        num_blocks=config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)],
    )
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=log_stats,
    )


class Loop:
    """What vLLM's `EngineCore` does with its scheduler, two steps in flight, and a worker that answers at once."""

    def __init__(self, scenario: ours.Scenario, num_requests: int, num_steps: int, *, log_stats: bool) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        sizes = ours.Loop(scenario, num_requests, None).state.config
        num_blocks = sizes.num_blocks + 1  # block 0 is never handed out
        if scenario.output_tokens > 10_000:
            longest = scenario.prompt_tokens + 16 + (num_steps + 4) * (1 + scenario.num_speculative_tokens)
            num_blocks = num_requests * (longest // sizes.block_size + 2)
        config = vllm_config(sizes, num_blocks)
        digest = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(digest)
        self.scenario, self.num_requests = scenario, num_requests
        self.scheduler = vllm_scheduler(config, log_stats=log_stats)
        self.hasher = get_request_block_hasher(sizes.block_size, digest, config.num_hash_lookahead_tokens)
        self.in_flight: deque[Scheduled] = deque()
        self.random = random.Random(1)
        self.num_submitted = 0
        self.num_preemptions = 0

    def refill(self) -> None:
        """Keep the number of live requests up. The prompts and lengths of `benchmarks/scheduler.py`."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        s = self.scenario
        prefix = [3 + i % 5000 for i in range(s.shared_prefix_tokens)]
        while len(self.scheduler.running) + len(self.scheduler.waiting) < self.num_requests:
            i = self.num_submitted
            self.num_submitted += 1
            length = s.prompt_tokens - s.shared_prefix_tokens + i % 16
            spread = self.random.randrange(s.output_tokens // 2) if s.output_tokens < 10_000 else 0
            sampling = SamplingParams(seed=i, max_tokens=s.output_tokens - spread)
            sampling.update_from_generation_config({}, EOS_TOKEN_ID)
            prompt = prefix + [3 + (i * 7 + j * 31) % 40_000 for j in range(length)]
            request = Request(
                request_id=f"r{i}",
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self.hasher,
            )
            self.scheduler.add_request(request)

    def note(self, order: Any) -> None:
        """Put a scheduled step in flight, with what only the present state tells of it."""
        requests = self.scheduler.requests
        self.num_preemptions += len(order.preempted_req_ids or ())
        if order.total_num_scheduled_tokens:
            chunks = {name for name in order.num_scheduled_tokens if requests[name].is_prefill_chunk}
            self.in_flight.append(Scheduled(order, chunks))

    def answer(self, step: Scheduled) -> Any:
        """What a worker would say to a step."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(step.order.num_scheduled_tokens)
        drafts = step.order.scheduled_spec_decode_tokens
        sampled: list[list[int]] = []
        for name in names:
            accepted = 0
            while accepted < len(drafts.get(name, ())) and self.random.random() < 0.7:
                accepted += 1
            count = 0 if name in step.chunks else 1 + accepted
            first = int(name[1:]) * 31 + len(sampled)
            sampled.append([1000 + (first + i) % 40_000 for i in range(count)])
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)


def peer_steps(
    scenario: ours.Scenario, num_requests: int, num_steps: int, log_stats: bool
) -> Iterator[tuple[float, int]]:
    """As `ours.steps`, of vLLM; its pool holds what `num_steps` steps need."""
    prepare_vllm()
    warm = 30 if scenario.output_tokens > 10_000 else 3 * scenario.output_tokens // 2
    loop = Loop(scenario, num_requests, warm + num_steps, log_stats=log_stats)
    loop.refill()
    gc.collect()
    gc.freeze()
    for i in range(warm + num_steps):
        loop.refill()
        start = time.thread_time_ns()
        order = loop.scheduler.schedule()
        middle = time.thread_time_ns()
        loop.note(order)
        if i == 0:
            loop.note(loop.scheduler.schedule())
        step = loop.in_flight.popleft()
        answer = loop.answer(step)
        resumed = time.thread_time_ns()
        outputs = loop.scheduler.update_from_output(step.order, answer)
        end = time.thread_time_ns()
        del outputs
        if i >= warm:
            yield (middle - start + end - resumed) / 1000, loop.num_preemptions
    loop.scheduler.shutdown()


def our_steps(
    scenario: ours.Scenario, num_requests: int, journal: str, has_outbox: bool
) -> Iterator[tuple[float, int]]:
    """Ours, with a journal of its own."""
    with ours.journal(journal) as queue:
        append = queue if queue is None or not has_outbox else _with_outbox(queue)
        yield from ours.steps(scenario, num_requests, append)


def _with_outbox(append: ours.Append) -> ours.Append:
    """An append that also does what follows once the record is durable."""
    outbox, totals = Outbox(), Totals()

    def append_and_deliver(events: Sequence[Event], time_ns: int) -> int:
        position = append(events, time_ns)
        totals.observe_all(events)
        outbox.observe_all(events)
        return position

    return append_and_deliver


def quantiles(spent: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    return statistics.median(spent), sorted(spent)[int(len(spent) * 0.99)]


def run_alone(options: argparse.Namespace) -> None:
    """The table of vLLM's steps."""
    print(
        f"{'scenario':12s} {'requests':>8s} {'journal':>8s} {'p50':>8s} {'p99':>8s} {'p99/p50':>8s} {'preempted':>10s}"
    )
    for name in options.scenario:
        for n in options.requests:
            alone = list(peer_steps(ours.SCENARIOS[name], n, options.steps, options.log_stats))
            p50, p99 = quantiles([spent for spent, _ in alone])
            row = f"{name:12s} {n:8d} {'none':>8s} {p50:8.0f} {p99:8.0f} {p99 / p50:8.1f}"
            print(f"{row} {alone[-1][1]:10d}", flush=True)


def run_compared(options: argparse.Namespace) -> None:
    """The table of both, run in turn."""
    print(f"ours: journal {options.journal}{', outbox' if options.outbox else ''}; vLLM: no journal")
    print(f"{'':21s} {'ours':>15s} {'vLLM':>15s} {'ours/vLLM, p50':>21s} {'':6s} {'preempted':>15s}")
    sides = f"{'p50':>7s} {'p99':>7s} {'p50':>7s} {'p99':>7s} {'median':>7s} {'middle half':>13s} {'p99':>6s}"
    print(f"{'scenario':12s} {'requests':>8s} {sides} {'ours':>7s} {'vLLM':>7s}")
    for name in options.scenario:
        for n in options.requests:
            scenario = ours.SCENARIOS[name]
            mine = Side(our_steps, (scenario, n, options.journal, options.outbox))
            peer = Side(peer_steps, (scenario, n, options.steps + 1, options.log_stats))
            print(f"{name:12s} {n:8d} {_compared(in_turn(mine, peer, options.steps))}", flush=True)


def _compared(paired: Paired) -> str:
    ours_p50, ours_p99 = quantiles([us for turn in paired.mine for us in turn])
    peer_p50, peer_p99 = quantiles([us for turn in paired.peers for us in turn])
    low, middle, high = statistics.quantiles(paired.ratios(), n=4)
    costs = f"{ours_p50:7.0f} {ours_p99:7.0f} {peer_p50:7.0f} {peer_p99:7.0f}"
    ratios = f"{middle:7.3f} {f'{low:.3f}-{high:.3f}':>13s} {ours_p99 / peer_p99:6.2f}"
    return f"{costs} {ratios} {paired.num_preemptions[0]:7d} {paired.num_preemptions[1]:7d}"


def prepare_vllm() -> str:
    """Set vLLM up as a server has it, without its log; returns its version.

    Raises:
        ImportError: it, or something that its scheduler needs, isn't there.
    """
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.v1.core.sched.async_scheduler  # noqa: F401 - the whole tree that it needs
    from vllm import envs

    envs.enable_envs_cache()
    for name in ("vllm", "torch._library"):
        importlib.import_module("logging").getLogger(name).setLevel("ERROR")
    return importlib.metadata.version("vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scenario", nargs="+", default=list(ours.SCENARIOS), choices=list(ours.SCENARIOS))
    parser.add_argument("--log-stats", action="store_true", help="vLLM's scheduler statistics, as in a server")
    parser.add_argument("--compare", action="store_true", help="run ours too, in turn, and print the ratio")
    parser.add_argument("--journal", default="sqlite", choices=["off", "memory", "sqlite"], help="ours, with --compare")
    parser.add_argument("--outbox", action="store_true", help="ours with the fold that delivers, with --compare")
    options = parser.parse_args()
    try:
        version = prepare_vllm()
    except ImportError as error:
        print(f"vLLM's scheduler can't be imported here ({error}): nothing to measure", file=sys.stderr)
        sys.exit(2)
    print(f"µs of CPU time per step in the calling thread; vLLM {version}, Python {platform.python_version()}")
    (run_compared if options.compare else run_alone)(options)


if __name__ == "__main__":
    main()
