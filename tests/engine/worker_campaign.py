"""The worker campaign: worker processes killed and stopped at random instants, 1,000 times, while an engine serves.

    python -m tests.engine.worker_campaign --kills 1000 [--seed 0] [--model simulated|llama]

A round is one engine on one journal, a batch of requests, and an assailant who kills (SIGKILL, SIGSEGV, SIGABRT) or stops
(SIGSTOP) each worker some time after it is ready. At the end of a round every request has ended as it must, with exactly the
tokens of an undisturbed run; the journal passes every law, and has for every worker but the last a `WorkerLost` that says what
became of it. Nobody is quarantined: luck so bad that it looks like guilt is counted, and is none of the tokens' business.
`llama` is a small random model on torch, `simulated` the simulated one.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from refold import Completion, Engine, SamplingParams
from refold.gpu.process import ProcessWorker
from refold.journal.events import EngineConfig, RequestQuarantined, WorkerLost
from refold.journal.stores import open_reader
from tests.kit.engines import lawful_events
from tests.kit.tiny_llama import tensors, write_folder

DEADLY = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
STOPS_IN = 20
NUM_REQUESTS = 12
MAX_TOKENS = 120
ROUND_KILLS = 25
SILENCE_S = 4.0
SIMULATED = "simulated?vocab=1000&eos=-1&step_ms=3"


class Assailant(threading.Thread):
    """Attacks each worker once, some time after it is ready."""

    def __init__(self, rng: random.Random, most: int, pause_s: float) -> None:
        super().__init__(daemon=True)
        self.done: Counter[str] = Counter()
        self.over = threading.Event()
        self._made: list[ProcessWorker] = []
        self._random, self._most, self._pause_s = rng, most, pause_s

    def make(self, config: EngineConfig, **options: Any) -> ProcessWorker:
        """Start a worker; its turn comes."""
        worker = ProcessWorker(config, silence_s=SILENCE_S, **options)
        self._made.append(worker)
        return worker

    def run(self) -> None:
        """Attack until enough was done."""
        attacked = 0
        while self.done.total() < self._most and not self.over.wait(self._random.uniform(0, self._pause_s)):
            if len(self._made) == attacked:
                continue
            attacked = len(self._made)
            how = signal.SIGSTOP if self._random.randrange(STOPS_IN) == 0 else self._random.choice(DEADLY)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._made[-1].pid, how)
                self.done[how.name] += 1


def asked(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """The requests of a round."""
    prompts = [[rng.randrange(150) for _ in range(rng.choice((1, 7, 40)))] for _ in range(NUM_REQUESTS)]
    params = [
        SamplingParams(seed=rng.randrange(2**40), max_tokens=MAX_TOKENS, temperature=rng.choice((0.0, 0.8)))
        for _ in prompts
    ]
    return prompts, params


def play_round(
    model: str, journal: str, rng: random.Random, kills: int, pause_s: float
) -> tuple[Counter[str], Counter[str]]:
    """Serve under attack; what was done to workers, and what the journal tells of it."""
    prompts, params = asked(rng)
    options: dict[str, Any] = {"num_blocks": 256, "max_in_flight_steps": rng.choice((1, 2, 4))}
    with Engine(model, **options) as undisturbed:
        due = undisturbed.run(prompts, params)
    assailant = Assailant(rng, kills, pause_s)
    with Engine(model, journal, make_worker=assailant.make, **options) as engine:
        assailant.start()
        told: Counter[str] = Counter()
        while assailant.is_alive():
            _check(due, engine.run(prompts, params))
            told.update(requests=len(prompts), tokens=sum(len(each.token_ids) for each in due))
        assailant.join()
        _check(due, engine.run(prompts, params))
    return assailant.done, told + _explained(journal, assailant.done)


def _check(due: Sequence[Completion], done: Sequence[Completion]) -> None:
    for wanted, got in zip(due, done, strict=True):
        assert got.finish_reason == wanted.finish_reason, (got, "is quarantined, or lost")
        assert got.token_ids == wanted.token_ids, (got.request_id, "has other tokens than undisturbed")


def _explained(journal: str, done: Counter[str]) -> Counter[str]:
    with contextlib.closing(open_reader(journal)) as reader:
        events = lawful_events(reader)
    lost = [event for event in events if isinstance(event, WorkerLost)]
    unexplained = [
        event.reason for event in lost if "ended by SIG" not in event.reason and "no sign of life" not in event.reason
    ]
    assert not unexplained, unexplained
    assert done.total() - 1 <= len(lost) <= done.total(), (
        done,
        len(lost),
    )  # one idle at the very end may not be missed
    at_work = sum(bool(event.steps) for event in lost)
    verdicts = sum(isinstance(event, RequestQuarantined) for event in events)
    return Counter(lost=len(lost), at_work=at_work, idle=len(lost) - at_work, verdicts=verdicts)


def campaign(kills: int, seed: int, model: str, log: Callable[[str], object] = print) -> Counter[str]:
    """Rounds until `kills` workers were attacked; what was seen. Raises AssertionError with the round's seed."""
    seen: Counter[str] = Counter()
    began_s = time.monotonic()
    while seen["attacks"] < kills:
        round_seed = seed + seen["rounds"]
        with tempfile.TemporaryDirectory() as folder:
            path = model if model != "llama" else str(write_folder(Path(folder) / "llama", tensors()))
            name = SIMULATED if model == "simulated" else path
            wanted = min(ROUND_KILLS, kills - seen["attacks"])
            try:
                done, told = play_round(name, f"{folder}/refold.db", random.Random(round_seed), wanted, 0.4)
            except AssertionError as error:
                raise AssertionError(f"round {round_seed} on {model}: {error}") from error
        seen.update(done)
        seen.update(told)
        seen.update(attacks=done.total(), rounds=1)
    log(
        f"{model}: "
        + ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()))
        + f" in {time.monotonic() - began_s:.0f} s"
    )
    return seen


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="simulated", choices=("simulated", "llama"))
    given = parser.parse_args(argv)
    campaign(given.kills, given.seed, given.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
