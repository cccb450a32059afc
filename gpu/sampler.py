"""From logits to a token: greedy, or drawn with noise that is a function of (seed, position, draw) and of nothing else.

A token is a function of its own row of logits, its request's own tokens, its `Sampling`, its seed and its position. What else is
in the batch, in which row, and how often the request was preempted can't matter. The steps are the field's usual ones, in its
usual order, in float64:

    repetition penalty      tokens seen (prompt and outputs): a positive logit is divided by it, a negative one multiplied
    presence, frequency     outputs: taken off the logit once, and once per occurrence
    logit bias              added to the logit
    min_tokens              what would end the request too early can't come
    temperature             0 ends here: the largest, of equals the first
    top-k, top-p, min-p     the k likeliest; of these the fewest that reach p; of these, those of at least min-p times the best
    draw                    the distribution function over what is left, in id order, is inverted at the noise

Drafts are verified by the same function. A proposal without a distribution of its own (n-grams) is a distribution with all its
mass on one token, and rejection sampling against it (Leviathan et al., 2023; Chen et al., 2023) accepts the draft x with
probability p(x), and draws from the rest of p else. To draw a token from p and accept the draft if it is that token is the same in
distribution. Here the draw is that of the position, so the output is not only distributed as without drafts: it is the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refold.gpu.noise import uniform
from refold.journal.errors import WorkerLost
from refold.journal.settings import Sampling


class Draw(NamedTuple):
    """One token to choose: how, for which request, at which position (prompt and outputs counted from 0).

    `token_ids` are the request's tokens, at least those before `position`; needed where `needs_own_tokens`.
    """

    handle: int
    position: int
    num_prompt_tokens: int
    sampling: Sampling
    token_ids: Sequence[int] = ()


def needs_own_tokens(sampling: Sampling) -> bool:
    """Whether a token depends on those before it other than through the logits."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def choose_tokens(logits: NDArray[np.float32], draws: Sequence[Draw], eos_token_ids: tuple[int, ...]) -> list[int]:
    """Choose a token per row of logits (draws, vocabulary).

    Raises WorkerLost if a logit is NaN or infinite: what computed it can't be trusted any more.
    """
    assert logits.shape[0] == len(draws), f"{logits.shape[0]} rows of logits for {len(draws)} draws"
    if not draws:
        return []
    best = logits.argmax(axis=1)
    check_finite(logits, draws, logits[np.arange(len(draws)), best])
    tokens: list[int] = best.tolist()
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        masked = masked_token_ids(draw, eos_token_ids, logits.shape[1]) if sampling.min_tokens else []
        if sampling.temperature > 0 or masked or sampling.logit_bias or needs_own_tokens(sampling):
            tokens[row] = choose_token(logits[row], draw, masked)
    return tokens


def draws_behind(draw: Draw, drafts: Sequence[int]) -> list[Draw]:
    """A draw, and one behind each draft: what is chosen there counts if every draft before it is accepted."""
    if not drafts:
        return [draw]
    tokens = [*draw.token_ids, *drafts] if needs_own_tokens(draw.sampling) else draw.token_ids
    return [draw._replace(position=draw.position + ahead, token_ids=tokens) for ahead in range(len(drafts) + 1)]


def accepted_run(drafts: Sequence[int], chosen: list[int]) -> list[int]:
    """What an entry has sampled: the chosen tokens up to the first that isn't the draft in its place."""
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == chosen[num_accepted]:
        num_accepted += 1
    return chosen[: num_accepted + 1]


def verify_drafts(
    logits: NDArray[np.float32], drafts: Sequence[int], draw: Draw, eos_token_ids: tuple[int, ...]
) -> list[int]:
    """The accepted drafts and the token behind them, of logits (1 + drafts, vocabulary) computed with the drafts in place.

    Raises WorkerLost as `choose_tokens`.
    """
    return accepted_run(drafts, choose_tokens(logits, draws_behind(draw, drafts), eos_token_ids))


def check_finite(
    logits: NDArray[np.float32], draws: Sequence[Draw], largest: NDArray[np.float32] | None = None
) -> None:
    """Raises WorkerLost if a logit is NaN or infinite; names the first row's draw. `largest`: of each row, where it's known."""
    # NaN is the smallest and the largest of its row; to look at each number, or at a sum, takes several times as long.
    largest = logits.max(axis=1) if largest is None else largest
    if np.isfinite(largest).all() and np.isfinite(logits.min(axis=1)).all():
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
    sampling = draw.sampling
    values = _adjusted(logits, draw)
    candidates: NDArray[np.intp] | None = None
    if masked and len(masked) < len(values):
        allowed = np.ones(len(values), dtype=bool)
        allowed[masked] = False
        candidates = np.flatnonzero(allowed)
        values = values[candidates]
    if sampling.temperature <= 0:
        chosen = int(values.argmax())
    else:
        kept, shares = _filtered(values, sampling)
        cumulative = shares.cumsum()
        target = uniform(sampling.seed, draw.position) * cumulative[-1]
        place = min(int(cumulative.searchsorted(target, side="right")), len(cumulative) - 1)
        chosen = int(kept[place])
    return chosen if candidates is None else int(candidates[chosen])


def _adjusted(logits: NDArray[np.float32], draw: Draw) -> NDArray[np.float64]:
    """Logits as the request wants them: penalties for what it has said, and biases."""
    sampling, values = draw.sampling, logits.astype(np.float64)
    if needs_own_tokens(sampling):
        tokens = np.array(draw.token_ids[: draw.position], dtype=np.int64)
        assert len(tokens) == draw.position, f"{len(tokens)} tokens before position {draw.position}"
        if sampling.repetition_penalty != 1.0:
            seen = np.unique(tokens)
            before = values[seen]
            penalty = sampling.repetition_penalty
            values[seen] = np.where(before > 0, before / penalty, before * penalty)
        said, counts = np.unique(tokens[draw.num_prompt_tokens :], return_counts=True)
        values[said] -= sampling.presence_penalty + counts * sampling.frequency_penalty
    if sampling.logit_bias:
        biased, biases = zip(*sampling.logit_bias, strict=True)
        values[list(biased)] += biases
    return values


def _filtered(values: NDArray[np.float64], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Which values remain, in id order, and their shares (unnormalised; the largest is 1). At least the largest remains."""
    kept = np.arange(len(values))
    if 0 < sampling.top_k < len(values):
        kept = largest(values, sampling.top_k)
    # Subtracting the largest first makes any temperature safe: the exponent is never above 0, and never inf / inf.
    with np.errstate(over="ignore", under="ignore"):
        shares = np.exp((values[kept] - values[kept].max()) / sampling.temperature)
    if sampling.top_p < 1:
        nucleus = _nucleus(shares, sampling.top_p)
        kept, shares = kept[nucleus], shares[nucleus]
    if sampling.min_p > 0:
        likely = np.flatnonzero(shares >= sampling.min_p)
        kept, shares = kept[likely], shares[likely]
    return kept, shares


def largest(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
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
