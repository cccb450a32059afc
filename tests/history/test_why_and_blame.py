"""Why a request waited, and where its tokens came from, against what the journal says."""

import pytest

from refold.engine.history.blame import blame
from refold.engine.history.waits import Waits, all_waits, by_reason
from refold.engine.history.why import why
from refold.journal.codec import decode
from refold.journal.events import RequestPreempted, StaleOutputConsumed, StepScheduled
from tests.history.journals import eventful_lives, sealed
from tests.history.readers import ListReader
from tests.kit.drive import Drive, config, delivered_tokens
from tests.kit.simulation import Simulation


@pytest.fixture(scope="module")
def eventful():
    lives, _ = eventful_lives()
    return [record for life in lives for record in life], sealed(lives)


def test_every_token_of_every_client_has_an_origin(eventful):
    events, records = eventful
    for request_id, tokens in delivered_tokens(events).items():
        story = blame(ListReader(records), request_id)
        assert [origin.token_id for origin in story.origins] == tokens
        assert [origin.index for origin in story.origins] == list(range(len(tokens)))


def test_an_origin_names_the_step_that_made_the_token(eventful):
    _, records = eventful
    for origin in blame(ListReader(records), "req-3").origins:
        planned = next(e for e in decode(records[origin.scheduled]) if isinstance(e, StepScheduled))
        assert planned.step == origin.step
        assert len(planned.handles) == len(origin.batch)
        assert origin.batch[origin.entry] == "req-3"
        kinds = [type(e) for e in decode(records[origin.delivered]) if getattr(e, "step", -1) == origin.step]
        assert (StaleOutputConsumed in kinds) or not origin.is_stale


def test_stale_tokens_are_blamed_on_an_epoch_that_was_over(eventful):
    _, records = eventful
    stale = [origin for i in range(6) for origin in blame(ListReader(records), f"req-{i}").origins if origin.is_stale]
    assert len(stale) == 4
    assert all("epoch that was over" in origin.words for origin in stale)


def test_accepted_drafts_are_told_from_samples():
    drive = Drive(config(num_blocks=32, speculation="worker", num_speculative_tokens=3))
    drive.open()
    drive.submit("r", 5, max_tokens=24)
    drive.run()
    origins = blame(ListReader(sealed([drive.records])), "r").origins
    made = {origin.made for origin in origins}
    assert made == {"sampled", "a draft, accepted"}
    assert all(
        origins[i].made == "sampled"
        for i in range(len(origins))
        if i + 1 == len(origins) or origins[i].step != origins[i + 1].step
    )


def test_a_preemption_is_told_with_the_need_behind_it_and_what_became_of_it(eventful):
    _, records = eventful
    story = why(ListReader(records), "req-3")
    chains = [chain for chain in story.chains if chain.kind == "preemption"]
    handle = story.names.handle_of("req-3")
    events = [e for r in records for e in decode(r) if isinstance(e, RequestPreempted) and e.handle == handle]
    assert len(chains) == len(events) == 2
    words = [link.words for link in chains[0].links]
    assert words[0] == "req-0 had 7 tokens known and 2 in flight, blocks of 4: 1 block more needed, 0 free"
    assert words[1].startswith("preempted for req-0: needed 1 block, 0 free")
    assert "came in again with step" in words[-1]
    assert chains[0].duration_ns > 0


def test_a_stale_chain_leads_from_the_plan_over_the_end_of_the_epoch_to_the_answer(eventful):
    _, records = eventful
    chains = [chain for chain in why(ListReader(records), "req-3").chains if chain.kind == "stale"]
    assert len(chains) == 3
    for chain in chains:
        positions = [link.position for link in chain.links]
        assert positions == sorted(positions)
        assert len(positions) == 3


def test_waits_add_up_to_what_the_request_was_not_running(eventful):
    """All the time between a preemption and the return is waited for, for one reason or another."""
    _, records = eventful
    waits = list(all_waits(ListReader(records), only="req-3"))
    assert {wait.request_id for wait in waits} == {"req-3"}
    preempted = next(w for w in waits if w.reason == "stale_output")
    after = next(w for w in waits if w.start == preempted.stop)
    assert after.reason == "turn"
    assert records[after.stop].position == 32


def test_memory_waits_name_who_holds_the_blocks_and_what_ended_them(eventful):
    _, records = eventful
    waits = [wait for wait in all_waits(ListReader(records)) if wait.reason == "blocks" and wait.ended_by is not None]
    assert waits
    for wait in waits:
        assert wait.needed_blocks > 0
        assert wait.holders
        assert any(type(e).__name__ in {"RequestFinished", "RequestPreempted"} for e in decode(records[wait.ended_by]))


@pytest.mark.parametrize("seed", range(8))
def test_any_life_can_be_asked_why(seed):
    simulation = Simulation(seed)
    simulation.play()
    reader = ListReader(sealed([simulation.drive.records]))
    waits = list(all_waits(reader))
    assert all(wait.duration_ns >= 0 and wait.words for wait in waits)
    assert sum(by_reason(waits).values()) == sum(wait.duration_ns for wait in waits)
    for number in range(3):
        story = why(reader, f"r{number}")
        assert all(chain.links for chain in story.chains)
        blame(reader, f"r{number}")


def test_waits_of_nobody_are_none():
    assert Waits("nobody").rest() == []
