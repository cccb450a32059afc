"""A recorded schedule runs again on new workers: every token is compared, and what isn't equal is named."""

import itertools
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from refold.engine.history.reexecution import OtherEnvironment, Reexecuted, reexecute
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.simulated import SimulatedWorker
from refold.journal.errors import WorkerLost
from refold.journal.events import EngineConfig, OutputDelivered, StaleOutputConsumed
from refold.journal.record import Record
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from tests.history.journals import eventful_lives, sealed
from tests.kit.drive import Drive, config
from tests.kit.redacted import RedactedLife


class Twin(SimulatedWorker):
    """The simulated worker as a `Drive` has it: it tells nothing of where it runs."""

    def environment(self) -> dict[str, str]:
        return {}


def twin(engine_config: EngineConfig, environment: Mapping[str, str]) -> Twin:
    return Twin(engine_config)


def store_of(records: list[Record]) -> MemoryStore:
    store = MemoryStore(MemoryJournal())
    epochs = {record.engine_epoch: record for record in records}
    for epoch, life in itertools.groupby(records, key=lambda record: record.engine_epoch):
        assert store.open_stream().engine_epoch == epoch
        store.append("main", list(life))
    assert epochs
    return store


def of_drive(drive: Drive) -> MemoryStore:
    return store_of(sealed([drive.records]))


def told(drive: Drive) -> int:
    """How many tokens the journal of a drive tells."""
    events = [event for record in drive.records for event in record]
    return sum(len(event.token_ids) for event in events if isinstance(event, OutputDelivered | StaleOutputConsumed))


def test_two_lives_with_preemptions_a_crash_and_an_abort_give_every_token_again() -> None:
    lives, drive = eventful_lives()
    found = reexecute(store_of(sealed(lives)), twin)
    assert found.first is None
    assert found.num_tokens == told(drive)
    assert (found.num_workers, found.num_records) == (2, len(drive.records))
    assert found.num_steps_lost == 3  # in flight at the crash
    assert (found.num_steps_left_out, found.num_tokens_erased, found.num_rows) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(500, 512))
def test_random_lives_with_everything_in_them_give_every_token_again(seed: int) -> None:
    """Sessions, drafts, media, grammars, lost workers, several engines, redactions: whatever is told is told again."""
    life = RedactedLife(seed)
    life.play()
    life.save()
    found = reexecute(life.store, twin)
    assert found.first is None, found.first
    assert found.num_tokens > 0
    assert bool(found.num_tokens_erased) <= bool(life.redacted)


class Liar(Twin):
    """Says another token at one place, and nothing else is different."""

    def __init__(self, engine_config: EngineConfig, step: int, index: int) -> None:
        super().__init__(engine_config)
        self.place = step, index

    def execute(self, order: WorkOrder) -> StepOutput:
        output = super().execute(order)
        if output.step != self.place[0]:
            return output
        tokens = list(output.token_ids)
        tokens[self.place[1]] = (tokens[self.place[1]] + 1) % 1000
        return replace(output, token_ids=tokens)


def some_run() -> Drive:
    drive = Drive(config(num_blocks=32))
    drive.open()
    for name in ("first", "second"):
        drive.submit(name, 5, max_tokens=12)
    drive.run()
    return drive


def test_the_first_token_that_differs_is_named_with_its_place() -> None:
    drive = some_run()
    found = reexecute(of_drive(drive), lambda engine_config, _: Liar(engine_config, 4, 1))
    first = found.first
    assert first is not None
    assert (first.what, first.step, first.entry, first.request_id, first.position) == ("token", 4, 1, "second", 9)
    assert first.found == first.recorded + 1
    came_back = drive.records[first.place][0]
    assert isinstance(came_back, OutputDelivered)
    assert came_back.token_ids[1] == first.recorded
    assert found.num_tokens == 10  # behind it, nothing can be compared


def test_a_worker_that_fails_where_the_recorded_one_did_not_says_at_which_step() -> None:
    class Failing(Twin):
        def execute(self, order: WorkOrder) -> StepOutput:
            if order.scheduled.step == 3:
                raise MemoryError("no more")
            return super().execute(order)

    with pytest.raises(
        WorkerLost, match=r"step 3 \(record \d+\) was answered when it was recorded.*MemoryError: no more"
    ):
        reexecute(of_drive(some_run()), lambda engine_config, _: Failing(engine_config))


def test_another_environment_is_refused_with_what_differs() -> None:
    store = of_drive(some_run())
    with pytest.raises(
        OtherEnvironment, match="device was not told, is none, worker was not told, is simulated"
    ) as caught:
        reexecute(store, lambda engine_config, _: SimulatedWorker(engine_config))
    assert caught.value.differences == {"device": ("", "none"), "worker": ("", "simulated")}
    found = reexecute(store, lambda engine_config, _: SimulatedWorker(engine_config), any_environment=True)
    assert found.first is None
    assert found.differences == caught.value.differences


def test_a_part_of_a_journal_is_executed_as_far_as_it_goes() -> None:
    drive = some_run()
    store, whole = of_drive(drive), told(drive)
    seen: list[Reexecuted] = [reexecute(store, twin, stop=stop) for stop in range(len(drive.records) + 1)]
    assert [each.num_tokens for each in seen] == sorted(each.num_tokens for each in seen)
    assert (seen[0].num_tokens, seen[-1].num_tokens) == (0, whole)
    assert max(each.num_steps_lost for each in seen) == 2  # in flight where it was cut
    assert all(each.first is None for each in seen)


def redacted_run(**environment: str) -> MemoryStore:
    """`gone` is redacted; `heir` had found its blocks; `other` only shared batches with it, and lives on."""
    life = RedactedLife(1, rate=0)
    drive = life.drive = Drive(config(num_blocks=64, max_num_batched_tokens=64))
    drive.open()
    started = drive.records[-1][-1]
    drive.records[-1] = [replace(started, environment=environment)]
    drive.submit("gone", list(range(100, 117)), max_tokens=6)
    drive.submit("other", list(range(200, 211)), max_tokens=9)
    drive.run()
    drive.submit("heir", [*range(100, 117), 7], max_tokens=4)
    drive.submit("other too", list(range(300, 306)), max_tokens=5)
    drive.run()
    life.redact("gone")
    return life.store


def test_erased_requests_and_those_that_found_their_blocks_leave_their_batches() -> None:
    found = reexecute(redacted_run(), twin)
    assert found.first is None
    assert (found.num_tokens, found.num_tokens_erased) == (9 + 5, 6 + 4)
    assert found.num_steps_left_out == 0  # somebody is left in each


def test_where_bits_hang_on_the_batch_the_rest_is_left_out() -> None:
    store = redacted_run(batch_invariant="no")

    class Varying(Twin):
        def environment(self) -> dict[str, str]:
            return {"batch_invariant": "no"}

    found = reexecute(store, lambda engine_config, _: Varying(engine_config))
    assert found.first is None
    assert (found.num_tokens, found.num_steps) == (0, 0)
    assert found.num_steps_left_out > 10
