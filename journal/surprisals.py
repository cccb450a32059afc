"""Surprisals: how log-probabilities are written down.

A surprisal is -1 times a log-probability, in millionths of a nat. It is an integer, so that a journal says the same on every
machine, and never negative, so that an erased one (-1) can be told. A millionth of a nat is less than what bfloat16 or another
build of the same kernel changes.

A token's numbers: the rank of the token (1 is the likeliest), its surprisal, and for each of the likeliest tokens, the best
first, its id and its surprisal.
"""

MICRONATS_PER_NAT = 1_000_000
MAX_SURPRISAL = 2**62
"""What is more surprising than that is written as this: float32 logits can differ by more."""


def numbers_per_token(num_top: int) -> int:
    """How many numbers a token has, with `num_top` likeliest tokens beside it."""
    return 2 + 2 * num_top


def logprob(surprisal: int) -> float:
    """The log-probability in nats."""
    return -surprisal / MICRONATS_PER_NAT if surprisal else 0.0


def blank(num_tokens: int, num_top: int) -> list[int]:
    """Numbers that could be, in the place of those that nobody remembers or that nobody shall see."""
    top = [number for token_id in range(num_top) for number in (token_id, 0)]
    return [1, 0, *top] * num_tokens
