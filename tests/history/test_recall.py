"""The command that led to a record can be told from the record and the state before it, and leads to it again."""

import pytest

from refold.engine.history.recall import Forgotten, command_of
from refold.engine.history.redecide import divergences
from refold.engine.history.verify import verify_journal
from refold.journal.codec import encode
from refold.journal.events import RequestSubmitted, Sampling
from refold.journal.record import EMPTY_HEAD, head_after, seal
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State, digest
from tests.history.readers import ListReader
from tests.kit.simulation import Simulation


@pytest.mark.parametrize("seed", range(16))
def test_every_record_of_a_random_life_is_decided_again_by_its_recalled_command(seed):
    simulation = Simulation(seed)
    simulation.play()
    state = State()
    for events, true in zip(simulation.drive.records, simulation.drive.commands, strict=True):
        before = digest(state)
        command = command_of(events, state)
        assert decide(state, command) == events == decide(state, true)
        assert digest(state) == before
        fold_all(state, events)


def test_erased_tokens_make_a_command_forgotten():
    event = RequestSubmitted(
        handle=1, request_id="r", prompt_token_ids=[-5], sampling=Sampling(seed=0, max_tokens=1), arrival_ns=0
    )
    with pytest.raises(Forgotten, match="erased"):
        command_of([event], State())


def test_no_command_leads_to_nothing():
    with pytest.raises(Forgotten):
        command_of([], State())


def test_a_random_life_has_no_divergence_and_says_how_much_was_decided_again():
    simulation = Simulation(3)
    simulation.play()
    head, records = EMPTY_HEAD._replace(engine_epoch=1), []
    for events in simulation.drive.records:
        records.append(seal(head, 0, *encode(events)))
        head = head_after(records[-1])
    assert list(divergences(ListReader(records))) == []
    verdict = verify_journal(ListReader(records), redecide=True)
    assert (verdict.num_decided, verdict.num_forgotten) == (len(records), 0)
    assert "L12" in verdict.laws
