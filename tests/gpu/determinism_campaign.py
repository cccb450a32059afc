"""The same prompts under many schedules: every token and every row of logits must be the same; and each schedule is run again.

    python -m tests.gpu.determinism_campaign [--model smollm2] [--dtype float32] [--prompts 50] [--tokens 24] [--again]
                                             [--only WORDS]

Half of the requests are greedy, half sampled with a seed of their own. The first schedule, one request at a time and one step at
a time, says what is right. The others differ in batch, window, chunks, order, prefix cache, room (preemption), drafts and
threads; in one the engine is killed with SIGKILL half way and opened again. What is compared is in the journals: the tokens, and
the digest of the row of logits behind each. With `--again`, each journal is then executed again by a process of its own
(`refold replay --execute`).
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from refold.engine.engine import Engine
from refold.engine.history.came_back import came_back
from refold.engine.sampling_params import SamplingParams
from refold.journal.codec import decode
from refold.journal.errors import JournalError, NotFound
from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StepScheduled,
    WorkerLost,
)
from refold.journal.stores import open_reader

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "spec_bench_prompts.jsonl"
Schedule = dict[str, Any]
ROOMY: Schedule = {"num_blocks": 600, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 256, "threads": 1}
REFERENCE: Schedule = ROOMY | {"max_num_seqs": 1, "max_in_flight_steps": 1}
SCHEDULES: dict[str, Schedule] = {
    "batch 8": ROOMY,
    "batch 32": ROOMY | {"max_num_seqs": 32, "max_num_batched_tokens": 512},
    "window 1": ROOMY | {"max_in_flight_steps": 1},
    "window 3": ROOMY | {"max_in_flight_steps": 3},
    "window 4": ROOMY | {"max_in_flight_steps": 4},
    "chunks of 7": ROOMY | {"long_prefill_token_threshold": 7, "max_num_seqs": 32},
    "chunks of 16": ROOMY | {"long_prefill_token_threshold": 16, "max_num_seqs": 32},
    "chunks of 64, last come first": ROOMY | {"long_prefill_token_threshold": 64, "reverse": True},
    "no prefix cache": ROOMY | {"enable_prefix_caching": False, "block_size": 8, "num_blocks": 1200},
    "preemption": ROOMY | {"max_num_seqs": 32, "tight": True, "block_size": 4, "max_in_flight_steps": 3},
    "drafts of the scheduler": ROOMY | {"speculation": "ngram", "num_speculative_tokens": 3},
    "drafts of the worker": ROOMY | {"speculation": "worker", "num_speculative_tokens": 5, "max_in_flight_steps": 3},
    "drafts and preemption": ROOMY | {"max_num_seqs": 16, "tight": True, "block_size": 4, "speculation": "worker"},
    "two threads": ROOMY | {"threads": 2},
    "SIGKILL": ROOMY | {"kill": True, "max_num_seqs": 16},
}


class Request(NamedTuple):
    """What is asked. Plain data, for a process of its own."""

    request_id: str
    token_ids: list[int]
    sampling: dict[str, Any]


class Outcome(NamedTuple):
    """What a journal holds: tokens by request, digests by request and output index, and what its schedule did."""

    tokens: dict[str, list[int]]
    digests: dict[tuple[str, int], int]
    did: Counter[str]


def requests_of(prompts: list[list[int]], num_tokens: int) -> list[Request]:
    """Every second one is sampled."""
    return [
        Request(
            f"r{number}",
            prompt,
            {"seed": number, "temperature": 0.8 * (number % 2), "max_tokens": num_tokens, "ignore_eos": True},
        )
        for number, prompt in enumerate(prompts)
    ]


def serve(model: str, journal: str, requests: list[Request], schedule: Schedule, dtype: str) -> None:
    """One life of an engine that serves what isn't in the journal yet, and finishes the rest."""
    options = {name: value for name, value in schedule.items() if name not in {"reverse", "tight", "kill"}}
    if schedule.get("tight"):
        longest = max(len(request.token_ids) + request.sampling["max_tokens"] for request in requests)
        options["num_blocks"] = -(-longest // options["block_size"]) + 4
    place: dict[str, Any] = {"worker": "thread", "record_logits": True, "dtype": dtype}
    with Engine(model, journal, **(place | options)) as engine:
        assert engine.recovery is not None
        known = set(read(journal).tokens) if engine.recovery.records else set()
        engine.pause("all")  # all are there before the first step: the schedule is the same each time
        for request in reversed(requests) if schedule.get("reverse") else requests:
            if request.request_id not in known:
                engine.enqueue(request.token_ids, SamplingParams(**request.sampling), request_id=request.request_id)
        engine.unpause()
        engine.wait()


def serve_and_die(model: str, journal: str, requests: list[Request], schedule: Schedule, dtype: str) -> None:
    """Serve in a process of its own, which is killed when a good third of the tokens are in the journal; then serve the rest."""
    said = json.dumps([model, journal, requests, schedule, dtype])
    child = subprocess.Popen([sys.executable, "-m", __spec__.name, "--serve"], stdin=subprocess.PIPE, text=True)
    assert child.stdin is not None
    child.stdin.write(said)
    child.stdin.close()
    wanted = sum(request.sampling["max_tokens"] for request in requests) // 3
    while child.poll() is None:
        time.sleep(0.1)
        with contextlib.suppress(NotFound, JournalError):  # it is only just being made
            if sum(map(len, read(journal).tokens.values())) >= wanted:
                child.kill()
                break
    assert child.wait() == -signal.SIGKILL, "the engine was to be killed in the middle"
    serve(model, journal, requests, schedule, dtype)


def read(journal: str) -> Outcome:
    """What a journal holds."""
    names: dict[int, str] = {}
    outcome = Outcome({}, {}, Counter())
    with closing(open_reader(journal)) as reader:
        for record in reader.read():
            events = decode(record)
            for event in events:
                if isinstance(event, RequestSubmitted):
                    names[event.handle] = event.request_id
                    outcome.tokens[event.request_id] = []
                _note(outcome.did, event)
            answer = came_back(events)
            for handle, first in _delivered(events):
                assert answer is not None
                name, said = names[handle], answer.said[handle]
                assert first == len(outcome.tokens[name]), (name, first)
                outcome.tokens[name] += said.token_ids
                for index, digest in enumerate(said.digests[: len(said.token_ids)]):
                    outcome.digests[name, first + index] = digest
    return outcome


def _delivered(events: list[Event]) -> Iterator[tuple[int, int]]:
    """Handles that got tokens, with the output index of the first."""
    for event in events:
        if isinstance(event, OutputDelivered):
            counts = event.counts or [1] * len(event.handles)
            columns = zip(event.handles, event.first_output_indices, counts, strict=True)
            yield from ((handle, first) for handle, first, count in columns if count)
        elif isinstance(event, StaleOutputConsumed):
            yield from ((h, f) for h, f in zip(event.handles, event.first_output_indices, strict=True) if f >= 0)


def _note(did: Counter[str], event: Event) -> None:
    if isinstance(event, StepScheduled):
        did["steps"] += 1
        did["chunks"] += len(event.chunk_entries)
        did["hits"] += sum(bool(admission.hit_block_ids) for admission in event.admissions)
        did["mixed"] += len(set(event.num_tokens)) > 1
    elif isinstance(event, OutputDelivered | StaleOutputConsumed):
        did["accepted"] += sum(event.accepted_drafts)
        did["rows"] += len(event.token_ids)
    did["preemptions"] += isinstance(event, RequestPreempted)
    did["lost workers"] += isinstance(event, WorkerLost)


class Compared(NamedTuple):
    """A schedule beside the reference: how many tokens and rows, and how many of them differ."""

    name: str
    num_tokens: int
    num_rows: int
    tokens_differ: int
    rows_differ: int
    did: Counter[str]


def compare(name: str, outcome: Outcome, reference: Outcome) -> Compared:
    """Count what differs; a token or row that is missing differs."""
    pairs = [
        (token, outcome.tokens[request][index : index + 1])
        for request, tokens in reference.tokens.items()
        for index, token in enumerate(tokens)
    ]
    rows = [outcome.digests.get(place) == digest for place, digest in reference.digests.items()]
    wrong = sum([token] != found for token, found in pairs)
    return Compared(name, len(pairs), len(rows), wrong, rows.count(False), outcome.did)


def run_again(journal: str) -> dict[str, Any]:
    """Execute a journal's schedule again, in a process of its own."""
    command = [sys.executable, "-m", "refold", "replay", "--execute", "--json", journal]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def campaign(
    model: str, folder: Path, requests: list[Request], names: list[str], dtype: str
) -> Iterator[tuple[Compared, str]]:
    """Run the reference and the schedules of these names. Yields each with its journal."""
    reference = Outcome({}, {}, Counter())
    for name in ("one at a time", *names):
        schedule = SCHEDULES.get(name, REFERENCE)
        journal = str(folder / f"{name.replace(' ', '-').replace(',', '')}-{dtype}.db")
        (serve_and_die if schedule.get("kill") else serve)(model, journal, requests, schedule, dtype)
        outcome = read(journal)
        reference = reference if reference.tokens else outcome
        yield compare(name, outcome, reference), journal


def some_prompts(path: Path, model: str, count: int, most_tokens: int) -> list[list[int]]:
    """Prompts from every category in turn, cut to `most_tokens`; those that share a beginning stay as they are."""
    from refold.engine.models import find_model

    text, by_category = find_model(model).load_text(), dict[str, list[str]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        by_category.setdefault(said["category"], []).append(said["turns"][0])
    rounds = zip(*(prompts * 40 for prompts in by_category.values()), strict=False)
    chosen = [prompt for each in rounds for prompt in each][:count]
    return [text.encode(text.render_chat([{"role": "user", "content": each}]))[:most_tokens] for each in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=160, help="longer ones are cut")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", action="append", help="schedules by a part of their name")
    parser.add_argument("--again", action="store_true", help="execute each journal again")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        model, journal, requests, schedule, dtype = json.load(sys.stdin)
        serve(model, journal, [Request(*each) for each in requests], schedule, dtype)
        return 0
    prompts = some_prompts(arguments.data, arguments.model, arguments.prompts, arguments.prompt_tokens)
    names = [name for name in SCHEDULES if not arguments.only or any(words in name for words in arguments.only)]
    print(f"{len(prompts)} prompts, {sum(map(len, prompts))} tokens in all; {arguments.model}, {arguments.dtype}")
    print("| schedule | tokens differ | logits rows differ | what it did |\n|---|---:|---:|---|", flush=True)
    wrong, again = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        asked = requests_of(prompts, arguments.tokens)
        for found, journal in campaign(arguments.model, Path(folder), asked, names, arguments.dtype):
            did = ", ".join(f"{count:,} {what}" for what, count in found.did.items() if count)
            print(
                f"| {found.name} | {found.tokens_differ} of {found.num_tokens:,} | {found.rows_differ} of "
                f"{found.num_rows:,} | {did} |",
                flush=True,
            )
            wrong += found.tokens_differ + found.rows_differ
            if arguments.again:
                run = run_again(journal)
                again += Counter(
                    {key: run[key] for key in ("num_rows", "num_rows_different", "num_tokens", "num_steps")}
                )
                wrong += not run["ok"]
    if arguments.again:
        print(f"executed again by new processes: {dict(again)}")
    print("all equal" if not wrong else f"NOT equal: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
