"""The control: a made-up step for a worker that is to try a suspect.

Workers died, and by what the journal says it may be a request that kills them (`refold.scheduler.trials`). It may as well be a worker
that dies of whatever it is given. So one that starts while somebody is on trial computes a request of nobody's first: one token
in, one token out. If it can't, it is lost before it has seen a suspect, and no request is blamed for that. Nothing of it is
journaled, and nothing of it stays: blocks are written before they are read, and no request has its handle.
"""

from collections.abc import Callable
from functools import partial

from refold.engine.messages import one_line
from refold.engine.worker_thread import answer
from refold.gpu.batch import AdmittedRequest, StepOutput, Worker, WorkOrder
from refold.journal.errors import WorkerLost
from refold.journal.events import Admission, BlockAllocation, EngineConfig, Sampling, StepScheduled
from refold.scheduler.state import State
from refold.scheduler.trials import on_trial

_HANDLE = 0
"""Requests count from 1."""


class ControlFailed(WorkerLost):
    """The worker can't compute a step that has nothing of anybody's in it."""


def control_for(state: State) -> Callable[[Worker], None] | None:
    """What the next worker must get through before it is ready; None if nobody is on trial."""
    if on_trial(state) is None:
        return None
    return partial(
        undergo, order=control_order(state.config, state.worker_generation), vocab_size=state.config.vocab_size
    )


def undergo(worker: Worker, order: WorkOrder, vocab_size: int) -> None:
    """Have a worker compute the control.

    Raises:
        ControlFailed: it died of it, or gave an answer that can't be.
    """
    try:
        fault = _fault(answer(worker, order), vocab_size)
    except (Exception, SystemExit) as error:
        raise ControlFailed(_words(f"{type(error).__name__}: {one_line(error)}")) from error
    if fault is not None:
        raise ControlFailed(_words(fault))


def _words(fault: str) -> str:
    return f"the worker fails at a made-up step of one token too, so it isn't the requests: {fault}"


def _fault(output: StepOutput, vocab_size: int) -> str | None:
    if (output.counts, output.positions, len(output.token_ids)) != ([1], [1], 1):
        return f"it answered with counts {output.counts[:4]} at positions {output.positions[:4]}"
    token = output.token_ids[0]
    return None if 0 <= token < vocab_size else f"it sampled token {token} of {vocab_size}"


def control_order(config: EngineConfig, generation: int) -> WorkOrder:
    """A request of one token, which samples one more; in the pool's first block."""
    sampling = Sampling(seed=0, max_tokens=1, ignore_eos=True)
    token = config.vocab_size - 1
    admitted = AdmittedRequest(
        entry=0, handle=_HANDLE, epoch=0, token_ids=[token], num_prompt_tokens=1, sampling=sampling, hit_block_ids=[]
    )
    scheduled = StepScheduled(
        step=0,
        handles=[_HANDLE],
        num_tokens=[1],
        first_positions=[0],
        admissions=[Admission(entry=0, epoch=0)],
        allocations=[BlockAllocation(entry=0, block_ids=[0])],
    )
    return WorkOrder(generation=generation, scheduled=scheduled, admitted=[admitted], released=[])
