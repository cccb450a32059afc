"""The simulation: one seed is one engine's life, played in virtual time without threads.

A seed fixes everything: pool, budgets, depth of the window, policy, arrivals, how fast the worker is, and what goes wrong:
aborts, cache resets, lost workers, answers that come late, twice, too early or garbled, engines that die at a record's border
or lose their last records, and come back under another configuration. Every event passes the laws and the rules of conduct;
the simulated worker reads its whole context back before each sample; each output must be the token that the request's seed
has at that position; at the end every request has finished, every block is free, and a second engine decides it all again.
"""

import random

import msgspec

from refold.journal.events import EngineConfig, Media, Sampling
from refold.scheduler.commands import (
    AbortRequest,
    CloseSession,
    Command,
    ExpireSessions,
    ExtendSession,
    FailRequest,
    LiftQuarantine,
    LoseWorker,
    PauseEngine,
    ProposeDrafts,
    ReadyGrammar,
    RecordDigest,
    ResetCache,
    ResumeEngine,
    ScheduleStep,
    StartWorker,
    SubmitRequest,
)
from tests.kit.drive import config
from tests.kit.player import (
    POISON,
    Answer,
    AnswerAgain,
    AnswerAhead,
    AnswerWrong,
    LoseTheWorker,
    Order,
    Player,
    Reopen,
    Settle,
    Work,
)

TURNS = 70
MIN_STEPS = 50
MAX_TURNS = 4000
MAX_LIVES = 20
MAX_WAITING = 4

ORDINARY = ("abort", "reset", "lose", "crash", "again")
ROUGH = (*ORDINARY, "crash", "ahead", "wrong", "reopen", "no_worker")
FEATURES = ("extend", "extend", "extend", "close", "expire", "grammar", "grammar", "pause", "draft")
POISONED_LIVES = 0.15
HAZARDS = (
    (),
    ("abort",),
    ("reset",),
    ("extend", "extend", "close"),
    ORDINARY,
    ROUGH,
    (*ROUGH, *FEATURES),
    (*ORDINARY, *FEATURES),
)
PACES = ((0.60, 0.80), (0.40, 0.70), (0.50, 0.75), (0.34, 0.68), (0.45, 0.65))
"""Of the turns that are neither an arrival nor a hazard: up to the first, a step is planned; up to the second, the worker
works; beyond, an answer arrives."""

SHARED_PROMPT = [7, 1, 2, 1, 0, 2, 1, 1] * 4


class Simulation:
    """One life. `play()` runs it to the end and returns a digest of all that happened."""

    def __init__(self, seed: int, turns: int = TURNS) -> None:
        self.seed = seed
        self.turns = turns
        self.random = random.Random(seed)
        self.hazards = self.random.choice(HAZARDS)
        self.poison = random.Random(f"poison of {seed}")
        if self.poison.random() < POISONED_LIVES:
            self.hazards = ("poison", *self.hazards)
        self.pace = self.random.choice(PACES)
        self.arrivals = self.random.choice((0.01, 0.02, 0.04))
        self.is_pressed = self.random.random() < 0.3
        self.drive = Player(self._config())
        self.num_submitted = 0
        self._planned_nothing_at = -1

    @property
    def num_steps(self) -> int:
        """Steps planned so far, those of lost records not counted."""
        return self.drive.state.window.next_step

    def play(self) -> str:
        """Turns of random orders, `turns` of them and until enough steps were planned; then all is let end and judged.

        A life that has ended too early goes on. Returns the SHA-256 (hex) of the journal's bytes.
        """
        self.drive.open()
        num_turns, wanted = self.turns, MIN_STEPS - 20
        for _ in range(MAX_LIVES):
            self._live_on(num_turns, wanted)
            self.drive.obey(Settle())
            if self.num_steps >= MIN_STEPS:
                break
            num_turns, wanted = 0, MIN_STEPS
        return self.drive.judge()

    def _live_on(self, num_turns: int, wanted_steps: int) -> None:
        for _ in range(self.random.randint(1, 4)):
            self._submit()
        turn = 0
        while turn < num_turns or (self.num_steps < wanted_steps and turn < MAX_TURNS):
            self._turn()
            turn += 1

    def _turn(self) -> None:
        roll = self.random.random
        if roll() < self.arrivals and len(self.drive.state.queues.waiting) < MAX_WAITING:
            for _ in range(self.random.randint(1, 3)):
                self._submit()
        if self.hazards and roll() < 0.1:
            getattr(self, f"_{self.random.choice(self.hazards)}")()
        order = self._next_order(roll())
        if order is None:
            self._go_on()
            return
        num_records = len(self.drive.records)
        self.drive.obey(order)
        if type(order) is ScheduleStep and len(self.drive.records) == num_records:
            self._planned_nothing_at = num_records
        if roll() < 0.01:
            self.drive.obey(RecordDigest())

    def _go_on(self) -> None:
        """Nothing is in flight and nothing can be planned: what would people do?"""
        state = self.drive.state
        waiting = [r.request_id for r in state.queues.waiting if r.waits_for_grammar]
        if state.paused is not None and self.random.random() < 0.5:
            self.drive.obey(ResumeEngine())
        elif waiting and self.random.random() < 0.5:
            self.drive.obey(ReadyGrammar(request_id=waiting[0]))
        elif len(state.queues.waiting) < MAX_WAITING:
            self._submit()

    def _next_order(self, roll: float) -> Order | Command | None:
        """Plan, work or answer, as the pace has it; something that has nothing to act on gives way to the next."""
        drive = self.drive
        is_full = len(drive.state.window.in_flight) >= drive.config.max_in_flight_steps
        can_plan = not is_full and self._planned_nothing_at != len(drive.records)
        if can_plan and (roll < self.pace[0] or not (drive.orders or drive.answers)):
            return ScheduleStep()
        if drive.orders and (roll < self.pace[1] or not drive.answers):
            return Work()
        return Answer() if drive.answers else None

    # -- what there is ------------------------------------------------------------------------------------------------

    def _config(self, **fixed: object) -> EngineConfig:
        pick = self.random.choice
        block_size = pick((1, 2, 4, 8))
        budget = pick((4, 8, 32))
        depth = pick((1, 2, 3, 4, 8))
        drawn = {
            "vocab_size": pick((3, 50, 1000)),
            "eos_token_ids": pick(((), (2,))),
            "block_size": block_size,
            "num_blocks": pick((24, 32, 32, 48, 96)) // block_size,
            "max_model_len": pick((40, 60, 90)),
            "max_num_seqs": pick((1, 2, 4, 4, budget)) if budget > 4 else pick((2, 4)),
            "max_num_batched_tokens": budget,
            "max_in_flight_steps": depth,
            "policy": pick(("fcfs", "priority", "fair_share")),
            "enable_prefix_caching": pick((True, True, False)),
            "long_prefill_token_threshold": pick((0, 0, 3)),
            "watermark_blocks": pick((0, 1)),
            "admit_full_sequence": pick((True, False)),
            "decode_stagger": pick((1, 1, depth)),
            "speculation": pick(("off", "off", "ngram", "worker")),
            "num_speculative_tokens": pick((1, 3, 8)),
            "speculation_by_batch": pick(((), ((2, 3), (4, 1)))),
            "encoder_budget_tokens": pick((6, 12)),
            "encoder_cache_tokens": pick((8, 16)),
            "tenant_weights": {"a": 3},
        }
        pressed = {
            "vocab_size": 3,
            "num_blocks": pick((24, 32)) // block_size,
            "max_num_seqs": 4,
            "max_in_flight_steps": pick((4, 8)),
            "admit_full_sequence": False,
            "decode_stagger": 1,
        }
        return config(**(drawn | (pressed if self.is_pressed else {}) | fixed))

    def _submit(self) -> None:
        rng, request_id = self.random, f"r{self.num_submitted}"
        half_a_pool = self.drive.config.num_blocks * self.drive.config.block_size // 2
        length = min(rng.choice((1, 3, 8, 17, 30)), half_a_pool)
        prompt = SHARED_PROMPT[:length] if rng.random() < 0.5 else [rng.randrange(3) for _ in range(length)]
        max_tokens = min(rng.choice((1, 2, 5, 12, 24)), half_a_pool)
        self.drive.obey(
            SubmitRequest(
                request_id=request_id,
                prompt_token_ids=[token % self.drive.config.vocab_size for token in prompt],
                sampling=self._sampling(max_tokens),
                arrival_ns=self.num_submitted,
                priority=rng.randrange(3),
                cache_salt=rng.choice(("", "", "", "s")),
                adapter=self._adapter(length + max_tokens),
                tenant=rng.choice(("a", "b")),
                media=self._media(length) if rng.random() < 0.2 else [],
                resumable="extend" in self.hazards and rng.random() < (0.8 if self.is_pressed else 0.5),
                grammar="json" if "grammar" in self.hazards and rng.random() < 0.3 else "",
            )
        )
        self.num_submitted += 1
        if self.is_pressed and "extend" in self.hazards:
            self._extend(request_id)

    def _sampling(self, max_tokens: int) -> Sampling:
        return Sampling(
            seed=self.random.randrange(2**40),
            max_tokens=max_tokens,
            min_tokens=self.random.choice((0, 0, min(2, max_tokens))),
            stop_token_ids=self.random.choice(((), (1,))),
        )

    def _adapter(self, end: int) -> str:
        """Of some, one that kills the worker at one of its positions."""
        if "poison" in self.hazards and self.poison.random() < 0.2:
            return f"{POISON}{self.poison.randrange(end)}"
        return self.random.choice(("", "", "", "lora"))

    def _media(self, length: int) -> list[Media]:
        """One or two pictures out of three."""
        spans, start = [], self.random.randrange(4)
        while start + 6 <= length and len(spans) < 2:
            digest, size = self.random.choice((("cat", 3), ("dog", 5), ("sky", 6)))
            spans.append(Media(digest=digest, start=start, num_tokens=size))
            start += size + self.random.randrange(3)
        return spans

    # -- what clients do ----------------------------------------------------------------------------------------------

    def _live(self) -> list[str]:
        return [r.request_id for r in self.drive.state.requests.live()]

    def _sessions(self) -> list[str]:
        return [r.request_id for r in self.drive.state.requests.sessions.values() if not r.input_closed]

    def _abort(self) -> None:
        if live := self._live():
            self.drive.obey(AbortRequest(request_id=self.random.choice(live)))

    def _extend(self, newest: str = "") -> None:
        rng, sessions = self.random, self._sessions()
        if newest:
            sessions = [each for each in sessions if each == newest]
        for _ in range(rng.randint(1, 3) if sessions else 0):
            chunk = [rng.randrange(3) for _ in range(rng.choice((0, 1, 5, 9)))]
            stops = rng.choice(((), (1,)))
            sampling = Sampling(seed=rng.randrange(2**40), max_tokens=rng.choice((1, 3, 8)), stop_token_ids=stops)
            self.drive.obey(ExtendSession(request_id=rng.choice(sessions), token_ids=chunk, sampling=sampling))

    def _close(self) -> None:
        if sessions := self._sessions():
            self.drive.obey(CloseSession(request_id=self.random.choice(sessions)))

    def _draft(self) -> None:
        """Somebody proposes drafts; they are taken only where nothing is in flight."""
        for _ in range(len(self.drive.state.window.in_flight) if self.random.random() < 0.8 else 0):
            self.drive.obey(Work())
            self.drive.obey(Answer())
        running = [r.request_id for r in self.drive.state.queues.running if not r.num_in_flight_tokens]
        if live := running or self._live():
            drafts = [self.random.randrange(3) for _ in range(self.random.randrange(1, 4))]
            self.drive.obey(ProposeDrafts(request_id=self.random.choice(live), token_ids=drafts))

    # -- what the shell does ------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        since = [r.idle_since_ns for r in self.drive.state.queues.idle]
        self.drive.obey(ExpireSessions(idle_before_ns=self.random.choice([*since, len(self.drive.orders_given) - 40])))

    def _grammar(self) -> None:
        waiting = [r.request_id for r in self.drive.state.requests.live() if r.waits_for_grammar]
        roll = self.random.random()
        if self.drive.answers and any(r.grammar for r in self.drive.state.window.in_flight[0].requests) and roll < 0.4:
            self.drive.obey(Answer(refuse=True))
        elif waiting and roll < 0.9:
            self.drive.obey(ReadyGrammar(request_id=waiting[0]))
        elif waiting:
            self.drive.obey(FailRequest(request_id=waiting[0], message="the grammar does not compile"))

    def _pause(self) -> None:
        if self.drive.state.paused is None:
            self.drive.obey(PauseEngine(mode=self.random.choice(("new", "all", "drain"))))
        if self.random.random() < 0.5:
            self.drive.obey(ResumeEngine())

    def _reset(self) -> None:
        """Sometimes the next steps are planned at once, when some of what was in flight has come back and some has not."""
        self.drive.obey(ResetCache(reset_running=self.random.random() < 0.8))
        steps = self.random.choice((0, 0, 2, 3, 5))
        for _ in range(steps):
            self.drive.obey(Work())
            self.drive.obey(Answer())
        for _ in range(steps):
            self.drive.obey(ScheduleStep())

    # -- what goes wrong ----------------------------------------------------------------------------------------------

    def _lose(self) -> None:
        self.drive.obey(LoseTheWorker(by_step="poison" in self.hazards and self.poison.random() < 0.3))

    def _poison(self) -> None:
        """Whoever was found out comes again, and is sent away; now and then someone lets it in."""
        quarantined = list(self.drive.state.suspicion.quarantined.values())
        if not quarantined:
            return
        _, request_id = self.random.choice(quarantined)
        if self.random.random() < 0.2:
            self.drive.obey(LiftQuarantine(request_id=request_id))
            return
        asked = {o.request_id: o for o in self.drive.orders_given if type(o) is SubmitRequest}[request_id]
        num_records = len(self.drive.records)
        self.drive.obey(msgspec.structs.replace(asked, request_id=f"again{num_records}", sampling=self._sampling(9)))
        assert asked.resumable or len(self.drive.records) == num_records, "quarantined content came in again"

    def _no_worker(self) -> None:
        """For a while there is none."""
        self.drive.obey(LoseWorker(reason="simulated loss"))
        for _ in range(self.random.randrange(6)):
            self._turn()
        self.drive.obey(StartWorker(kind="simulated", environment={}))

    def _again(self) -> None:
        self.drive.obey(AnswerAgain(back=self.random.randrange(8)))

    def _ahead(self) -> None:
        self.drive.obey(AnswerAhead())

    def _wrong(self) -> None:
        self.drive.obey(AnswerWrong(how=self.random.choice(("counts", "extra", "token", "position"))))

    def _crash(self) -> None:
        self.drive.obey(Reopen(lost=self.random.choice((0, 0, 1, 2, 5))))

    def _reopen(self) -> None:
        """The next life has another configuration, of the same model."""
        now = self.drive.config
        drawn = self._config(vocab_size=now.vocab_size, eos_token_ids=now.eos_token_ids)
        changes = {
            name: value for name in drawn.__struct_fields__ if (value := getattr(drawn, name)) != getattr(now, name)
        }
        if self.random.random() < 0.5:
            changes = {name: changes[name] for name in changes if self.random.random() < 0.5}
        self.drive.obey(
            Reopen(lost=self.random.choice((0, 0, 1)), in_order=self.random.random() < 0.5, changes=changes)
        )
