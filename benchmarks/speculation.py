"""What drafts are worth: acceptance, tokens per step and speed by category of prompt, one request at a time.

    python -m benchmarks.speculation [--prompts 3] [--tokens 64] [--drafts 3] [--dtype bfloat16] [--page docs/performance.md]

The prompts are those of Spec-Bench, whose categories are told apart, with the model's chat template. Three engines serve each prompt
in turn: without drafts, with those of the scheduler's look-up, with those of the worker's. Their tokens must be the same.
Time is that of the steps behind the first token, from the journal's own clock, so prompts don't count; a ratio is that of the
category's sums. `tokens a step` counts steps behind the first token; `accepted` is the share of drafts that were
right, of those that were scheduled (the worker leaves out a guess that it doesn't have, which counts as wrong).
"""

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from refold.engine.config import SamplingParams
from refold.engine.engine import Engine
from refold.journal.codec import decode
from refold.journal.events import OutputDelivered, StepScheduled
from refold.journal.stores import open_reader

DATA = Path(__file__).parents[1].parent / "shared" / "data" / "spec_bench_prompts.jsonl"
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"speculation": "ngram"},
    "worker": {"speculation": "worker"},
}
MARK = "<!-- figures: written by benchmarks.speculation -->"


def prompts_by_category(path: Path, count: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        if len(found[said["category"]]) < count:
            found[said["category"]].append(said["turns"][0])
    return found


def measure(journal: str, first_position: int) -> Counter[str]:
    """Of the one request whose records begin at `first_position`: steps, tokens and nanoseconds behind its first token."""
    seen: Counter[str] = Counter()
    begun_ns = 0
    drafts: dict[int, int] = {}
    with closing(open_reader(journal)) as reader:
        for record in reader.read("main", first_position):
            for event in decode(record):
                if isinstance(event, StepScheduled):
                    drafts[event.step] = sum(event.num_drafts)
                elif isinstance(event, OutputDelivered) and event.token_ids:
                    if begun_ns:
                        seen["steps"] += 1
                        seen["tokens"] += len(event.token_ids)
                        seen["drafted"] += drafts[event.step]
                        seen["accepted"] += sum(event.accepted_drafts)
                        seen["ns"] = record.time_ns - begun_ns
                    begun_ns = begun_ns or record.time_ns
    return seen


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
        common = {"threads": arguments.threads, "dtype": arguments.dtype, "num_speculative_tokens": arguments.drafts}
        common |= {"num_blocks": 160, "max_num_seqs": 1, "enable_prefix_caching": False}
        for name, mode in MODES.items():
            journal, options = str(Path(folder, f"{name}.db")), common | mode
            engines[name] = journal, stack.enter_context(Engine("smollm2", journal, **options))
        for category, prompts in prompts_by_category(arguments.data, arguments.prompts).items():
            for number, prompt in enumerate(prompts):
                outputs = {}
                turn = sorted(MODES, key=lambda name: (list(MODES).index(name) + number) % len(MODES))
                for name in turn:
                    journal, engine = engines[name]
                    before = length_of(journal)
                    (done,) = engine.run([[{"role": "user", "content": prompt}]], sampling)
                    outputs[name] = done.token_ids
                    sums[category][name] += measure(journal, before)
                assert len(set(map(tuple, outputs.values()))) == 1, f"{category}: drafts changed a token"
    return sums


def table(sums: dict[str, dict[str, Counter[str]]], arguments: argparse.Namespace) -> list[str]:
    words = f"--prompts {arguments.prompts} --tokens {arguments.tokens} --drafts {arguments.drafts}"
    command = f"python -m benchmarks.speculation {words} --dtype {arguments.dtype} --threads {arguments.threads}"
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
        rates = {name: each["tokens"] / each["ns"] for name, each in by_mode.items()}
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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
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
