"""Log-probabilities: told of each token that is handed out to who asked, and of no other; a worker's nonsense is its end."""

from typing import Any

import msgspec
import pytest

from refold.engine.history.recall import command_of
from refold.gpu.batch import StepOutput
from refold.gpu.simulated import simulated_surprisals
from refold.journal.errors import Rejected, WorkerLost
from refold.journal.events import (
    Event,
    LogprobsDelivered,
    OutputDelivered,
    PromptLogprobsDelivered,
    RequestFinished,
    StaleOutputConsumed,
)
from refold.journal.surprisals import EntrySurprisals
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.snapshot import Folded, pack, unpack
from refold.scheduler.state import State
from tests.kit.asking import AskingSimulation, judge_logprobs
from tests.kit.drive import Drive, config
from tests.kit.sentences import nothing_changes, opened


def all_of(kind: type[Event], drive: Drive) -> list[Any]:
    return [event for record in drive.records for event in record if type(event) is kind]


def test_who_asks_is_told_of_each_token_and_nobody_else_is() -> None:
    drive = opened(num_blocks=32)
    drive.submit("asks", 4, max_tokens=3, logprobs=2)
    drive.submit("doesn't", 4, max_tokens=3)
    drive.run()
    told = all_of(LogprobsDelivered, drive)
    assert [(each.handles, each.first_output_indices, each.counts, each.num_top) for each in told] == [
        ([1], [index], [1], [2]) for index in range(3)
    ]
    tokens = [event.token_ids[0] for event in all_of(OutputDelivered, drive)]
    seed = drive.commands[-1].sampling.seed if hasattr(drive.commands[-1], "sampling") else sum(b"asks")
    assert [each.surprisals for each in told] == [
        simulated_surprisals(seed, 4 + index, token, 2, 1000) for index, token in enumerate(tokens)
    ]


def test_they_stand_behind_the_tokens_and_before_the_end() -> None:
    drive = opened(num_blocks=32)
    drive.submit("a", 4, max_tokens=1, logprobs=0, prompt_logprobs=0)
    drive.run()
    record = next(record for record in drive.records if OutputDelivered in map(type, record))
    assert [type(event) for event in record] == [
        OutputDelivered, LogprobsDelivered, PromptLogprobsDelivered, RequestFinished
    ]  # fmt: skip


def test_a_prompt_of_one_token_has_nothing_to_tell_of() -> None:
    drive = opened(num_blocks=32)
    drive.submit("a", [7], max_tokens=1, prompt_logprobs=3)
    drive.run()
    (told,) = all_of(PromptLogprobsDelivered, drive)
    assert (told.count, told.surprisals) == (0, [])


def test_whoever_wants_its_prompt_told_computes_all_of_it_and_others_share_it() -> None:
    drive = opened(num_blocks=64, block_size=4, max_num_batched_tokens=64)
    drive.submit("first", [5] * 21, max_tokens=2)
    drive.run()
    drive.submit("asks", [5] * 21, max_tokens=2, prompt_logprobs=1)
    drive.submit("shares", [5] * 21, max_tokens=2)
    (scheduled,) = drive.schedule()
    assert [len(admission.hit_block_ids) for admission in scheduled.admissions] == [0, 5]
    drive.run()
    assert [each.count for each in all_of(PromptLogprobsDelivered, drive)] == [20]


def test_what_a_stop_cuts_off_has_none() -> None:
    for seed in range(40):
        drive = Drive(
            config(num_blocks=32, vocab_size=6, eos_token_ids=(2,), speculation="worker", num_speculative_tokens=3)
        )
        drive.open()
        drive.submit("a", [1, 3, 4], max_tokens=30, seed=seed, logprobs=1)
        drive.run()
        told = sum(sum(each.counts) for each in all_of(LogprobsDelivered, drive))
        (end,) = all_of(RequestFinished, drive)
        assert told == end.num_output_tokens
        cut = [e for e in all_of(OutputDelivered, drive) if (e.counts or [1])[0] < (e.accepted_drafts or [0])[0] + 1]
        if cut and end.reason == "stop":
            return
    pytest.fail("no stop fell inside an accepted run")


@pytest.mark.parametrize("seed", range(900, 912))
def test_in_a_life_full_of_trouble_each_token_has_its_own(seed: int) -> None:
    simulation = AskingSimulation(seed)
    simulation.play()
    judge_logprobs(simulation)
    decided_again(simulation.drive.records)


def test_those_lives_have_all_of_it() -> None:
    simulations = [AskingSimulation(seed) for seed in (901, 905, 907, 910)]
    for simulation in simulations:
        simulation.play()
    assert sum(map(judge_logprobs, simulations)) > 80
    kinds = [type(event) for s in simulations for record in s.drive.records for event in record]
    assert {LogprobsDelivered, PromptLogprobsDelivered, StaleOutputConsumed} <= set(kinds)


def decided_again(records: list[list[Event]]) -> None:
    """Every answer of a worker can be told from the journal, and leads to the same facts."""
    state = State()
    for events in records:
        if {LogprobsDelivered, PromptLogprobsDelivered} & set(map(type, events)):
            assert decide(state, command_of(events, state)) == events
        fold_all(state, events)


def test_a_snapshot_keeps_them() -> None:
    simulation = AskingSimulation(905)
    simulation.play()
    drive = simulation.drive
    from refold.projections.outbox import Outbox
    from refold.projections.totals import Totals

    outbox = Outbox()
    for events in drive.records:
        outbox.observe_all(events)
    again = unpack(b"".join(pack(Folded(drive.state, outbox, Totals()))))
    for handle, output in outbox.by_handle.items():
        assert again.outbox.by_handle[handle].surprisals == output.surprisals
        assert again.outbox.by_handle[handle].prompt_surprisals == output.prompt_surprisals
    assert again.state.requests.asking == drive.state.requests.asking


# -- a worker is not trusted ------------------------------------------------------------------------------------------


def answered() -> tuple[Drive, StepOutput]:
    drive = opened(num_blocks=32)
    drive.submit("silent", 4)
    drive.submit("a", 4, logprobs=2, prompt_logprobs=1)
    drive.schedule()
    return drive, drive.run_worker()


def garbled(right: StepOutput, column: str, **changes: object) -> StepOutput:
    (told,) = getattr(right, column)
    return msgspec.structs.replace(right, **{column: [msgspec.structs.replace(told, **changes)]})


@pytest.mark.parametrize(
    ("column", "changes"),
    [
        ("logprobs", {"entry": 0}),
        ("logprobs", {"entry": 7}),
        ("logprobs", {"entry": -1}),
        ("logprobs", {"num_top": 1}),
        ("logprobs", {"num_top": -1}),
        ("logprobs", {"surprisals": []}),
        ("logprobs", {"surprisals": [1, 5, 3, 5]}),
        ("logprobs", {"surprisals": [0, 5, 3, 5, 4, 6]}),
        ("logprobs", {"surprisals": [1001, 5, 3, 5, 4, 6]}),
        ("logprobs", {"surprisals": [1, -5, 3, 5, 4, 6]}),
        ("logprobs", {"surprisals": [1, 2**63, 3, 5, 4, 6]}),
        ("logprobs", {"surprisals": [1, 5, 1000, 5, 4, 6]}),
        ("logprobs", {"surprisals": [1, 5, -3, 5, 4, 6]}),
        ("logprobs", {"surprisals": [1, 5, 3, 6, 4, 5]}),
        ("logprobs", {"surprisals": [1, 5, 3, 5, 3, 6]}),
        ("prompt_logprobs", {"entry": 0}),
        ("prompt_logprobs", {"surprisals": [1, 5, 3, 5]}),
        ("prompt_logprobs", {"surprisals": [1, 5, 3, 5] * 4}),
        ("prompt_logprobs", {"num_top": 2}),
    ],
)
def test_nonsense_is_the_workers_end_and_changes_nothing(column: str, changes: dict) -> None:
    drive, right = answered()
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"step 0"):
        drive.deliver(garbled(right, column, **changes))
    assert drive.deliver(right)


@pytest.mark.parametrize("column", ["logprobs", "prompt_logprobs"])
def test_none_where_some_were_asked_for_and_some_where_none_were(column: str) -> None:
    drive, right = answered()
    with nothing_changes(drive), pytest.raises(WorkerLost, match=r"those of \[1\] were asked for"):
        drive.deliver(msgspec.structs.replace(right, **{column: []}))
    (told,) = getattr(right, column)
    with nothing_changes(drive), pytest.raises(WorkerLost):
        drive.deliver(msgspec.structs.replace(right, **{column: [told, told]}))
    plain = opened(num_blocks=32)
    plain.submit("silent", 4)
    plain.schedule()
    answer = plain.run_worker()
    told = EntrySurprisals(entry=0, num_top=0, surprisals=[1, 5])
    with nothing_changes(plain), pytest.raises(WorkerLost, match=r"those of \[\] were asked for"):
        plain.deliver(msgspec.structs.replace(answer, **{column: [told]}))


# -- admission --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; give 0 to 1"),
        ({"min_p": float("nan")}, "min_p is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; give 0.01 to 100"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"presence_penalty": -2.1}, "presence_penalty is -2.1; give -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"logit_bias": ((5, 1.0), (4, 1.0))}, "give at most 1024, in ascending order, each once"),
        ({"logit_bias": ((5, 1.0), (5, 1.0))}, "each once"),
        ({"logit_bias": ((1000, 1.0),)}, "names a token that is none of the model's 1000"),
        ({"logit_bias": ((5, 101.0),)}, "give -100 to 100"),
        ({"logit_bias": ((5, float("nan")),)}, "give -100 to 100"),
        ({"logprobs": 21}, "logprobs is 21; give 0 to 20, or none"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": 0, "resumable": True}, "a session has no prompt_logprobs"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict, says: str) -> None:
    drive = opened(num_blocks=32)
    with nothing_changes(drive), pytest.raises(Rejected, match=says):
        drive.submit("a", 4, **changes)
