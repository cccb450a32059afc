"""Log-probabilities: what the model thought of a token, by its own logits, before anything of `Sampling`.

They don't depend on temperature, filters or penalties, so they compare across requests, and a banned token has one too. Computed
in float64 and written as surprisals (`refold.journal.surprisals`).
"""

import numpy as np
from numpy.typing import NDArray

from refold.gpu.sampler import largest
from refold.journal.surprisals import MAX_SURPRISAL, MICRONATS_PER_NAT, EntrySurprisals


def surprisals(logits: NDArray[np.float32], token_id: int, num_top: int) -> list[int]:
    """The numbers of a token, of its row of finite logits (vocabulary); see `refold.journal.surprisals`.

    `num_top` may be more than the vocabulary: then all of it is told.
    """
    values = logits.astype(np.float64)
    best = values.max()
    total = best + np.log(np.exp(values - best).sum())
    rank = 1 + int((values > values[token_id]).sum())
    numbers = [rank, _written(total - values[token_id])]
    if num_top:
        top = largest(values, min(num_top, len(values)))
        for each in top[np.argsort(-values[top], kind="stable")]:
            numbers += (int(each), _written(total - values[each]))
    return numbers


def entry_surprisals(entry: int, rows: NDArray[np.float32], token_ids: list[int], num_top: int) -> EntrySurprisals:
    """The numbers of an entry's tokens, each of its row of logits (tokens, vocabulary)."""
    num_top = min(num_top, rows.shape[1])
    numbers = [number for row, token in zip(rows, token_ids, strict=True) for number in surprisals(row, token, num_top)]
    return EntrySurprisals(entry=entry, num_top=num_top, surprisals=numbers)


def _written(nats: float) -> int:
    # Rounding may leave the likeliest of all a hair above certainty.
    return min(max(round(float(nats) * MICRONATS_PER_NAT), 0), MAX_SURPRISAL)
