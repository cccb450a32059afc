"""Found by the simulator, seed 6901: a hit that ended early at an evicted block kept a block just reclaimed from a session."""

from refold.journal.events import Sampling
from refold.scheduler.commands import ScheduleStep, SubmitRequest
from tests.kit.drive import config
from tests.kit.player import Answer, Work, play

CONFIG = config(
    block_size=1,
    num_blocks=48,
    max_num_batched_tokens=4,
    max_in_flight_steps=3,
    admit_full_sequence=False,
    decode_stagger=3,
)
ORDERS = [
    SubmitRequest(
        request_id="r0",
        prompt_token_ids=[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        sampling=Sampling(seed=0, max_tokens=5),
        arrival_ns=0,
    ),
    ScheduleStep(),
    Work(),
    ScheduleStep(),
    ScheduleStep(),
    Work(),
    Answer(),
    SubmitRequest(
        request_id="r1",
        prompt_token_ids=[2, 2, 0, 2, 1, 2, 0, 2],
        sampling=Sampling(seed=0, max_tokens=4),
        arrival_ns=1,
        tenant="b",
    ),
    SubmitRequest(
        request_id="r2",
        prompt_token_ids=[7],
        sampling=Sampling(seed=0, max_tokens=2),
        arrival_ns=2,
        tenant="b",
        resumable=True,
    ),
    SubmitRequest(
        request_id="r3",
        prompt_token_ids=[7, 1, 2, 1, 0, 2, 1, 1, 7, 1, 2, 1],
        sampling=Sampling(seed=0, max_tokens=3),
        arrival_ns=3,
    ),
    Work(),
    ScheduleStep(),
    Work(),
    Answer(),
    Answer(),
    Answer(),
    ScheduleStep(),
    Work(),
    ScheduleStep(),
    ScheduleStep(),
    Work(),
    Work(),
    Answer(),
    Answer(),
    ScheduleStep(),
    ScheduleStep(),
    Work(),
    Work(),
    Answer(),
    ScheduleStep(),
    Work(),
    Answer(),
    ScheduleStep(),
    Work(),
    Answer(),
    Answer(),
    Answer(),
    ScheduleStep(),
    Work(),
    ScheduleStep(),
    Answer(),
    ScheduleStep(),
]


def test_a_hit_never_holds_a_block_that_this_plan_has_released():
    play(CONFIG, ORDERS)
