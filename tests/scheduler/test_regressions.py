"""The two scenarios that broke asynchronous schedulers: memory pressure, and cache resets under pressure.

Four blocks of 16, eight requests of 8 tokens that want 24 each, two at the start and one more at each turn. The worker
never samples the same token twice, so a token tells which sample it was and what position it was sampled for.
"""

import pytest

from refold.journal.events import Event, RequestFinished, RequestPreempted
from refold.projections.requests import RUNNING
from tests.kit.drive import Drive
from tests.kit.sentences import EmittingWorker, all_of, delivered, emitting, fill, outputs, reset

PROMPT, OUTPUTS, REQUESTS = 8, 24, 8
DEPTHS = (1, 2, 4, 8)
RESETS = ((6, 14), (6, 7, 18, 19))


class Pipeline:
    """Turns of a pipelined engine: an arrival, a reset where one is due, a step; the window is filled before it is drained."""

    def __init__(self, depth: int, stagger: int, resets: tuple[int, ...] = (), num_blocks: int = 4) -> None:
        self.drive, self.worker = emitting(
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_in_flight_steps=depth,
            decode_stagger=stagger,
        )
        self.resets = resets
        self.bumps_in_flight = 0
        self.bumps_while_stale = 0

    def run(self) -> Drive:
        submitted = 0
        for turn in range(2_000):
            while submitted < min(REQUESTS, 2 + turn):
                self.drive.submit(f"r{submitted}", PROMPT, OUTPUTS)
                submitted += 1
            if turn in self.resets:
                self._watch(self._running_with_work(), reset(self.drive))
            scheduled = self._watch(self._running_with_work(), self.drive.schedule())
            if scheduled and len(self.drive.orders) < self.drive.config.max_in_flight_steps:
                continue
            if not self.drive.orders:
                assert self.drive.state.is_quiescent, "stalled"
                return self.drive
            self.drive.complete()
        raise AssertionError("livelock")

    def _running_with_work(self) -> dict[int, int]:
        """Handle -> stale tokens, of those that run with work in flight."""
        live = self.drive.state.requests.live()
        return {r.handle: r.num_stale_output_tokens for r in live if r.status is RUNNING and r.num_in_flight_tokens}

    def _watch(self, before: dict[int, int], events: list[Event]) -> list[Event]:
        hit = [e.handle for e in events if isinstance(e, RequestPreempted) and e.handle in before]
        self.bumps_in_flight += len(hit)
        self.bumps_while_stale += sum(before[handle] > 0 for handle in hit)
        return events


def every_request_has_exactly_its_24(drive: Drive) -> bool:
    finished = all_of(RequestFinished, drive.records)
    got = outputs(drive)
    return (
        sorted(e.handle for e in finished) == list(range(1, REQUESTS + 1))
        and all((e.reason, e.num_output_tokens) == ("length", OUTPUTS) for e in finished)
        and all(len(tokens) == OUTPUTS for tokens in got.values())
    )


def each_output_was_sampled_for_its_place(drive: Drive, worker: EmittingWorker) -> bool:
    for handle, tokens in delivered(e for events in drive.records for e in events).items():
        position_of = {token: position for position, token in worker.emitted[handle]}
        if [position_of[token] for token in tokens] != [PROMPT + i for i in range(OUTPUTS)]:
            return False
    return True


@pytest.mark.parametrize("stagger", [1, 3])
@pytest.mark.parametrize("depth", DEPTHS)
def test_memory_pressure_loses_no_sample_and_repeats_none(depth: int, stagger: int) -> None:
    pipeline = Pipeline(depth, stagger)
    drive = pipeline.run()

    assert every_request_has_exactly_its_24(drive)
    assert each_output_was_sampled_for_its_place(drive, pipeline.worker)
    for handle, tokens in delivered(e for events in drive.records for e in events).items():
        emitted = [token for _, token in pipeline.worker.emitted[handle]]
        assert tokens == emitted[:OUTPUTS], "deliver means: nothing that was sampled is thrown away"
    if depth >= 2:
        assert pipeline.bumps_in_flight >= 1, "no preemption hit a request with tokens in flight"


@pytest.mark.parametrize("stagger", [1, 3])
@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_resets_under_pressure_keep_the_order_and_repeat_nothing(
    depth: int, stagger: int, resets: tuple[int, ...]
) -> None:
    pipeline = Pipeline(depth, stagger, resets)
    drive = pipeline.run()

    assert every_request_has_exactly_its_24(drive)
    assert each_output_was_sampled_for_its_place(drive, pipeline.worker)
    for handle, tokens in delivered(e for events in drive.records for e in events).items():
        emitted = iter([token for _, token in pipeline.worker.emitted[handle]])
        assert all(token in emitted for token in tokens), "not in the order in which they were sampled"
        assert len(set(tokens)) == len(tokens)
    by_reset = [e for e in all_of(RequestPreempted, drive.records) if e.reason == "cache_reset"]
    assert by_reset, "no reset hit a running request"
    assert {e.stale_policy for e in by_reset} == {"drop"}


@pytest.mark.parametrize("stagger", [1, 3])
@pytest.mark.parametrize("depth", [4, 8])
def test_a_second_reset_finds_the_first_ones_stale_output_still_in_flight(depth: int, stagger: int) -> None:
    """In four blocks nobody comes back before the fences have fallen; in sixteen, everybody does at once."""
    pipeline = Pipeline(depth, stagger, (6, 7, 18, 19), num_blocks=16)
    drive = pipeline.run()

    assert pipeline.bumps_while_stale >= 1, "no epoch ended while an older one was still in flight"
    assert every_request_has_exactly_its_24(drive)
    assert each_output_was_sampled_for_its_place(drive, pipeline.worker)


def test_at_depth_one_nothing_is_ever_stale() -> None:
    drive = Pipeline(1, 1).run()
    preempted = all_of(RequestPreempted, drive.records)
    assert preempted
    assert all(e.num_stale_output_tokens == 0 for e in preempted)


def test_a_step_is_never_scheduled_into_a_full_window() -> None:
    drive, _ = emitting(num_blocks=4, block_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_in_flight_steps=4)
    for i in range(REQUESTS):
        drive.submit(f"r{i}", PROMPT, OUTPUTS)
    fill(drive)
    assert len(drive.state.window.in_flight) == 4
    assert drive.schedule() == []
