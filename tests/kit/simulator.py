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
from contextlib import suppress

from refold.gpu.batch import StepOutput
from refold.gpu.simulated import simulated_token
from refold.journal.codec import decode, encode
from refold.journal.errors import Rejected
from refold.journal.events import (
    EngineConfig,
    Event,
    Media,
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    Sampling,
    SessionExtended,
    SessionTurnEnded,
    StaleOutputConsumed,
)
from refold.journal.record import EMPTY_HEAD, head_after, seal
from refold.scheduler.commands import (
    CloseSession,
    ExpireSessions,
    ExtendSession,
    FailRequest,
    LoseWorker,
    PauseEngine,
    ProposeDrafts,
    ReadyGrammar,
    RecordDigest,
    ResetCache,
    ResumeEngine,
    StartWorker,
)
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State, digest
from tests.kit.drive import Drive, config


EVERYTHING = (
    *("abort", "reset", "lose", "crash", "late"),
    *("extend", "extend", "extend", "close", "expire", "grammar", "grammar", "pause", "draft"),
)


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
            (
                (),
                ("abort",),
                ("extend", "extend", "close"),
                ("abort", "reset", "lose", "crash", "late"),
                EVERYTHING,
                EVERYTHING,
            )
        )

    def play(self) -> str:
        """Turns of random orders, then quiet ones until everything has finished."""
        self.drive.open()
        for _ in range(self.turns):
            self._turn()
        self._let_end()
        self.drive.run()
        self._check_end()
        return digest(self.drive.state)

    def _let_end(self) -> None:
        """Nothing is held back any more: no pause, no grammar outstanding, no session open."""
        self.drive.do(ResumeEngine())
        for request in self.drive.state.requests.live():
            self.drive.do(ReadyGrammar(request_id=request.request_id))
            self.drive.do(CloseSession(request_id=request.request_id))

    def _config(self) -> EngineConfig:
        pick = self.random.choice
        block_size = pick((1, 2, 4, 8))
        budget = pick((4, 8, 32))
        depth = pick((1, 2, 3, 4, 8))
        return config(
            vocab_size=pick((3, 50, 1000)),
            eos_token_ids=pick(((), (2,))),
            block_size=block_size,
            num_blocks=pick((64, 96, 160)) // block_size,
            max_model_len=pick((40, 60, 200)),
            max_num_seqs=pick((1, 2, 4, budget)) if budget > 4 else pick((1, 2, 4)),
            max_num_batched_tokens=budget,
            max_in_flight_steps=depth,
            policy=pick(("fcfs", "priority", "fair_share")),
            enable_prefix_caching=pick((True, True, False)),
            long_prefill_token_threshold=pick((0, 0, 3)),
            watermark_blocks=pick((0, 1)),
            admit_full_sequence=pick((True, False)),
            decode_stagger=pick((1, 1, depth)),
            speculation=pick(("off", "off", "ngram", "worker")),
            num_speculative_tokens=pick((1, 3, 8)),
            speculation_by_batch=pick(((), ((2, 3), (4, 1)))),
            encoder_budget_tokens=pick((6, 12)),
            encoder_cache_tokens=pick((8, 16)),
            tenant_weights={"a": 3},
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
                cache_salt=rng.choice(("", "", "s")),
                tenant=rng.choice(("a", "b")),
                media=self._media(length) if rng.random() < 0.2 else [],
                resumable="extend" in self.hazards and rng.random() < 0.5,
                grammar="json" if "grammar" in self.hazards and rng.random() < 0.3 else "",
            )
        except Rejected:
            return
        self.num_submitted += 1

    def _media(self, length: int) -> list[Media]:
        """One or two pictures out of three."""
        spans, start = [], self.random.randrange(4)
        while start + 6 <= length and len(spans) < 2:
            digest_, size = self.random.choice((("cat", 3), ("dog", 5), ("sky", 6)))
            spans.append(Media(digest=digest_, start=start, num_tokens=size))
            start += size + self.random.randrange(3)
        return spans

    def _sessions(self) -> list[str]:
        return [r.request_id for r in self.drive.state.requests.sessions.values() if not r.input_closed]

    def _extend(self) -> None:
        rng = self.random
        for request_id in self._sessions()[:1]:
            chunk = [rng.randrange(3) for _ in range(rng.choice((0, 1, 5, 9)))]
            sampling = Sampling(seed=rng.randrange(2**40), max_tokens=rng.choice((1, 3, 8)))
            with suppress(Rejected):
                self.drive.do(ExtendSession(request_id=request_id, token_ids=chunk, sampling=sampling))

    def _close(self) -> None:
        sessions = self._sessions()
        if sessions:
            self.drive.do(CloseSession(request_id=self.random.choice(sessions)))

    def _expire(self) -> None:
        self.drive.do(ExpireSessions(idle_before_ns=0))

    def _grammar(self) -> None:
        waiting = [r.request_id for r in self.drive.state.requests.live() if r.waits_for_grammar]
        if waiting and self.random.random() < 0.8:
            self.drive.do(ReadyGrammar(request_id=waiting[0]))
        elif waiting:
            self.drive.do(FailRequest(request_id=waiting[0], message="the grammar does not compile"))

    def _pause(self) -> None:
        self.drive.do(PauseEngine(mode=self.random.choice(("new", "all", "drain"))))
        if self.random.random() < 0.7:
            self.drive.do(ResumeEngine())

    def _draft(self) -> None:
        live = self.drive.state.requests.live()
        if live:
            drafts = [self.random.randrange(3) for _ in range(self.random.randrange(4))]
            self.drive.do(ProposeDrafts(request_id=self.random.choice(live).request_id, token_ids=drafts))

    def _abort(self) -> None:
        live = self.drive.state.requests.live()
        if live:
            self.drive.abort(self.random.choice(live).request_id)

    def _reset(self) -> None:
        self.drive.do(ResetCache(reset_running=True))

    def _lose(self) -> None:
        if self.drive.do(LoseWorker(reason="simulated loss")):
            self.drive.do(StartWorker(kind="simulated", environment={}))

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
        transcript = Transcript(drive.config)
        for event in _events(drive.records):
            transcript.observe(event)


class Transcript:
    """What each request must be given, token by token, from its seed alone."""

    def __init__(self, engine_config: EngineConfig) -> None:
        self.config = engine_config
        self.requests: dict[int, RequestSubmitted] = {}
        self.sampling: dict[int, Sampling] = {}
        self.context: dict[int, list[int]] = {}
        self.turn_start: dict[int, int] = {}
        self.queued: dict[int, list[SessionExtended]] = {}
        self.idle: set[int] = set()

    def observe(self, event: Event) -> None:
        """Check what one event gives to whom, and why it ends."""
        match event:
            case RequestSubmitted():
                self.requests[event.handle], self.sampling[event.handle] = event, event.sampling
                self.context[event.handle] = list(event.prompt_token_ids)
                self.turn_start[event.handle] = len(event.prompt_token_ids)
                self.queued[event.handle] = []
            case OutputDelivered():
                counts = event.counts or [1] * len(event.handles)
                self._give(event.handles, counts, [True] * len(counts), event.token_ids)
            case StaleOutputConsumed():
                self._give(event.handles, event.counts, event.delivered, event.token_ids)
            case SessionExtended():
                self.queued[event.handle].append(event)
                self._begin(event.handle)
            case SessionTurnEnded():
                self._check_end(event.handle, event.reason)
                self.idle.add(event.handle)
                self._begin(event.handle)
            case RequestFinished() if event.handle not in self.idle:
                self._check_end(event.handle, event.reason)

    def _give(self, handles: list[int], counts: list[int], delivered: list[bool], token_ids: list[int]) -> None:
        tokens = iter(token_ids)
        for handle, count, is_delivered in zip(handles, counts, delivered, strict=True):
            for _ in range(count):
                token = next(tokens)
                if is_delivered:
                    self._check_token(handle, token)
                    self.context[handle].append(token)

    def _check_token(self, handle: int, token: int) -> None:
        context = self.context[handle]
        assert not self._ends(handle), f"handle {handle} got a token after its natural end"
        expected = simulated_token(self.sampling[handle], len(context), self.turn_start[handle], self.config)
        assert token == expected, f"handle {handle}: {token} at position {len(context)}, {expected} expected"

    def _ends(self, handle: int) -> str:
        """The reason that the last token brings, if it ends the turn."""
        context, sampling = self.context[handle], self.sampling[handle]
        outputs = len(context) - self.turn_start[handle]
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.config.eos_token_ids))
        if outputs and context[-1] in stops and outputs > sampling.min_tokens:
            return "stop"
        return "length" if outputs == sampling.max_tokens or len(context) == self.config.max_model_len else ""

    def _check_end(self, handle: int, reason: str) -> None:
        natural = self._ends(handle)
        assert natural == (reason if reason in ("stop", "length") else ""), (
            f"handle {handle}: {reason}, {natural} is due"
        )

    def _begin(self, handle: int) -> None:
        if handle in self.idle and self.queued[handle]:
            chunk = self.queued[handle].pop(0)
            self.idle.remove(handle)
            self.sampling[handle] = chunk.sampling
            self.context[handle] = self.context[handle][:-1] + chunk.token_ids
            self.turn_start[handle] = len(self.context[handle])


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
