"""A token depends on its own row, its request's own tokens, its seed and its position: random mixes, zero differences.

    python -m tests.gpu.sampler_campaign --mixes 100000

Each mix is a batch of random requests in random rows: new ones, ones that come back after a preemption, ones with drafts behind,
each at some position, with whatever options. Every token must be the one that was chosen for that request and position alone.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refold.gpu.logprobs import surprisals
from refold.gpu.sampler import Draw, accepted_run, choose_tokens, draws_behind
from refold.journal.settings import Sampling

VOCABULARY = 199
POSITIONS = 24
EOS = (2,)


class Known(NamedTuple):
    """A request, its logits by position, its tokens to the end, and what was chosen alone at each position."""

    sampling: Sampling
    num_prompt_tokens: int
    logits: NDArray[np.float32]
    token_ids: list[int]
    chosen: list[int]
    surprisals: list[list[int]]


def random_sampling(rng: random.Random) -> Sampling:
    bias = {rng.randrange(VOCABULARY): rng.uniform(-9, 9) for _ in range(rng.choice((0, 0, 1, 5)))}
    return Sampling(
        seed=rng.randrange(2**63),
        max_tokens=POSITIONS,
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0, 2.5)),
        top_k=rng.choice((0, 0, 1, 7, 50, 1000)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05, 0.6)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.8)),
        presence_penalty=rng.choice((0.0, 0.0, 1.5, -0.5)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.7, -0.2)),
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=rng.choice((0, 0, 4, 30)),
        stop_token_ids=rng.choice(((), (5, 6))),
        ignore_eos=rng.random() < 0.3,
    )


def known_request(rng: random.Random, noise: np.random.Generator) -> Known:
    sampling, prompt = random_sampling(rng), rng.randrange(1, POSITIONS // 2)
    logits = noise.standard_normal((POSITIONS, VOCABULARY)).astype(np.float32) * rng.choice((0.5, 3.0))
    token_ids, chosen = [rng.randrange(VOCABULARY) for _ in range(prompt)], [-1] * prompt
    told: list[list[int]] = [[]] * prompt
    for position in range(prompt, POSITIONS):
        draw = Draw(1, position, prompt, sampling, tuple(token_ids))
        chosen += choose_tokens(logits[position : position + 1], [draw], EOS)
        token_ids.append(chosen[-1])
        told.append(surprisals(logits[position], chosen[-1], 3))
    return Known(sampling, prompt, logits, token_ids, chosen, told)


def count_differences(num_mixes: int, seed: int = 0, num_requests: int = 300) -> tuple[int, int]:
    """Play mixes; returns how many tokens were compared, and how many differed."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    requests = [known_request(rng, noise) for _ in range(num_requests)]
    compared = differ = 0
    for _ in range(num_mixes):
        mates = [rng.choice(requests) for _ in range(rng.randrange(1, 9))]
        rows, draws, expected = [], [], []
        for handle, each in enumerate(mates):
            position = rng.randrange(each.num_prompt_tokens, POSITIONS)
            drafts = _drafts(rng, each, position)
            # A slot may know more than is asked for, or just enough; a preempted one has its tokens from elsewhere.
            known = each.token_ids[: rng.choice((position, POSITIONS))] if not drafts else each.token_ids[:position]
            draws += draws_behind(Draw(handle, position, each.num_prompt_tokens, each.sampling, known), drafts)
            rows.append(each.logits[position : position + len(drafts) + 1])
            expected.append((each, position, drafts))
        logits = np.concatenate(rows)
        chosen = choose_tokens(logits, draws, EOS)
        at = 0
        for each, position, drafts in expected:
            run = accepted_run(drafts, chosen[at : at + len(drafts) + 1])
            compared += len(run)
            differ += run != each.chosen[position : position + len(run)]
            differ += surprisals(logits[at], run[0], 3) != each.surprisals[position]
            at += len(drafts) + 1
    return compared, differ


def _drafts(rng: random.Random, each: Known, position: int) -> Sequence[int]:
    """Right ones, then perhaps a wrong one."""
    count = min(rng.choice((0, 0, 0, 1, 3)), POSITIONS - 1 - position)
    drafts = each.token_ids[position : position + count]
    if drafts and rng.random() < 0.6:
        wrong = rng.randrange(len(drafts))
        drafts[wrong] = (drafts[wrong] + 1) % VOCABULARY
    return drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    compared, differ = count_differences(given.mixes, given.seed)
    sys.stdout.write(f"{given.mixes:,} mixes, {compared:,} tokens compared, {differ} differences\n")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
