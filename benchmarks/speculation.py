"""What drafts are worth: acceptance, tokens per step and speed by category of prompt, one request at a time.

    python -m benchmarks.speculation [--prompts 3] [--tokens 64] [--drafts 3] [--dtype float32] [--page docs/performance.md]

The prompts are those of Spec-Bench, whose categories are told apart, with the model's chat template. Three engines serve each prompt
in turn: without drafts, with those of the scheduler's look-up, with those of the worker's. Their tokens must be the same.
`accepted` is the share of the look-up's drafts that were right; `tokens a step` counts steps behind the first token. Speed is tokens
per second of the worker's own CPU time in those steps, as a ratio of the category's sums: one thread, so that a busy machine
slows all three alike.
"""

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from refold.engine.config import SamplingParams
from refold.engine.engine import Engine
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.weights import describe_model
from refold.gpu.worker import TorchWorker
from refold.journal.codec import decode
from refold.journal.events import EngineConfig, OutputDelivered, StepScheduled
from refold.journal.stores import open_reader

DATA = Path(__file__).parents[1].parent / "shared" / "data" / "spec_bench_prompts.jsonl"
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculation": "ngram"},
    "worker": {"speculation": "worker"},
}
MARK = "<!-- figures: written by benchmarks.speculation -->"


class Timed(TorchWorker):
    """Keeps the CPU time of each step by its number."""

    def execute(self, order: WorkOrder) -> StepOutput:
        started_s = time.thread_time()
        output = super().execute(order)
        self.seconds[order.scheduled.step] = time.thread_time() - started_s
        return output

    seconds: dict[int, float]


def prompts_by_category(path: Path, count: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        if len(found[said["category"]]) < count:
            found[said["category"]].append(said["turns"][0])
    return found


def measure(journal: str, first_position: int, seconds: dict[int, float]) -> Counter[str]:
    """Of the one request whose records begin at `first_position`: steps, tokens, drafts and CPU time behind its first token."""
    seen: Counter[str] = Counter()
    has_begun = False
    drafts: dict[int, int] = {}
    with closing(open_reader(journal)) as reader:
        for record in reader.read("main", first_position):
            for event in decode(record):
                if isinstance(event, StepScheduled):
                    drafts[event.step] = sum(event.num_drafts)
                elif isinstance(event, OutputDelivered) and event.token_ids:
                    if has_begun:
                        seen["steps"] += 1
                        seen["tokens"] += len(event.token_ids)
                        seen["drafted"] += drafts[event.step]
                        seen["accepted"] += sum(event.accepted_drafts)
                        seen["us"] += int(seconds[event.step] * 1e6)
                    has_begun = True
    return seen


def timed(seconds: dict[int, float], dtype: str, config: EngineConfig) -> Timed:
    worker = Timed(config, describe_model("smollm2"), threads=1, dtype=dtype)
    worker.seconds = seconds
    return worker


def length_of(journal: str) -> int:
    with closing(open_reader(journal)) as reader:
        return reader.head().position


def run(arguments: argparse.Namespace) -> dict[str, dict[str, Counter[str]]]:
    """Sums by category and mode."""
    sums: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    sampling = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engines = {}
        common = {"num_speculative_tokens": arguments.drafts, "max_in_flight_steps": arguments.window}
        common |= {"num_blocks": 160, "max_num_seqs": 1, "enable_prefix_caching": False}
        for name, mode in MODES.items():
            journal, seconds = str(Path(folder, f"{name}.db")), dict[int, float]()
            make = partial(timed, seconds, arguments.dtype)
            engine = Engine("smollm2", journal, make_worker=make, **(common | mode))
            engines[name] = journal, stack.enter_context(engine), seconds
        for category, prompts in prompts_by_category(arguments.data, arguments.prompts).items():
            for number, prompt in enumerate(prompts):
                outputs = {}
                turn = sorted(MODES, key=lambda name: (list(MODES).index(name) + number) % len(MODES))
                for name in turn:
                    journal, engine, seconds = engines[name]
                    before = length_of(journal)
                    (done,) = engine.run([[{"role": "user", "content": prompt}]], sampling)
                    outputs[name] = done.token_ids
                    sums[category][name] += measure(journal, before, seconds)
                assert len(set(map(tuple, outputs.values()))) == 1, f"{category}: drafts changed a token"
    return sums


def table(sums: dict[str, dict[str, Counter[str]]], arguments: argparse.Namespace) -> list[str]:
    words = f"--prompts {arguments.prompts} --tokens {arguments.tokens} --drafts {arguments.drafts}"
    command = f"python -m benchmarks.speculation {words} --dtype {arguments.dtype}"
    lines = [
        f"`{command}`: {arguments.prompts} prompts of each category, one request at a time.",
        "Every output was the same, token for token, in all three engines.",
        "",
        "| category | accepted | tokens a step | speed, `ngram` | speed, `worker` |",
        "|---|---:|---:|---:|---:|",
    ]
    whole: dict[str, Counter[str]] = defaultdict(Counter)
    for of_category in sums.values():
        for name, each in of_category.items():
            whole[name] += each
    for category, by_mode in (*sums.items(), ("**all**", whole)):
        ngram = by_mode["ngram"]
        rates = {name: each["tokens"] / each["us"] for name, each in by_mode.items()}
        lines.append(
            f"| {category} | {ngram['accepted'] / max(ngram['drafted'], 1):.0%} | {ngram['tokens'] / ngram['steps']:.2f} | "
            f"x {rates['ngram'] / rates['off']:.2f} | x {rates['worker'] / rates['off']:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--window", type=int, default=2, help="steps in flight")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    lines = table(run(arguments), arguments)
    print("\n".join(lines))
    if arguments.page is not None:
        text = arguments.page.read_text(encoding="utf-8")
        before, _, after = text.partition(MARK)
        rest = after[after.index("\n## ") :] if "\n## " in after else ""
        arguments.page.write_text(f"{before}{MARK}\n" + "\n".join(lines) + "\n" + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
