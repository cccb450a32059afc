"""The worker's index proposes what the scheduler's look-up would, token after token."""

import random

import pytest

from refold.gpu import drafting as worker
from refold.scheduler import drafting as scheduler


def test_both_look_as_far_back_for_as_long_a_match() -> None:
    assert (worker.MAX_NGRAM, worker.LOOK_BACK_TOKENS) == (scheduler.MAX_NGRAM, scheduler.LOOK_BACK_TOKENS)


@pytest.mark.parametrize("seed", range(12))
def test_the_index_proposes_what_the_look_up_finds(seed: int) -> None:
    random_ = random.Random(seed)
    vocabulary, tokens, index = random_.choice([2, 3, 8, 40]), [], worker.DraftIndex()
    while len(tokens) < 300:
        tokens += random_.choices(range(vocabulary), k=random_.randint(1, 5))
        most = random_.randint(1, 8)
        assert index.propose(tokens, most) == scheduler.prompt_lookup(tokens, most), tokens


def test_what_lies_too_far_back_is_not_proposed() -> None:
    for between in range(worker.LOOK_BACK_TOKENS - 4, worker.LOOK_BACK_TOKENS + 2):
        tokens = [1, 2, *range(10, 10 + between), 1]
        assert worker.DraftIndex().propose(tokens, 1) == scheduler.prompt_lookup(tokens, 1)
    assert worker.DraftIndex().propose([1, 2, *range(10, 10 + worker.LOOK_BACK_TOKENS - 3), 1], 1) == [2]
    assert worker.DraftIndex().propose([1, 2, *range(10, 10 + worker.LOOK_BACK_TOKENS), 1], 1) == []
