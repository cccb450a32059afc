"""A session with a chunk that waits, reopened under a shorter model: found by the simulator (seeds 841 and 6079).

Every turn that is queued must have room for one token at least, or the session ends with what it has.
"""

import pytest

from refold.journal.events import Sampling
from refold.scheduler.commands import ExtendSession, SubmitRequest
from tests.kit.drive import config
from tests.kit.player import Reopen, play


@pytest.mark.parametrize("max_model_len", range(38, 52))
@pytest.mark.parametrize(("prompt", "chunk"), [(8, 9), (16, 1), (16, 0), (3, 14)])
def test_a_session_whose_next_turn_no_longer_fits_ends_and_any_other_goes_on(
    prompt: int, chunk: int, max_model_len: int
) -> None:
    orders = [
        SubmitRequest(
            request_id="s",
            prompt_token_ids=[0] * prompt,
            sampling=Sampling(seed=0, max_tokens=24),
            arrival_ns=0,
            resumable=True,
        ),
        ExtendSession(request_id="s", token_ids=[1] * chunk, sampling=Sampling(seed=0, max_tokens=1)),
        Reopen(changes={"max_model_len": max_model_len}),
    ]
    play(config(num_blocks=96, max_model_len=256), orders)
