"""Trials: whoever kills the worker is found in few restarts, and nobody else is."""

from itertools import product
from math import ceil, log2

import msgspec
import pytest

from refold.journal.errors import Rejected
from refold.journal.events import (
    ContentRedacted,
    RequestFinished,
    RequestPreempted,
    RequestQuarantined,
    StepScheduled,
    WorkerLost,
)
from refold.scheduler.commands import LiftQuarantine, LoseWorker, StartWorker, SubmitRequest
from refold.scheduler.fold import fold
from refold.scheduler.trials import on_trial
from tests.kit.drive import config
from tests.kit.player import POISON, Answer, Player, Work


def opened(batch: int, **changes: object) -> Player:
    player = Player(config(num_blocks=16 * batch, max_num_seqs=batch, max_num_batched_tokens=8 * batch, **changes))
    player.open()
    return player


def die(player: Player) -> list[object]:
    """The worker dies of the step that it is at; a new one starts."""
    events = player.do(LoseWorker(reason="died", by_step=True))
    player.do(StartWorker(kind="simulated", environment={}))
    return list(events)


def lived(player: Player) -> None:
    player.settle()
    player.judge()


def found(player: Player) -> list[RequestQuarantined]:
    return [event for events in player.records for event in events if type(event) is RequestQuarantined]


@pytest.mark.parametrize(("batch", "window"), list(product((1, 2, 3, 4, 8, 13, 32), (1, 3))))
def test_a_poison_is_found_in_log2_of_the_batch_and_two_restarts(batch: int, window: int) -> None:
    for culprit, position in {(0, 3), (batch - 1, 3), (batch // 2, 3), (batch // 3, 7), (batch // 2, 0)}:
        player = opened(batch, max_in_flight_steps=window)
        for number in range(batch):
            player.submit(f"r{number}", 4, adapter=f"{POISON}{position}" if number == culprit else "")
        lived(player)
        (verdict,) = found(player)
        assert verdict.handle == culprit + 1
        deaths = [event for events in player.records for event in events if type(event) is WorkerLost]
        assert len(deaths) - 1 <= ceil(log2(batch)) + 2
        ended = {e.handle: e.reason for events in player.records for e in events if type(e) is RequestFinished}
        assert {handle for handle, reason in ended.items() if reason != "length"} == {culprit + 1}


def test_several_poisons_are_found_one_after_the_other() -> None:
    player = opened(8)
    for number in range(8):
        player.submit(f"r{number}", 4, adapter=f"{POISON}{number}" if number in (1, 2, 7) else "")
    lived(player)
    assert {event.handle for event in found(player)} == {2, 3, 8}


def test_one_death_is_an_accident_and_a_token_clears() -> None:
    player = opened(2, max_in_flight_steps=1)
    player.submit("a", 4)
    player.submit("b", 4)
    for _ in range(5):
        player.schedule()
        die(player)
        assert on_trial(player.state) is None
        player.schedule()
        player.obey(Work())
        player.obey(Answer())
        assert not player.state.suspicion.num_losses
    lived(player)
    assert not found(player)


def test_who_is_not_tried_gives_way_and_keeps_its_stale_output() -> None:
    player = opened(4, max_in_flight_steps=2)
    for name in "abcd":
        player.submit(name, 4)
    for _ in range(2):
        player.schedule()
        die(player)
    assert on_trial(player.state) == {1, 2}
    (step,) = player.schedule()
    assert isinstance(step, StepScheduled)
    assert step.handles == [1, 2]
    player.obey(Work())
    player.schedule()
    player.obey(Answer())
    assert on_trial(player.state) == {3}
    gave_way = player.schedule()
    assert [(type(e), e.handle, e.reason, e.stale_policy) for e in gave_way] == [  # type: ignore[attr-defined]
        (RequestPreempted, 2, "isolated", "deliver"),
        (RequestPreempted, 1, "isolated", "deliver"),
    ]
    assert player.schedule()[0].handles == [3]  # type: ignore[attr-defined]
    lived(player)


def test_a_loss_that_no_request_can_be_blamed_for_blames_none() -> None:
    player = opened(2)
    player.submit("a", 4)
    for _ in range(5):
        player.schedule()
        player.do(LoseWorker(reason="the engine that had it ended"))
        player.do(StartWorker(kind="simulated", environment={}))
    assert not player.state.suspicion.num_losses
    die(player)
    assert not player.state.suspicion.num_losses, "nothing was in flight"


def convicted() -> Player:
    player = opened(1)
    player.num_accidents = 3
    player.submit("a", 4, adapter="lora")
    for _ in range(3):
        player.schedule()
        events = die(player)
    assert [type(event) for event in events] == [WorkerLost, RequestQuarantined, RequestFinished]
    return player


def again(player: Player, name: str, **sampling: object) -> SubmitRequest:
    first = next(c for c in player.commands if isinstance(c, SubmitRequest))
    return msgspec.structs.replace(first, request_id=name, sampling=msgspec.structs.replace(first.sampling, **sampling))


def test_content_in_quarantine_is_refused_however_it_is_sampled_until_it_is_lifted() -> None:
    player = convicted()
    with pytest.raises(Rejected, match="'b' asks for what 'a' asked for, which killed its workers"):
        player.do(again(player, "b", max_tokens=1))
    player.submit("c", 4)
    player.do(LiftQuarantine(request_id="a"))
    player.do(again(player, "b", max_tokens=1))
    with pytest.raises(Rejected, match="'a' asked for is quarantined, and 0 other contents are"):
        player.do(LiftQuarantine(request_id="a"))
    lived(player)


def test_a_redaction_lifts_the_quarantine_as_it_erases_the_digest() -> None:
    player = convicted()
    fold(player.state, ContentRedacted(handles=[1], positions=[], content_hashes=[]))
    assert not player.state.suspicion.quarantined
