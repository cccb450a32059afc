"""What it costs that a row's bits don't hang on the batch, and what digests of logits cost: shares of a step's CPU time.

    python -m benchmarks.invariance [--dtype float32] [--context 200] [--rounds 24]

The same decode step is run in turn by the form made of torch operators with the least numbers of rows that its probes found, by
the same without any, and by the form that a worker takes here, on one thread. CPU time, because machines are busy; medians.
Digests are those of the step's own rows of logits, as a share of that last form's step.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from refold.gpu.company import Room
from refold.gpu.digest import digest_rows
from refold.gpu.model_runner import Entry, ModelRunner
from refold.gpu.trusted_runner import trusted_runner
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
    weights, dtype = load_weights(found), DTYPES[arguments.dtype]
    runner = ModelRunner(found.spec, weights, **sizes, dtype=dtype)
    chosen, facts = trusted_runner(found.spec, weights, Room(**sizes), dtype)
    least = runner._min_rows, runner._min_query_rows  # noqa: SLF001
    print(
        f"least rows: {least[0]} of linear layers, {least[1]} of queries; a worker here takes the form {facts['step']}"
    )
    print("| requests | torch, ms | without least rows | a worker's step, ms | digests |\n|---:|---:|---:|---:|---:|")
    for batch in (1, 8, 32):
        entries = [
            Entry([5 + i], arguments.context, list(range(i * blocks, (i + 1) * blocks)), 1) for i in range(batch)
        ]
        spent: dict[str, list[float]] = defaultdict(list)
        for _ in range(arguments.rounds):
            for name, rows in (("with", least), ("without", (1, 1))):
                runner._min_rows, runner._min_query_rows = rows  # noqa: SLF001
                spent[name].append(seconds(lambda entries=entries: runner.run(entries)))  # type: ignore[misc]
            spent["chosen"].append(seconds(lambda entries=entries: chosen.run(entries)))  # type: ignore[misc]
            logits = chosen.run(entries).numpy()
            spent["digests"].append(seconds(lambda logits=logits: digest_rows(logits)))  # type: ignore[misc]
        step, without, taken, digests = (
            statistics.median(spent[name]) for name in ("with", "without", "chosen", "digests")
        )
        print(
            f"| {batch} | {step * 1e3:.1f} | x {without / step:.3f} | {taken * 1e3:.1f} | {digests / taken:.2%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
