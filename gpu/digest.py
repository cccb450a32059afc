"""A digest of a row of logits: 64 bits, cheap enough to take of every row that a token is chosen from.

The row's float32 bits are read as 64-bit words w, two numbers each; each is folded, w ^ (w >> 32), and multiplied with an odd
constant of its own; the digest is the sum modulo 2^64. An odd factor can be undone modulo 2^64, and so can the fold. Hence two
rows that differ within one word never have one digest, and the same words in another order have another one. Without the
fold, the signs of two numbers in upper halves would cancel out, whatever the factors: 2^63 times an odd number is 2^63.

It finds faults, not forgers. Two rows that differ in several words have the same digest with a probability of about 2^-64, or
2^-32 if only signs and exponents differ; whoever wants to can construct such rows. It tells -0.0 from 0.0, and NaNs from each
other, for it sees bits and no numbers.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_UPPER = np.uint64(32)
_multipliers = np.empty(0, dtype=np.uint64)


def digest_rows(rows: NDArray[np.float32]) -> list[int]:
    """The digests (0 to 2^64 - 1) of rows of contiguous float32 (rows, numbers)."""
    assert rows.dtype == np.float32, f"rows of {rows.dtype}"
    if rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
    factors = _odd_numbers(rows.shape[1] // 2)
    folded = np.empty(len(factors), dtype=np.uint64)
    digests = []
    for words in np.ascontiguousarray(rows).view(np.uint64):
        np.right_shift(words, _UPPER, out=folded)
        np.bitwise_xor(words, folded, out=folded)
        digests.append(int(np.einsum("i,i->", folded, factors)))
    return digests


def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """The first odd constants, from the output of splitmix64 (Steele, Lea and Flood, 2014). The same everywhere, for ever."""
    global _multipliers
    if len(_multipliers) < count:
        _multipliers = np.array([_mixed(index) | 1 for index in range(count)], dtype=np.uint64)
    return _multipliers[:count]


def _mixed(index: int) -> int:
    x = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31
