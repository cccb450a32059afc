"""What every worker must do, as a suite: give it a config and a way to make a worker, and inherit the tests."""

import pytest
from msgspec.structs import replace

from refold.engine.control import control_order, undergo
from refold.gpu.batch import Worker
from refold.gpu.weights import describe_model
from refold.journal.events import EngineConfig, Sampling
from tests.kit.worker_driver import Request, WorkerDriver


def config_for(model: str = "simulated", **changes: object) -> EngineConfig:
    """A small engine's configuration for a model."""
    fields: dict[str, object] = {
        "model": model,
        "model_fingerprint": "",
        "vocab_size": 1000,
        "eos_token_ids": (2,),
        "max_model_len": 768,
        "block_size": 8,
        "num_blocks": 96,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    if not model.startswith("simulated"):
        found = describe_model(model)
        fields |= {"model_fingerprint": found.fingerprint, "vocab_size": found.vocab_size}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


class WorkerContract:
    """Inherit, and provide the fixtures `config` (at least 64 blocks of at most 16) and `worker`."""

    @pytest.fixture
    def config(self) -> EngineConfig:
        raise NotImplementedError

    @pytest.fixture
    def worker(self, config: EngineConfig) -> Worker:
        raise NotImplementedError

    @pytest.fixture
    def drive(self, worker: Worker, config: EngineConfig) -> WorkerDriver:
        return WorkerDriver(worker, config, seed=7)

    def request(self, drive: WorkerDriver, number: int, num_blocks: int = 0) -> Request:
        """A request whose prompt is full blocks, if asked, and some tokens more."""
        length = num_blocks * drive.config.block_size + 5 + 9 * number
        prompt = [(number * 31 + index * 7) % drive.config.vocab_size for index in range(length)]
        return drive.add(prompt, Sampling(seed=number, max_tokens=6, ignore_eos=True))

    def test_it_says_what_its_numbers_depend_on(self, worker: Worker) -> None:
        facts = worker.environment()
        assert facts["device"]
        assert all(isinstance(key, str) and isinstance(value, str) for key, value in facts.items())

    def test_a_prompt_then_one_token_a_step_comes_back_by_position(self, drive: WorkerDriver) -> None:
        request = self.request(drive, 1)
        assert len(drive.run_alone(request)) == 6
        assert all(0 <= token < drive.config.vocab_size for token in request.outputs)

    def test_a_made_up_step_is_computed_and_leaves_nothing_behind(self, drive: WorkerDriver, worker: Worker) -> None:
        expected = drive.run_alone(self.request(drive, 1))
        undergo(worker, control_order(drive.config, 0), drive.config.vocab_size)
        assert drive.run_alone(self.request(drive, 1)) == expected

    def test_a_chunk_samples_nothing(self, drive: WorkerDriver) -> None:
        request = self.request(drive, 3)
        output = drive.step([(request, 10)])
        assert (output.counts, output.token_ids, output.positions) == ([0], [], [-1])

    def test_tokens_do_not_depend_on_batches_chunks_or_recomputation(self, drive: WorkerDriver) -> None:
        alone = [drive.run_alone(self.request(drive, number)) for number in range(6)]
        together = [self.request(drive, number) for number in range(6)]
        assert drive.run_random(budget=24, drop_rate=0.15) > 0
        assert [request.outputs for request in together] == alone

    def test_a_readmitted_request_continues_as_if_nothing_had_happened(self, drive: WorkerDriver) -> None:
        expected = drive.run_alone(self.request(drive, 2))
        request = self.request(drive, 2)
        drive.step([(request, len(request.tokens))])
        drive.step([(request, 1)])
        drive.drop(request)
        assert drive.run_alone(request) == expected

    def test_a_request_readmitted_without_release_replaces_its_slot(self, drive: WorkerDriver) -> None:
        expected = drive.run_alone(self.request(drive, 2))
        request = self.request(drive, 2)
        drive.step([(request, len(request.tokens))])
        drive.drop(request)
        drive.released.clear()
        assert drive.run_alone(request) == expected

    def test_blocks_of_another_request_can_be_shared(self, drive: WorkerDriver) -> None:
        expected = drive.run_alone(self.request(drive, 4, num_blocks=2))
        first, second = self.request(drive, 4, num_blocks=2), self.request(drive, 4, num_blocks=2)
        drive.step([(first, len(first.tokens))])
        drive.share(second, first, 2)
        assert drive.run_alone(second) == expected

    def test_a_block_can_be_shared_in_the_step_that_writes_it(self, drive: WorkerDriver) -> None:
        expected = drive.run_alone(self.request(drive, 4, num_blocks=2))
        first, second = self.request(drive, 4, num_blocks=2), self.request(drive, 4, num_blocks=2)
        drive.reserve(first)
        drive.share(second, first, 2)
        output = drive.step([(first, len(first.tokens)), (second, len(second.tokens) - second.computed)])
        assert output.token_ids == [expected[0], expected[0]]
        output = drive.step([(second, 1), (first, 1)])
        assert output.token_ids == [expected[1], expected[1]]

    def test_released_slots_are_gone(self, drive: WorkerDriver) -> None:
        request, other = self.request(drive, 1), self.request(drive, 2)
        drive.step([(request, len(request.tokens))])
        order = drive.order([(request, 1)])
        drive.released.append(request.handle)
        drive.step([(other, 3)])
        with pytest.raises(Exception):  # noqa: B017, PT011 - any exception means that the worker is lost
            drive.worker.execute(order)

    def test_releasing_an_unknown_handle_is_nothing(self, drive: WorkerDriver) -> None:
        drive.released.append(99)
        drive.step([(self.request(drive, 1), 3)])

    @pytest.mark.parametrize(
        "wrong", [{"first_positions": [4]}, {"handles": [42]}, {"num_tokens": [500]}, {"chunk_entries": []}]
    )
    def test_a_step_that_does_not_fit_its_slot_is_an_exception(self, drive: WorkerDriver, wrong: dict) -> None:
        request = self.request(drive, 2)
        drive.step([(request, 5)])
        order = drive.order([(request, 1)])
        with pytest.raises(Exception):  # noqa: B017, PT011 - any exception means that the worker is lost
            drive.worker.execute(replace(order, scheduled=replace(order.scheduled, **wrong)))

    def test_a_step_without_room_in_its_blocks_is_an_exception(self, drive: WorkerDriver) -> None:
        order = drive.order([(self.request(drive, 2), 5)])
        with pytest.raises(Exception):  # noqa: B017, PT011 - as above
            drive.worker.execute(replace(order, scheduled=replace(order.scheduled, allocations=[])))

    def test_closing_twice_is_nothing(self, worker: Worker) -> None:
        worker.close()
        worker.close()


class DraftContract:
    """What a worker does with drafts. Inherit, and provide the fixture `draft_worker` for `draft_config`."""

    @pytest.fixture
    def draft_config(self) -> EngineConfig:
        raise NotImplementedError

    @pytest.fixture
    def draft_worker(self, draft_config: EngineConfig) -> Worker:
        raise NotImplementedError

    @pytest.fixture
    def drive(self, draft_worker: Worker, draft_config: EngineConfig) -> WorkerDriver:
        return WorkerDriver(draft_worker, draft_config, seed=7)

    @pytest.fixture(params=[0.0, 0.9], ids=["greedy", "sampled"])
    def sampling(self, request: pytest.FixtureRequest) -> Sampling:
        return Sampling(seed=12, max_tokens=12, temperature=request.param, ignore_eos=True)

    def run_without(self, drive: WorkerDriver, sampling: Sampling) -> list[int]:
        return drive.run_alone(drive.add([5, 6, 7, 5, 6], sampling))

    @pytest.mark.parametrize("right", [0, 1, 2, 3, 5])
    def test_right_drafts_are_accepted_up_to_the_first_wrong_one(
        self, drive: WorkerDriver, sampling: Sampling, right: int
    ) -> None:
        expected = self.run_without(drive, sampling)
        request = drive.add([5, 6, 7, 5, 6], sampling)
        drive.step([(request, 5)])
        wrong = [(token + 1) % drive.config.vocab_size for token in expected[1 + right : 6]]
        output = drive.step([(request, 1)], {0: [*expected[1 : 1 + right], *wrong]})
        assert output.counts == [right + 1]
        assert output.token_ids == expected[1 : right + 2]
        assert drive.run_alone(request) == expected

    def test_what_drafts_leave_behind_is_never_read(self, drive: WorkerDriver, sampling: Sampling) -> None:
        """Wrong drafts at every step, in company of others, and places that lie in blocks not filled yet."""
        expected = self.run_without(drive, sampling)
        request, other = drive.add([5, 6, 7, 5, 6], sampling), drive.add(list(range(30)), sampling)
        drive.step([(other, 30), (request, 5)])
        for at in range(1, 9):
            drive.step([(other, 1), (request, 1)], {1: [(expected[at] + 1) % drive.config.vocab_size] * 4})
        assert request.outputs == expected[:9]
        assert drive.run_alone(request) == expected

    def test_drafts_of_its_own_change_no_token_with_steps_in_flight_either(
        self, drive: WorkerDriver, sampling: Sampling
    ) -> None:
        """The scheduler promises positions as if every draft in flight were accepted; the worker knows better."""
        expected = self.run_without(drive, sampling)
        request = drive.add([5, 6, 7, 5, 6], sampling)
        orders = [drive.order([(request, 5)])]
        for _ in range(8):  # nothing has come back when the last of them is ordered
            request.tokens += [0] * 4
            request.computed = len(request.tokens) - 1
            orders.append(drive.order([(request, 1)], {0: 3}))
        found: list[int] = []
        for order in orders:
            output = drive.worker.execute(order)
            assert output.positions == [5 + len(found)]
            found += output.token_ids
        assert found[:12] == expected[: len(found)][:12]
        assert len(found) >= 9

    @pytest.mark.parametrize(
        "wrong", [{"num_drafts": [3]}, {"num_drafts": [1]}, {"num_drafts": []}, {"num_tokens": [2]}]
    )
    def test_drafts_that_do_not_fit_their_entry_are_an_exception(
        self, drive: WorkerDriver, sampling: Sampling, wrong: dict
    ) -> None:
        request = drive.add([5, 6, 7, 5, 6], sampling)
        drive.step([(request, 5)])
        order = drive.order([(request, 1)], {0: [3, 4]})
        with pytest.raises(Exception):  # noqa: B017, PT011 - any exception means that the worker is lost
            drive.worker.execute(replace(order, scheduled=replace(order.scheduled, **wrong)))
