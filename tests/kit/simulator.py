"""The simulator: one seed is one engine's life, played in virtual time without threads.

A seed fixes everything: pool, budgets, depth of the window, policy, arrivals, and what goes wrong (aborts, cache resets,
lost workers, crashes at a record's border, late and duplicate outputs). Every event passes the laws; the simulated worker
reads its whole context back before each sample; each output must be the token that the request's seed has at that position;
at the end every request has finished and every block is free. A failure prints the line that reproduces it.
"""

import argparse
import random
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

from refold.gpu.batch import StepOutput
from refold.gpu.simulated import simulated_token
from refold.journal.codec import decode, encode
from refold.journal.errors import Rejected
from refold.journal.events import EngineConfig, Event, RequestFinished, RequestSubmitted
from refold.journal.record import EMPTY_HEAD, head_after, seal
from refold.scheduler.commands import LoseWorker, RecordDigest, ResetCache
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State, digest
from tests.kit.drive import Drive, config


class Simulation:
    """One life. `play()` runs it to the end and returns a digest of all that happened."""

    def __init__(self, seed: int, turns: int = 120) -> None:
        self.seed = seed
        self.turns = turns
        self.random = random.Random(seed)
        self.drive = Drive(self._config())
        self.old_outputs: list[StepOutput] = []
        self.num_submitted = 0
        self.hazards = self.random.choice(
            ((), ("abort",), ("abort", "reset"), ("abort", "reset", "lose", "crash", "late"))
        )

    def play(self) -> str:
        """Turns of random orders, then quiet ones until everything has finished."""
        self.drive.open()
        for _ in range(self.turns):
            self._turn()
        self.drive.run()
        self._check_end()
        return digest(self.drive.state)

    def _config(self) -> EngineConfig:
        pick = self.random.choice
        block_size = pick((1, 2, 4, 8))
        budget = pick((4, 8, 32))
        return config(
            vocab_size=pick((3, 50, 1000)),
            eos_token_ids=pick(((), (2,))),
            block_size=block_size,
            num_blocks=pick((64, 96, 160)) // block_size,
            max_model_len=pick((40, 60, 200)),
            max_num_seqs=pick((1, 2, 4, budget)) if budget > 4 else pick((1, 2, 4)),
            max_num_batched_tokens=budget,
            max_in_flight_steps=pick((1, 2, 3, 4, 8)),
            policy=pick(("fcfs", "priority")),
            enable_prefix_caching=pick((True, True, False)),
            long_prefill_token_threshold=pick((0, 0, 3)),
            watermark_blocks=pick((0, 1)),
            admit_full_sequence=pick((True, False)),
        )

    def _turn(self) -> None:
        roll = self.random.random()
        if roll < 0.15:
            self._submit()
        elif roll < 0.22 and self.hazards:
            getattr(self, f"_{self.random.choice(self.hazards)}")()
        elif roll < 0.65:
            self.drive.schedule()
        elif self.drive.orders:
            output = self.drive.run_worker()
            self.drive.deliver(output)
            self.old_outputs = [*self.old_outputs[-7:], output]
        if roll > 0.98:
            self.drive.do(RecordDigest())

    def _submit(self) -> None:
        rng, request_id = self.random, f"r{self.num_submitted}"
        shared = [7, 1, 2, 1, 0, 2, 1, 1] * 4
        length = rng.choice((1, 3, 8, 17, 30))
        prompt = shared[:length] if rng.random() < 0.5 else [rng.randrange(3) for _ in range(length)]
        prompt = [token % self.drive.config.vocab_size for token in prompt]
        max_tokens = rng.choice((1, 2, 5, 16, 30))
        try:
            self.drive.submit(
                request_id,
                prompt,
                max_tokens,
                seed=rng.randrange(2**40),
                min_tokens=rng.choice((0, 0, min(2, max_tokens))),
                stop_token_ids=rng.choice(((), (1,))),
                priority=rng.randrange(3),
                cache_salt=rng.choice(("", "", "a")),
            )
        except Rejected:
            return
        self.num_submitted += 1

    def _abort(self) -> None:
        live = self.drive.state.requests.live()
        if live:
            self.drive.abort(self.random.choice(live).request_id)

    def _reset(self) -> None:
        self.drive.do(ResetCache(reset_running=True))

    def _lose(self) -> None:
        if self.drive.do(LoseWorker(reason="simulated loss")):
            self.drive.do(_start())

    def _late(self) -> None:
        """An output that came before comes again: refused, and nothing changes."""
        if not self.old_outputs:
            return
        before = digest(self.drive.state)
        try:
            self.drive.deliver(self.random.choice(self.old_outputs))
        except Rejected:
            assert digest(self.drive.state) == before
            return
        raise AssertionError("an output was accepted twice")

    def _crash(self) -> None:
        """The process dies at a record's border: what the journal's bytes say is all that is left."""
        before = digest(self.drive.state)
        state, book = refolded(self.drive.records)
        assert digest(state) == before, "the journal folds to another state than the engine had"
        self.drive.state, self.drive.book = state, book
        self.drive.open()

    def _check_end(self) -> None:
        drive = self.drive
        state, _ = refolded(drive.records)
        assert digest(state) == digest(drive.state)
        submitted = {e.handle: e for e in _events(drive.records) if isinstance(e, RequestSubmitted)}
        finished = {e.handle: e for e in _events(drive.records) if isinstance(e, RequestFinished)}
        assert submitted.keys() == finished.keys(), "not every request finished"
        for handle, request in submitted.items():
            check_outputs(request, finished[handle], drive.book.output_tokens(handle), drive.config)


def check_outputs(
    request: RequestSubmitted, end: RequestFinished, outputs: list[int], engine_config: EngineConfig
) -> None:
    """Each output is the token of its position, and a natural end came where it had to."""
    prompt, sampling = len(request.prompt_token_ids), request.sampling
    expected = [simulated_token(sampling, prompt + i, prompt, engine_config) for i in range(len(outputs))]
    assert outputs == expected, f"{request.request_id}: {outputs} delivered, {expected} expected"
    stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else engine_config.eos_token_ids))
    limit = min(sampling.max_tokens, engine_config.max_model_len - prompt)
    ends = [i for i, token in enumerate(outputs) if (token in stops and i >= sampling.min_tokens) or i + 1 == limit]
    if end.reason in ("stop", "length"):
        assert ends == [len(outputs) - 1], f"{request.request_id}: ends at {ends}, has {len(outputs)} outputs"
    else:
        assert not ends, f"{request.request_id}: {end.reason} after its natural end"


def refolded(records: list[list[Event]]) -> tuple[State, LawBook]:
    """A fresh fold of the journal's bytes, with the laws."""
    state, book, head = State(), LawBook(), EMPTY_HEAD._replace(engine_epoch=1)
    for events in records:
        record = seal(head, 0, encode(events))
        head = head_after(record)
        for event in decode(record):
            fold(state, event)
            book.observe(state, event)
    return state, book


def _events(records: list[list[Event]]) -> list[Event]:
    return [event for events in records for event in events]


def _start() -> object:
    from refold.scheduler.commands import StartWorker

    return StartWorker(kind="simulated", environment={})


def play(seed: int) -> tuple[int, str, str]:
    """Play a seed: (seed, digest, failure)."""
    try:
        return seed, Simulation(seed).play(), ""
    except BaseException:  # noqa: BLE001 - whatever it is, it is this seed's failure
        return seed, "", traceback.format_exc(limit=-4)


def main() -> int:
    """Play many seeds on all cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seeds, start, failed = range(options.first, options.first + options.seeds), time.perf_counter(), 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for seed, _, failure in pool.map(play, seeds, chunksize=25):
            if failure:
                failed += 1
                print(f"seed {seed} failed; again: python -m tests.kit.simulator --first {seed} --seeds 1\n{failure}")
            if failed >= 5:
                break
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} seeds, {failed} failed, {len(seeds) / seconds * 60:.0f} seeds per minute")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
