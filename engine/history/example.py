"""The smallest state that has one of everything: a request, a step in flight."""

from refold.journal.events import EngineConfig, EngineOpened, RequestSubmitted, Sampling, StepScheduled, WorkerStarted
from refold.scheduler.commands import ScheduleStep
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State


def example_state() -> State:
    """An engine with one request in its first step."""
    config = EngineConfig(
        model="example",
        model_fingerprint="example",
        vocab_size=2,
        eos_token_ids=(),
        max_model_len=8,
        block_size=4,
        num_blocks=2,
        max_num_seqs=1,
        max_num_batched_tokens=4,
    )
    state = State()
    opened = EngineOpened(engine_epoch=1, refold_version="", root_seed=0, config=config)
    asked = RequestSubmitted(
        handle=1, request_id="r", prompt_token_ids=[0], sampling=Sampling(seed=0, max_tokens=1), arrival_ns=0
    )
    fold_all(state, [opened, WorkerStarted(generation=1, kind="", environment={}), asked])
    events = decide(state, ScheduleStep())
    assert isinstance(events[-1], StepScheduled)
    fold_all(state, events)
    return state
