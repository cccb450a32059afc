"""A snapshot is the fold that it was made of, whole, and goes on as that would have."""

from collections import deque

import pytest

from refold.journal.events import EngineConfig, Event
from refold.projections.batch import Batch
from refold.projections.outbox import Columns, Outbox
from refold.projections.runs import Run
from refold.projections.totals import Totals
from refold.scheduler.fold import fold_all
from refold.scheduler.images import IMAGES
from refold.scheduler.snapshot import OUTPUTS_PER_PIECE, Folded, pack, unpack
from refold.scheduler.state import State, digest
from tests.kit.drive import Drive, config
from tests.kit.features import settle
from tests.kit.sameness import differences, slots_of
from tests.kit.simulation import Simulation

SEEDS = range(16)


def nothing_yet() -> Folded:
    return Folded(State(), Outbox(), Totals())


def after(folded: Folded, events: list[Event]) -> Folded:
    fold_all(folded.state, events)
    folded.outbox.observe_all(events)
    folded.totals.observe_all(events)
    return folded


def again(folded: Folded) -> Folded:
    return unpack(b"".join(pack(folded)))


def history(seed: int) -> list[list[Event]]:
    simulation = Simulation(seed)
    simulation.play()
    return simulation.drive.records


@pytest.mark.parametrize("kind", IMAGES, ids=lambda kind: kind.__name__)
def test_an_image_has_every_slot_of_its_class(kind: type) -> None:
    image, derived, extra = IMAGES[kind]
    assert set(image.__struct_fields__) - extra == set(slots_of(kind)) - derived
    assert extra <= set(image.__struct_fields__)
    assert derived <= set(slots_of(kind))


def test_every_class_with_slots_that_a_fold_reaches_has_an_image() -> None:
    reached: set[type] = set()

    def look(thing: object) -> None:
        if isinstance(thing, dict):
            thing = [*thing.keys(), *thing.values()]
        if isinstance(thing, list | tuple | set | frozenset | deque):
            for part in thing:
                look(part)
        elif type(thing) not in reached and type(thing).__module__.startswith(
            ("refold.projections", "refold.scheduler")
        ):
            reached.add(type(thing))
        if type(thing) in IMAGES:
            for name in slots_of(type(thing)):
                if not (name in {"requests", "request"} and type(thing).__name__ == "InFlightStep"):
                    look(getattr(thing, name))

    for seed in SEEDS[:6]:
        folded = nothing_yet()
        for events in history(seed):
            look(after(folded, events))
    told_by_others = {Batch, Columns, Run}  # a step's image, the outputs' and a request's tell them
    assert reached - {Folded} - told_by_others == set(IMAGES) | {
        kind for kind in reached if issubclass(kind, tuple) and kind is not Folded
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restored_fold_is_the_same_at_every_position_and_goes_on_the_same(seed: int) -> None:
    lived, restored = nothing_yet(), nothing_yet()
    for position, events in enumerate(history(seed)):
        after(lived, events)
        restored = again(after(restored, events))
        assert differences(lived, restored) == [], position
        assert digest(lived.state) == digest(restored.state), position


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_from_any_position_the_rest_of_history_leads_to_the_same_end(seed: int) -> None:
    records = history(seed)
    lived, snapshots = nothing_yet(), [b"".join(pack(nothing_yet()))]
    snapshots += [b"".join(pack(after(lived, events))) for events in records]
    for position in range(0, len(snapshots), max(1, len(snapshots) // 24)):
        restored = unpack(snapshots[position])
        for events in records[position:]:
            after(restored, events)
        assert differences(lived, restored) == [], position


def test_the_same_fold_gives_the_same_bytes() -> None:
    folded = nothing_yet()
    for events in history(3):
        after(folded, events)
        once = b"".join(pack(folded))
        assert b"".join(pack(unpack(once))) == once


def test_a_request_that_only_a_step_names_survives() -> None:
    """A finished request whose entry has come back is forgotten, and the step that it was in may still wait for another's."""
    drive = Drive(config(max_in_flight_steps=2))
    drive.open()
    drive.submit("a", 6, max_tokens=2)
    drive.schedule()
    state = drive.state
    request = state.requests.by_handle.pop(1)
    state.queues.running.clear()
    del state.requests.handle_by_id["a"]
    folded = Folded(state, Outbox(), Totals())
    restored = again(folded)
    assert differences(folded, restored) == []
    assert restored.state.window.in_flight[0].requests[0].request_id == request.request_id


def test_outputs_come_in_pieces_and_finished_ones_are_forgotten_in_their_order() -> None:
    drive = Drive(config(num_blocks=64, max_num_seqs=64, max_num_batched_tokens=512), laws=False)
    drive.open()
    for number in range(3 * OUTPUTS_PER_PIECE):
        drive.submit(f"r{number}", 3, max_tokens=1 + number % 3)
    settle(drive)
    lived = Folded(State(), Outbox(max_finished=100), Totals())
    for events in drive.records:
        after(lived, events)
    restored = unpack(b"".join(pack(lived)), max_finished=100)
    assert len(list(pack(lived))) > 3
    assert differences(lived, restored) == []


def damaged_forms(body: bytes) -> dict[str, bytes]:
    return {
        "nothing": b"",
        "half a length": body[:5],
        "half a piece": body[:40],
        "the first piece only": next(pack(nothing_yet())),
        "a piece too few": b"".join(list(pack(filled()))[:-1]),
        "another type": body[:8] + b"\xc0" + body[9:],
    }


def filled() -> Folded:
    folded = nothing_yet()
    for events in history(5):
        after(folded, events)
    return folded


def test_what_is_no_snapshot_is_refused() -> None:
    body = b"".join(pack(filled()))
    for name, form in damaged_forms(body).items():
        with pytest.raises(ValueError, match=r"snapshot|decode|Expected|truncated|unpack"):  # noqa: PT012
            unpack(form)
            pytest.fail(name)


def test_a_changed_byte_never_ends_in_another_error() -> None:
    body = b"".join(pack(filled()))
    for index in range(0, len(body), max(1, len(body) // 1500)):
        try:
            unpack(body[:index] + bytes([body[index] ^ 0x41]) + body[index + 1 :])
        except ValueError:
            continue


def test_an_engine_that_never_opened_has_a_snapshot_too() -> None:
    restored = again(nothing_yet())
    assert differences(nothing_yet(), restored) == []
    assert restored.state.opened_config is None


def test_the_configuration_is_restored_as_it_was() -> None:
    drive = Drive(config(policy="fair_share", tenant_weights={"a": 3}, speculation_by_batch=((2, 1), (4, 0))))
    drive.open()
    restored = again(Folded(drive.state, Outbox(), Totals())).state.config
    assert isinstance(restored, EngineConfig)
    assert restored == drive.config
