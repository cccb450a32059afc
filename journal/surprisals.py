"""Surprisals: how log-probabilities are written down.

A surprisal is -1 times a log-probability, in millionths of a nat. It is an integer, so that a journal says the same on every
machine, and never negative, so that an erased one (-1) can be told. A millionth of a nat is less than what bfloat16 or another
build of the same kernel changes.

A token's numbers: the rank of the token (1 is the likeliest), its surprisal, and for each of the likeliest tokens, the best
first, its id and its surprisal.
"""

from collections.abc import Sequence

import msgspec

MICRONATS_PER_NAT = 1_000_000
MAX_SURPRISAL = 2**62
"""What is more surprising than that is written as this: float32 logits can differ by more."""


class EntrySurprisals(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The numbers of some tokens of one entry of a step, `num_top` likeliest tokens beside each."""

    entry: int
    num_top: int
    surprisals: list[int]


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """What the model thought of a token, by its own logits.

    Attributes:
        token_id: the token.
        logprob: its log-probability, in nats.
        rank: 1 is the likeliest of the vocabulary.
        top: the likeliest tokens, the best first, with their log-probabilities; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def numbers_per_token(num_top: int) -> int:
    """How many numbers a token has, with `num_top` likeliest tokens beside it."""
    return 2 + 2 * num_top


def logprob(surprisal: int) -> float:
    """The log-probability in nats."""
    return -surprisal / MICRONATS_PER_NAT if surprisal else 0.0


def token_logprobs(token_ids: Sequence[int], numbers: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """What is told of each of some tokens; nothing of those whose numbers were erased."""
    size, told = numbers_per_token(num_top), []
    for start, token_id in zip(range(0, len(numbers), size), token_ids, strict=False):
        rank, surprisal, *top = numbers[start : start + size]
        if rank > 0:
            pairs = [(each, logprob(of_it)) for each, of_it in zip(top[::2], top[1::2], strict=True)]
            told.append(TokenLogprobs(token_id, logprob(surprisal), rank, pairs))
    return told


def blank(num_tokens: int, num_top: int) -> list[int]:
    """Numbers that could be, in the place of those that nobody remembers or that nobody shall see."""
    top = [number for token_id in range(num_top) for number in (token_id, 0)]
    return [1, 0, *top] * num_tokens
