"""What it costs that a row's bits don't hang on the batch, and what digests of logits cost: shares of a step's CPU time.

    python -m benchmarks.invariance [--dtype float32] [--context 200] [--rounds 24]

The same decode step is run in turn with the least numbers of rows that the self-test found, and with none, on one thread. CPU
time, because machines are busy; medians. Digests are those of the step's own rows of logits.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from refold.gpu.digest import digest_rows
from refold.gpu.model_runner import Entry, ModelRunner
from refold.gpu.weights import describe_model, load_weights
from refold.gpu.worker import DTYPES

BLOCK = 16


def seconds(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=24)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = describe_model("smollm2")
    assert found.spec is not None
    blocks = arguments.context // BLOCK + 1
    sizes = {"num_blocks": 32 * blocks, "block_size": BLOCK, "max_positions": 1024}
    runner = ModelRunner(found.spec, load_weights(found), **sizes, dtype=DTYPES[arguments.dtype])
    least = runner._min_rows, runner._min_query_rows  # noqa: SLF001
    print(f"least rows: {least[0]} of linear layers, {least[1]} of queries")
    print("| requests | step, ms | without least rows | digests |\n|---:|---:|---:|---:|")
    for batch in (1, 8, 32):
        entries = [
            Entry([5 + i], arguments.context, list(range(i * blocks, (i + 1) * blocks)), 1) for i in range(batch)
        ]
        spent: dict[str, list[float]] = defaultdict(list)
        for _ in range(arguments.rounds):
            for name, rows in (("with", least), ("without", (1, 1))):
                runner._min_rows, runner._min_query_rows = rows  # noqa: SLF001
                spent[name].append(seconds(lambda entries=entries: runner.run(entries)))  # type: ignore[misc]
            logits = runner.run(entries).numpy()
            spent["digests"].append(seconds(lambda logits=logits: digest_rows(logits)))  # type: ignore[misc]
        step, without, digests = (statistics.median(spent[name]) for name in ("with", "without", "digests"))
        print(f"| {batch} | {step * 1e3:.1f} | x {without / step:.3f} | {digests / step:.2%} |")


if __name__ == "__main__":
    main()
