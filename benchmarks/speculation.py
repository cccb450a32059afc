"""What drafts are worth: acceptance and tokens per step by category of prompt, and speed for a request that is alone.

    python -m benchmarks.speculation [--prompts 3] [--tokens 64] [--drafts 3] [--dtype float32] [--page docs/performance.md]

The prompts are those of Spec-Bench, whose categories are told apart, with the model's chat template, greedy. Whether a draft is
right hangs on the request's own tokens only, so for acceptance all prompts are served at once, with the scheduler's look-up.
`accepted` is the share of drafts that were right; `tokens a step` counts steps behind the first token.

For speed, the first prompt of each `--timed` category is served alone, without drafts and with those of the scheduler and of the
worker in turn; the outputs must be the same. Speed is tokens per second of the worker's CPU time in the steps behind the first token,
on one thread, so that a busy machine slows all of them alike.
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

from refold.engine.engine import Engine
from refold.engine.sampling_params import SamplingParams
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.weights import describe_model
from refold.gpu.worker import TorchWorker
from refold.journal.codec import decode
from refold.journal.events import EngineConfig, OutputDelivered, RequestSubmitted, StepScheduled
from refold.journal.stores import open_reader

DATA = Path(__file__).parents[1].parent / "shared" / "data" / "spec_bench_prompts.jsonl"
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculation": "ngram"},
    "worker": {"speculation": "worker"},
}
MARK = "<!-- figures: written by benchmarks.speculation -->"
Prompts = dict[str, list[str]]


class Timed(TorchWorker):
    """Keeps the CPU time of each step by its number."""

    seconds: dict[int, float]

    def execute(self, order: WorkOrder) -> StepOutput:
        started_s = time.thread_time()
        output = super().execute(order)
        self.seconds[order.scheduled.step] = time.thread_time() - started_s
        return output


def timed(seconds: dict[int, float], dtype: str, config: EngineConfig) -> Timed:
    worker = Timed(config, describe_model("smollm2"), threads=1, dtype=dtype)
    worker.seconds = seconds
    return worker


def prompts_by_category(path: Path, count: int) -> Prompts:
    found: Prompts = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        if len(found[said["category"]]) < count:
            found[said["category"]].append(said["turns"][0])
    return found


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def measure(journal: str, seconds: dict[int, float], first_position: int = 0) -> dict[str, Counter[str]]:
    """By request, of the records from a position on: steps, tokens, drafts and CPU time behind its first token."""
    seen: dict[str, Counter[str]] = {}
    names: dict[int, str] = {}
    drafts: dict[int, list[int]] = {}
    with closing(open_reader(journal)) as reader:
        for event in (event for record in reader.read("main", first_position) for event in decode(record)):
            if isinstance(event, RequestSubmitted):
                names[event.handle] = event.request_id
            elif isinstance(event, StepScheduled):
                drafts[event.step] = event.num_drafts or [0] * len(event.handles)
            elif isinstance(event, OutputDelivered):
                counts = event.counts or [1] * len(event.handles)
                accepted = event.accepted_drafts or [0] * len(event.handles)
                for entry, handle in enumerate(event.handles):
                    if not counts[entry]:
                        continue
                    if names[handle] not in seen:
                        seen[names[handle]] = Counter()
                        continue
                    seen[names[handle]] += Counter(
                        steps=1,
                        tokens=counts[entry],
                        drafted=drafts[event.step][entry],
                        accepted=accepted[entry],
                        us=int(seconds.get(event.step, 0) * 1e6),
                    )
    return seen


def acceptance(prompts: Prompts, sampling: SamplingParams, drafts: int, dtype: str) -> dict[str, Counter[str]]:
    """Sums by category, of all prompts at once. One step at a time, so that columns of drafts are whole."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    asked = [(category, prompt) for category, each in prompts.items() for prompt in each]
    with tempfile.TemporaryDirectory() as folder:
        journal = str(Path(folder, "acceptance.db"))
        options: dict[str, Any] = {"num_blocks": 2400, "max_num_seqs": 48, "max_in_flight_steps": 1, "threads": 1}
        options |= {"dtype": dtype, "speculation": "ngram", "num_speculative_tokens": drafts}
        with Engine("smollm2", journal, **options) as engine:
            names = [f"{category} {number}" for number, (category, _) in enumerate(asked)]
            engine.run([chat(prompt) for _, prompt in asked], sampling, request_ids=names)
        for name, each in measure(journal, {}).items():
            sums[name.rpartition(" ")[0]] += each
    return sums


def length_of(journal: str) -> int:
    with closing(open_reader(journal)) as reader:
        return reader.head().position


def speed(prompts: Prompts, sampling: SamplingParams, drafts: int, dtype: str) -> dict[str, dict[str, Counter[str]]]:
    """By category and mode, of the first prompt of each, alone."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(dict)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engines = {}
        for name, mode in MODES.items():
            journal, seconds = str(Path(folder, f"{name}.db")), dict[int, float]()
            options: dict[str, Any] = {"num_blocks": 160, "max_num_seqs": 1, "num_speculative_tokens": drafts} | mode
            engine = Engine("smollm2", journal, make_worker=partial(timed, seconds, dtype), **options)
            engines[name] = journal, stack.enter_context(engine), seconds
        for category, (prompt, *_) in prompts.items():
            outputs = set()
            for name, (journal, engine, seconds) in engines.items():
                before = length_of(journal)
                (done,) = engine.run([chat(prompt)], sampling)
                outputs.add(tuple(done.token_ids))
                (found[category][name],) = measure(journal, seconds, before).values()
            assert len(outputs) == 1, f"{category}: drafts changed a token"
    return found


def tables(arguments: argparse.Namespace) -> list[str]:
    prompts = prompts_by_category(arguments.data, arguments.prompts)
    sampling = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    sums = acceptance(prompts, sampling, arguments.drafts, arguments.dtype)
    sums["**all**"] = sum(sums.values(), Counter[str]())
    words = f"--prompts {arguments.prompts} --tokens {arguments.tokens} --drafts {arguments.drafts}"
    lines = [
        f"`python -m benchmarks.speculation {words} --dtype {arguments.dtype}`",
        "",
        "| category | accepted | tokens a step |",
        "|---|---:|---:|",
    ]
    for category, each in sums.items():
        share, rate = each["accepted"] / max(each["drafted"], 1), each["tokens"] / each["steps"]
        lines.append(f"| {category} | {share:.0%} of {each['drafted']:,} | {rate:.2f} |")
    timed_prompts = {category: each for category, each in prompts.items() if category in arguments.timed}
    lines += ["", "| alone | tokens a step | speed, `ngram` | speed, `worker` |", "|---|---:|---:|---:|"]
    for category, modes in speed(timed_prompts, sampling, arguments.drafts, arguments.dtype).items():
        rates = {name: each["tokens"] / each["us"] for name, each in modes.items()}
        lines.append(
            f"| {category} | {modes['ngram']['tokens'] / modes['ngram']['steps']:.2f} | "
            f"x {rates['ngram'] / rates['off']:.2f} | x {rates['worker'] / rates['off']:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=3, help="of each category")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--timed", nargs="*", default=["extraction", "translation", "math_reasoning", "qa"])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    lines = tables(arguments)
    print("\n".join(lines))
    if arguments.page is not None:
        before, _, after = arguments.page.read_text(encoding="utf-8").partition(MARK)
        rest = after[after.index("\n## ") :] if "\n## " in after else ""
        arguments.page.write_text(f"{before}{MARK}\n" + "\n".join(lines) + "\n" + rest, encoding="utf-8")


if __name__ == "__main__":
    main()
