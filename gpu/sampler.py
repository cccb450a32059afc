"""From logits to a token: greedy, or drawn with noise that is a function of (seed, position) and of nothing else.

The noise of a draw is one uniform number from Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011), a counter-based generator: key (seed, 0), counter (position, 0, 0, 0). No state is carried, so neither the
order of a batch, nor a preemption, nor a restart can shift it. The draw inverts the distribution function over the
vocabulary in id order, in float64. Filters apply in the usual order: temperature, top-k, top-p.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refold.journal.errors import WorkerLost
from refold.journal.events import Sampling

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


class Draw(NamedTuple):
    """One token to choose: how, for which request, at which position (prompt and outputs counted from 0)."""

    handle: int
    position: int
    num_prompt_tokens: int
    sampling: Sampling


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x64-10: four 64-bit words for a 128-bit key and a 256-bit counter."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _MASK, (left >> 64) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The noise of a position: a float64 in [0, 1), with 53 random bits."""
    return (philox((seed & _MASK, 0), (position, 0, 0, 0))[0] >> 11) * 2.0**-53


def choose_tokens(logits: NDArray[np.float32], draws: list[Draw], eos_token_ids: tuple[int, ...]) -> list[int]:
    """Choose a token per row of logits (draws, vocabulary).

    Raises WorkerLost if a logit is NaN or infinite: what computed it can't be trusted any more.
    """
    assert logits.shape[0] == len(draws), f"{logits.shape[0]} rows of logits for {len(draws)} draws"
    _check_finite(logits, draws)
    tokens = [int(token) for token in logits.argmax(axis=1)] if draws else []
    for row, draw in enumerate(draws):
        masked = masked_token_ids(draw, eos_token_ids, logits.shape[1])
        if draw.sampling.temperature > 0 or masked:
            tokens[row] = choose_token(logits[row], draw, masked)
    return tokens


def _check_finite(logits: NDArray[np.float32], draws: list[Draw]) -> None:
    # A sum is not finite if a term is not; only then is it worth looking at every number.
    if np.isfinite(logits.sum(axis=1, dtype=np.float64)).all():
        return
    for row, draw in enumerate(draws):
        bad = np.flatnonzero(~np.isfinite(logits[row]))
        if len(bad):
            raise WorkerLost(
                f"the logits of handle {draw.handle} at position {draw.position} are not finite ({len(bad)} of "
                f"{logits.shape[1]}, first at token {bad[0]}); check the weights and the device"
            )


def masked_token_ids(draw: Draw, eos_token_ids: tuple[int, ...], vocab_size: int) -> list[int]:
    """Tokens that may not come yet, because they would end the request before its `min_tokens`."""
    sampling = draw.sampling
    if draw.position - draw.num_prompt_tokens >= sampling.min_tokens:
        return []
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(eos_token_ids)
    return [token for token in ends if 0 <= token < vocab_size]


def choose_token(logits: NDArray[np.float32], draw: Draw, masked: list[int]) -> int:
    """Choose from one row of finite logits. If every token is masked, the mask is void: some token must come."""
    allowed = np.ones(len(logits), dtype=bool)
    allowed[masked] = False
    candidates = np.flatnonzero(allowed if allowed.any() else ~allowed)
    values = logits[candidates].astype(np.float64)
    sampling = draw.sampling
    if sampling.temperature <= 0:
        return int(candidates[values.argmax()])
    kept, shares = _filtered(values, sampling)
    cumulative = shares.cumsum()
    target = uniform(sampling.seed, draw.position) * cumulative[-1]
    chosen = min(int(cumulative.searchsorted(target, side="right")), len(cumulative) - 1)
    return int(candidates[kept[chosen]])


def _filtered(values: NDArray[np.float64], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Which values remain, in id order, and their shares (unnormalised). At least the largest remains."""
    kept = np.arange(len(values))
    if 0 < sampling.top_k < len(values):
        kept = _largest(values, sampling.top_k)
    # Subtracting the largest first makes any temperature safe: the exponent is never above 0, and never inf / inf.
    with np.errstate(over="ignore", under="ignore"):
        shares = np.exp((values[kept] - values[kept].max()) / sampling.temperature)
    if sampling.top_p < 1:
        nucleus = _nucleus(shares, sampling.top_p)
        kept, shares = kept[nucleus], shares[nucleus]
    return kept, shares


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest, ascending; of equals, the lower index."""
    least = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def _nucleus(shares: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Indices, ascending, of the fewest largest shares that together reach `top_p` of the whole.

    Shares so small that all of them together can't reach the rest, 1 - top_p, are outside: only the others are sorted.
    """
    whole = shares.sum()
    contenders = np.flatnonzero(shares * len(shares) >= (1 - top_p) * whole)
    order = contenders[np.argsort(-shares[contenders], kind="stable")]
    reached = int(shares[order].cumsum().searchsorted(top_p * whole, side="left"))
    return np.sort(order[: reached + 1])
