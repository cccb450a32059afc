"""The crash campaign: engines killed with SIGKILL at random instants, and what their clients saw held against the journal.

    python -m tests.engine.crash_campaign --kills 200 [--seed 0]

A round is one journal and a set of requests. Lives of the engine follow each other, each killed at a random instant, until
all requests have ended or the round's kills are spent; the last life may finish. After every kill, before anything reopens
the journal: its chain is whole, it folds under every law, and it holds whatever any client has seen. At the end of a
round: what each client saw over all lives, put end to end, is exactly what an uninterrupted run gives.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refold.engine.config import EngineArgs
from refold.engine.models import find_model
from refold.engine.sampling_params import SamplingParams
from refold.gpu.simulated import simulated_token
from refold.journal.codec import decode
from refold.journal.errors import NotFound
from refold.journal.stores import open_reader
from refold.journal.verify import read_verified
from refold.projections.outbox import Outbox
from refold.projections.totals import Totals
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State

MODEL = "simulated?step_ms=2&vocab=200&eos=3"
POOL = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 6, "max_num_batched_tokens": 24}
NUM_REQUESTS = 12
MAX_KILLS_PER_ROUND = 12
_HERE = Path(__file__).parent


@dataclass
class Tally:
    """What the campaign has seen."""

    kills: int = 0
    kills_before_open: int = 0
    rounds: int = 0
    requests: int = 0
    tokens: int = 0
    recovered: int = 0
    steps_lost: int = 0
    preemptions: int = 0
    stale_delivered: int = 0
    stale_dropped: int = 0
    seconds: float = 0.0

    def summary(self) -> str:
        return (
            f"{self.kills} kills ({self.kills_before_open} before the engine was open) in {self.rounds} rounds, "
            f"{self.seconds:.0f} s\n"
            f"{self.requests} requests, {self.tokens} tokens; lost 0, repeated 0, seen but not durable 0\n"
            f"{self.recovered} requests recovered, {self.steps_lost} steps lost with their engines, "
            f"{self.preemptions} preemptions, stale tokens {self.stale_delivered} delivered and {self.stale_dropped} dropped"
        )


@dataclass
class Round:
    """One journal, its requests and what their clients have seen."""

    folder: Path
    rng: random.Random
    journal_name: str = "journal.db"
    requests: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seen.touch()
        for number in range(NUM_REQUESTS):
            length = self.rng.randint(1, 20)
            sampling = {"seed": self.rng.getrandbits(40), "max_tokens": self.rng.randint(1, 100)}
            prompt = [self.rng.randrange(200) for _ in range(length)]
            self.requests.append({"id": f"r{number}", "prompt": prompt, "sampling": sampling})

    @property
    def journal(self) -> str:
        return f"{self.folder}/{self.journal_name}"

    @property
    def seen(self) -> Path:
        return self.folder / "seen.jsonl"

    def life(self) -> str:
        options = POOL | {
            "max_in_flight_steps": self.rng.randint(1, 4),
            "snapshot_every_records": self.rng.choice((0, 8, 4096)),
        }
        life = {"journal": self.journal, "model": MODEL, "seen": str(self.seen), "options": options}
        return json.dumps(life | {"requests": self.requests})

    def seen_lines(self) -> list[tuple[str, int, list[int], str | None]]:
        return [tuple(json.loads(line)) for line in self.seen.read_text().splitlines()]

    def check_journal(self, *, is_over: bool) -> Totals:
        """The journal is whole and lawful, and holds whatever was seen."""
        state, book, outbox, totals = State(), LawBook(), Outbox(), Totals()
        try:
            reader = open_reader(self.journal)
        except NotFound:  # killed before there was one
            assert not self.seen_lines()
            return totals
        try:
            for record in read_verified(reader):
                events = decode(record)
                for event in events:
                    fold(state, event)
                    book.observe(state, event)
                outbox.observe_all(events)
                totals.observe_all(events)
        finally:
            reader.close()
        for request_id, index, token_ids, finish_reason in self.seen_lines():
            durable = outbox.by_id[request_id]
            assert durable.token_ids[index : index + len(token_ids)] == token_ids, f"{request_id} at {index}"
            assert finish_reason in {None, durable.finish_reason}, request_id
        if is_over:
            assert not state.requests.live(), "every request ends"
        return totals

    def check_seen(self) -> int:
        """What clients saw, put end to end, is what an uninterrupted run gives; returns the number of tokens."""
        together: dict[str, list[int]] = {request["id"]: [] for request in self.requests}
        ends: dict[str, list[str]] = {request["id"]: [] for request in self.requests}
        for request_id, index, token_ids, finish_reason in self.seen_lines():
            assert index == len(together[request_id]), f"{request_id}: index {index} after {len(together[request_id])}"
            together[request_id] += token_ids
            ends[request_id] += [finish_reason] if finish_reason else []
        for request in self.requests:
            token_ids, end = uninterrupted(request)
            assert together[request["id"]] == token_ids, request["id"]
            assert set(ends[request["id"]]) == {end}, (request["id"], ends[request["id"]])
        return sum(map(len, together.values()))


def uninterrupted(request: dict[str, Any]) -> tuple[list[int], str]:
    """What a request must produce, from its seed and positions alone."""
    config = EngineArgs(model=MODEL, **POOL).resolve(find_model(MODEL))
    sampling = SamplingParams(**request["sampling"]).resolve(0, config.vocab_size)
    token_ids: list[int] = []
    for position in range(len(request["prompt"]), len(request["prompt"]) + sampling.max_tokens):
        token_ids.append(simulated_token(sampling, position, len(request["prompt"]), config))
        if token_ids[-1] in config.eos_token_ids:
            return token_ids, "stop"
    return token_ids, "length"


class Victims:
    """The process that lives and gets killed, life after life."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "killed_engine.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, life: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(life + "\n")
        self._process.stdin.flush()
        word, pid = self.answer().split()
        assert word == "pid"
        return int(pid)

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process of the victims is gone"
        return line.strip()

    def end(self) -> list[str]:
        """Answers up to the child's death."""
        answers = [self.answer()]
        while not answers[-1].startswith("dead"):
            answers.append(self.answer())
        return answers

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def victims() -> Iterator[Victims]:
    process = Victims()
    try:
        yield process
    finally:
        process.close()


def kill_one_life(victim: Victims, this: Round, tally: Tally, max_delay_s: float) -> bool:
    """One life, killed at a random instant; True if it had finished before."""
    pid = victim.begin(this.life())
    time.sleep(this.rng.random() * max_delay_s)
    with_kill = True
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        with_kill = False
    answers = victim.end()
    assert answers[-1] in {f"dead {int(signal.SIGKILL)}", "dead 0"}, answers
    finished = "done" in answers
    tally.kills += with_kill and not finished
    opened = [json.loads(answer.removeprefix("open ")) for answer in answers if answer.startswith("open ")]
    tally.kills_before_open += not opened
    _count_recovery(tally, opened)
    this.check_journal(is_over=finished)
    return finished


def _count_recovery(tally: Tally, opened: list[dict[str, Any]]) -> None:
    for recovery in opened:
        tally.recovered += recovery["requests"]
        tally.steps_lost += recovery["steps_lost"]


def run_round(victim: Victims, this: Round, tally: Tally, max_kills: int) -> None:
    """One round, with at most `max_kills` kills; its last life may finish."""
    is_over, goal, max_delay_s = False, tally.kills + min(max_kills, MAX_KILLS_PER_ROUND), 0.35
    while not is_over and tally.kills < goal:
        num_early = tally.kills_before_open
        is_over = kill_one_life(victim, this, tally, max_delay_s)
        if tally.kills_before_open > num_early:  # a busy machine takes longer to open an engine
            max_delay_s *= 1.5
    if not is_over:
        victim.begin(this.life())
        answers = victim.end()
        assert answers[-1] == "dead 0", answers
        _count_recovery(tally, [json.loads(a.removeprefix("open ")) for a in answers if a.startswith("open ")])
    totals = this.check_journal(is_over=True)
    tally.tokens += this.check_seen()
    tally.rounds += 1
    tally.requests += NUM_REQUESTS
    tally.preemptions += totals.preemptions
    tally.stale_delivered += totals.stale_tokens_delivered
    tally.stale_dropped += totals.stale_tokens_dropped


def campaign(kills: int, seed: int, journal_name: str = "journal.db") -> Tally:
    """Rounds until `kills` engines have been killed. A journal whose name ends with a slash is one of segments."""
    rng, tally, started_s = random.Random(seed), Tally(), time.monotonic()
    with victims() as victim, tempfile.TemporaryDirectory() as folder:
        while tally.kills < kills:
            path = Path(folder, f"round{tally.rounds}")
            path.mkdir()
            run_round(victim, Round(path, rng, journal_name), tally, kills - tally.kills)
    tally.seconds = time.monotonic() - started_s
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--journal", default="journal.db", help="its name in each round's folder; journal/ for segments"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    print(campaign(arguments.kills, arguments.seed, arguments.journal).summary())


if __name__ == "__main__":
    main()
