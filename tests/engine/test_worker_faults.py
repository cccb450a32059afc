"""A worker that dies, lies or stammers costs latency and nothing else; one that is hopeless stops the engine, with the cause."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from refold import Engine, InvariantViolation, Rejected, SamplingParams, WorkerLost
from refold.engine.engine import Completion
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.simulated import SimulatedWorker
from refold.journal.events import EngineClosed, EngineConfig, Event, RequestQuarantined, WorkerStarted
from refold.journal.events import WorkerLost as WorkerLostEvent
from refold.journal.stores import open_reader
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from tests.kit.engines import MODEL, lawful_events, must_produce

PROMPTS = [[number, 7] for number in range(6)]
SAMPLINGS = [SamplingParams(seed=number, max_tokens=30) for number in range(6)]

Fault = Callable[[StepOutput], Any]


class FaultyWorker(SimulatedWorker):
    """Computes rightly; at the `at`-th order of its life it answers with what `fault` makes of that, or dies of it."""

    def __init__(self, config: EngineConfig, fault: Fault | None, at: int, step_seconds: float = 0.0) -> None:
        super().__init__(config, step_seconds)
        self._fault, self._at, self._orders = fault, at, 0

    def execute(self, order: WorkOrder) -> StepOutput:
        output = super().execute(order)
        self._orders += 1
        return output if self._fault is None or self._orders != self._at else self._fault(output)


def workers(
    fault: Fault, at: int, how_many: int = 1
) -> tuple[Callable[[EngineConfig], FaultyWorker], list[FaultyWorker]]:
    """A maker of workers of which the first `how_many` are faulty, and the list of those made."""
    made: list[FaultyWorker] = []

    def make(config: EngineConfig) -> FaultyWorker:
        made.append(FaultyWorker(config, fault if len(made) < how_many else None, at))
        return made[-1]

    return make, made


def dies(output: StepOutput) -> StepOutput:
    raise RuntimeError("an illegal memory access was encountered\nCUDA kernel errors might be reported later \ud800")


def exits(output: StepOutput) -> StepOutput:
    raise SystemExit(3)


FAULTS: dict[str, tuple[Fault, str]] = {
    "it raises": (dies, "the worker failed with RuntimeError: an illegal memory access was encountered CUDA"),
    "it exits": (exits, "the worker failed with SystemExit: 3"),
    "a wrong position": (
        lambda o: msgspec.structs.replace(o, positions=[p + 1 for p in o.positions]),
        "worker sampled position",
    ),
    "a token that doesn't exist": (
        lambda o: msgspec.structs.replace(o, token_ids=[1000] * len(o.token_ids)),
        "worker sampled tokens",
    ),
    "a negative token": (
        lambda o: msgspec.structs.replace(o, token_ids=[-1] * len(o.token_ids)),
        "worker sampled tokens -1",
    ),
    "a token that is no integer": (
        lambda o: msgspec.structs.replace(o, token_ids=[1.0] * len(o.token_ids)),
        "columns that are no lists of integers",
    ),
    "a column too long": (lambda o: msgspec.structs.replace(o, counts=[*o.counts, 1]), "worker answered step"),
    "a token too few": (lambda o: msgspec.structs.replace(o, token_ids=o.token_ids[1:]), "worker answered step"),
    "two tokens for one": (lambda o: msgspec.structs.replace(o, counts=[2] * len(o.counts)), "worker answered step"),
    "the answer before once more": (
        lambda o: msgspec.structs.replace(o, step=o.step - 1),
        "worker answered with step",
    ),
    "an answer too early": (lambda o: msgspec.structs.replace(o, step=o.step + 1), "worker answered with step"),
    "another generation": (lambda o: msgspec.structs.replace(o, generation=0), "of generation 0"),
    "log-probabilities of another kind": (
        lambda o: msgspec.structs.replace(o, logprobs=[[1, 2]]),
        "log-probabilities that are no EntrySurprisals",
    ),
    "log-probabilities in no list": (
        lambda o: msgspec.structs.replace(o, prompt_logprobs=None),
        "log-probabilities that are no EntrySurprisals",
    ),
    "no answer at all": (lambda o: None, "with a NoneType, no StepOutput"),
    "something else": (lambda o: {"step": o.step}, "with a dict, no StepOutput"),
}


def check(completions: list[Completion]) -> None:
    for prompt, sampling, completion in zip(PROMPTS, SAMPLINGS, completions, strict=True):
        assert completion.token_ids == must_produce(prompt, sampling)
        assert completion.finish_reason == "length"


def losses(events: list[Event]) -> list[WorkerLostEvent]:
    return [event for event in events if isinstance(event, WorkerLostEvent)]


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("at", [2, 9])
def test_a_worker_at_fault_is_replaced_and_its_requests_come_out_whole(name: str, at: int) -> None:
    fault, reason = FAULTS[name]
    make, made = workers(fault, at)
    journal = MemoryJournal()
    with Engine(MODEL, MemoryStore(journal), make_worker=make, max_in_flight_steps=3) as engine:
        check(engine.run(PROMPTS, SAMPLINGS))
        assert engine.stats().lost_workers == 1
    assert len(made) == 2
    events = lawful_events(MemoryStore(journal))
    (lost,) = losses(events)
    assert reason in lost.reason
    assert "\n" not in lost.reason
    assert [e.generation for e in events if isinstance(e, WorkerStarted)] == [1, 2]


class MeddlingWorker(SimulatedWorker):
    """Computes rightly, then changes whatever lists it was given, and those that it has returned."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._last: StepOutput | None = None

    def execute(self, order: WorkOrder) -> StepOutput:
        if self._last is not None:
            self._last.token_ids.clear()
            for told in (*self._last.logprobs, *self._last.prompt_logprobs):
                told.surprisals.clear()
        output = self._last = super().execute(order)
        scheduled = order.scheduled
        scheduled.handles.sort(reverse=True)
        scheduled.first_positions[:] = [position + 1 for position in scheduled.first_positions]
        scheduled.num_tokens.append(7)
        scheduled.chunk_entries.append(0)
        scheduled.admissions.clear()
        for allocation in scheduled.allocations:
            allocation.block_ids.append(1)
        for admitted in order.admitted:
            admitted.token_ids.clear()
        return output


def test_a_worker_may_change_what_it_was_given_and_what_it_has_returned() -> None:
    """The journal may not have written the order yet when the worker has it."""
    journal = MemoryJournal()
    with Engine(
        MODEL, MemoryStore(journal), make_worker=MeddlingWorker, max_in_flight_steps=4, num_blocks=16
    ) as engine:
        check(engine.run(PROMPTS, SAMPLINGS))
        asking = SamplingParams(seed=1, max_tokens=5, logprobs=2, prompt_logprobs=2)
        (told,) = engine.run([[1, 2, 3]], [asking])
        assert engine.stats().lost_workers == 0
    assert losses(lawful_events(MemoryStore(journal))) == []
    with Engine(MODEL, max_in_flight_steps=4, num_blocks=16) as engine:
        assert engine.run([[1, 2, 3]], [asking])[0].logprobs == told.logprobs


def test_two_losses_with_completed_steps_between_them_are_two_replacements() -> None:
    make, made = workers(dies, at=5, how_many=5)
    with Engine(MODEL, make_worker=make) as engine:
        check(engine.run(PROMPTS, SAMPLINGS))
        assert engine.stats().lost_workers == 5
    assert len(made) == 6


def test_a_worker_that_dies_of_every_step_stops_the_engine_with_the_cause_and_convicts_nobody(tmp_path: Path) -> None:
    """With two deaths behind them the requests are on trial; the worker that is to try them dies of a step of nobody's."""
    make, made = workers(dies, at=1, how_many=100)
    journal = str(tmp_path / "journal.db")
    with Engine(MODEL, journal, make_worker=make) as engine:
        with pytest.raises(WorkerLost, match=r"at a made-up step of one token too.*illegal memory access"):
            engine.run(PROMPTS, SAMPLINGS)
        with pytest.raises(WorkerLost, match="so it isn't the requests"):
            engine.enqueue([1])
        with pytest.raises(WorkerLost, match="illegal memory access"):
            engine.stats()
    assert len(made) == 5
    events = lawful_events(open_reader(journal))
    assert len(losses(events)) == 2, "a worker that never was ready is nobody's loss"
    assert isinstance(events[-1], EngineClosed), "it didn't end without a word"
    assert events[-1].reason.startswith("the worker fails at a made-up step of one token too, so it isn't the requests")
    assert not [event for event in events if isinstance(event, RequestQuarantined)]
    with pytest.raises(WorkerLost, match="so it isn't the requests"), Engine(MODEL, journal, make_worker=make):
        pass
    with Engine(MODEL, journal) as engine:
        assert engine.recovery is not None
        assert engine.recovery.requests == 6
        check(engine.wait([done.request_id for done in engine.wait()]))


@pytest.mark.parametrize("name", ["it exits", "a wrong position", "a token that doesn't exist", "no answer at all"])
def test_a_worker_at_fault_from_its_first_step_on_convicts_nobody_however_it_fails(name: str) -> None:
    make, _ = workers(FAULTS[name][0], at=1, how_many=100)
    journal = MemoryJournal()
    with (
        Engine(MODEL, MemoryStore(journal), make_worker=make) as engine,
        pytest.raises(WorkerLost, match="made-up step"),
    ):
        engine.run(PROMPTS, SAMPLINGS)
    assert not [e for e in lawful_events(MemoryStore(journal)) if isinstance(e, RequestQuarantined)]


def test_a_device_that_fails_at_everything_but_one_token_stops_the_engine_after_four_verdicts(tmp_path: Path) -> None:
    """What the made-up step can't see: four requests in a row are found to kill it and nothing has worked in between."""

    class Weak(SimulatedWorker):
        def execute(self, order: WorkOrder) -> StepOutput:
            if sum(order.scheduled.num_tokens) > 1:
                raise RuntimeError("an illegal memory access was encountered")
            return super().execute(order)

    journal = str(tmp_path / "journal.db")
    with Engine(MODEL, journal, make_worker=Weak) as engine, pytest.raises(WorkerLost, match="illegal memory access"):
        engine.run(PROMPTS, SAMPLINGS)
    events = lawful_events(open_reader(journal))
    assert len(losses(events)) <= 16
    assert [type(event) for event in events].count(RequestQuarantined) == 4
    assert isinstance(events[-1], EngineClosed)
    with Engine(MODEL, journal) as engine:
        assert engine.recovery is not None
        assert engine.recovery.requests == 2
        assert [done.finish_reason for done in engine.wait()] == ["length"] * 2


def test_a_poison_that_is_the_first_and_only_request_ever_ends() -> None:
    class Poisoned(SimulatedWorker):
        def execute(self, order: WorkOrder) -> StepOutput:
            if any(admitted.token_ids[0] == 666 for admitted in order.admitted):
                raise RuntimeError("segmentation fault")
            return super().execute(order)

    with Engine(MODEL, make_worker=Poisoned) as engine:
        assert engine.run([[666]], [SamplingParams(seed=1)])[0].finish_reason == "error"
        assert engine.stats().lost_workers == 3


@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("kills", [[3], [0, 5], [7, 8]])
def test_the_requests_that_kill_the_worker_are_found_and_the_others_come_out_whole(at: int, kills: list[int]) -> None:
    """The poison is a token of the prompt: whoever computes it dies, at once or only after some tokens."""
    deaths = 0

    class Poisoned(SimulatedWorker):
        def execute(self, order: WorkOrder) -> StepOutput:
            nonlocal deaths
            output = super().execute(order)
            for handle in order.scheduled.handles:
                if self._slots[handle].tokens[0] == 666 and len(self._slots[handle].tokens) > 2 + at:
                    deaths += 1
                    raise RuntimeError("segmentation fault")
            return output

    prompts = [[666 if number in kills else 1, number] for number in range(10)]
    samplings = [SamplingParams(seed=number, max_tokens=12) for number in range(10)]
    journal = MemoryJournal()
    with Engine(MODEL, MemoryStore(journal), make_worker=Poisoned, max_num_seqs=10) as engine:
        ids = [
            engine.enqueue(p, s, request_id=f"r{n}") for n, (p, s) in enumerate(zip(prompts, samplings, strict=True))
        ]
        done = engine.wait(ids)
        for number, completion in enumerate(done):
            if number in kills:
                assert completion.finish_reason == "error"
            else:
                assert completion.token_ids == must_produce(prompts[number], samplings[number])
        assert sorted(engine.quarantined()) == [f"r{number}" for number in kills]
        assert deaths <= len(kills) * (math.ceil(math.log2(10)) + 3)
        with pytest.raises(Rejected, match="which killed its workers"):
            engine.enqueue(prompts[kills[0]], SamplingParams(max_tokens=1, seed=9))
        engine.lift_quarantine(f"r{kills[0]}")
        with pytest.raises(Rejected, match="nothing that request 'r1' asked for is quarantined"):
            engine.lift_quarantine("r1")
        assert engine.run([prompts[kills[0]]], SamplingParams(max_tokens=at or 1))[0].finish_reason == (
            "length" if at else "error"
        )
    lawful_events(MemoryStore(journal))


def test_a_worker_that_cant_be_built_is_an_error_at_open(tmp_path: Path) -> None:
    def make(config: EngineConfig) -> SimulatedWorker:
        raise MemoryError("cannot allocate 512 GiB")

    journal = str(tmp_path / "journal.db")
    with (
        pytest.raises(WorkerLost, match="MemoryError: cannot allocate 512 GiB"),
        Engine(MODEL, journal, make_worker=make),
    ):
        pass
    with Engine(MODEL, journal) as engine:
        assert engine.run([[1]], SamplingParams(max_tokens=2))[0].finish_reason == "length"


NO_TEXTS = [
    ("kind", None, "kind is None: make it a text"),
    ("environment", lambda: {"gpus": 8}, r"environment\(\) has 'gpus': 8: make both of them texts"),
    ("environment", lambda: {None: "a"}, r"environment\(\) has None: 'a'"),
    ("environment", lambda: {"host": "\udce4"}, r"environment\(\) has 'host': '\\udce4'"),
    ("environment", lambda: None, r"environment\(\) is a NoneType: return a dict of texts"),
]


@pytest.mark.parametrize(("name", "value", "told"), NO_TEXTS, ids=range(len(NO_TEXTS)))
def test_a_worker_that_introduces_itself_by_no_texts_is_at_fault_and_not_refold(
    name: str, value: object, told: str
) -> None:
    def make(config: EngineConfig) -> SimulatedWorker:
        worker = SimulatedWorker(config)
        setattr(worker, name, value)
        return worker

    journal = MemoryJournal()
    with pytest.raises(WorkerLost, match=f"the worker's {told}"), Engine(MODEL, MemoryStore(journal), make_worker=make):
        pass
    assert isinstance(lawful_events(MemoryStore(journal))[-1], EngineClosed)


def test_a_successor_that_cant_be_built_counts_as_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    made = 0

    def make(config: EngineConfig) -> FaultyWorker:
        nonlocal made
        made += 1
        if made > 1:
            raise Rejected("the model's file is gone")
        return FaultyWorker(config, dies, 3)

    with Engine(MODEL, make_worker=make) as engine, pytest.raises(WorkerLost, match="illegal memory access"):
        engine.run(PROMPTS, SAMPLINGS)
    assert made == 4
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in logged] == ["worker_lost", *["worker_not_started"] * 3, "engine_stopped"]
    assert [line["reason"] for line in logged[1:4]] == ["the model's file is gone"] * 3


def test_output_of_a_worker_that_was_given_up_is_refused() -> None:
    """A worker answers wrongly and goes on with the next order, which it was given before: that answer comes too late."""
    entered, release = threading.Event(), threading.Event()

    class Slow(FaultyWorker):
        def execute(self, order: WorkOrder) -> StepOutput:
            if self._fault is not None and self._orders == self._at:
                entered.set()
                release.wait(10)
            return super().execute(order)

    made: list[Slow] = []

    def make(config: EngineConfig) -> Slow:
        made.append(Slow(config, FAULTS["a token that doesn't exist"][0] if not made else None, 4, step_seconds=0.005))
        return made[-1]

    threading.Thread(target=lambda: (entered.wait(10), release.set()), daemon=True).start()
    with Engine(MODEL, make_worker=make, max_in_flight_steps=4) as engine:
        check(engine.run(PROMPTS, SAMPLINGS))
    assert entered.is_set()


def test_a_worker_that_fails_to_close_disturbs_nobody() -> None:
    class Sticky(SimulatedWorker):
        def close(self) -> None:
            raise OSError("the device is busy")

    with Engine(MODEL, make_worker=Sticky) as engine:
        check(engine.run(PROMPTS, SAMPLINGS))


@pytest.mark.parametrize("command", ["ScheduleStep", "CompleteStep"])
def test_a_bug_in_a_decision_about_steps_stops_the_engine_and_leaves_a_valid_journal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from refold.engine import turns
    from refold.scheduler.decide import decide

    def buggy(state: Any, order: Any) -> Any:
        if type(order).__name__ == command and state.window.next_step >= 5:
            raise AssertionError("a counter went below zero")
        return decide(state, order)

    journal = str(tmp_path / "journal.db")
    with monkeypatch.context() as patch:
        patch.setattr(turns, "decide", buggy)
        with Engine(MODEL, journal) as engine:
            with pytest.raises(InvariantViolation, match=f"{command}: AssertionError: a counter went below zero"):
                engine.run(PROMPTS, SAMPLINGS)
            with pytest.raises(InvariantViolation, match="keep the journal and report it"):
                engine.enqueue([1])
    events = lawful_events(open_reader(journal))
    assert isinstance(events[-1], EngineClosed)
    assert "a counter went below zero" in events[-1].reason
    with Engine(MODEL, journal) as engine:
        check(engine.wait([done.request_id for done in engine.wait()]))


def test_a_bug_in_a_decision_about_one_request_is_that_request_s_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.engine import turns
    from refold.scheduler.commands import SubmitRequest
    from refold.scheduler.decide import decide

    def buggy(state: Any, order: Any) -> Any:
        if isinstance(order, SubmitRequest) and order.request_id == "cursed":
            raise KeyError("cursed")
        return decide(state, order)

    monkeypatch.setattr(turns, "decide", buggy)
    with Engine(MODEL) as engine:
        with pytest.raises(InvariantViolation, match="this is a bug of refold"):
            engine.enqueue([1], request_id="cursed")
        check(engine.run(PROMPTS, SAMPLINGS))
