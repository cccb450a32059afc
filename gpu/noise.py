"""Noise: a function of (seed, position, draw) and of nothing else.

Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), a counter-based generator. The key is
(seed, stream), the counter (position, draw, 0, 0). No state is carried, so neither the order of a batch, nor a preemption, nor
a restart can shift it. Stream 0 chooses tokens; stream 1 makes the seeds of the children of a request that wants more than one
completion, so that no child's noise is a neighbour's, shifted, as it would be with seed + 1.
"""

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_TOKENS, _CHILDREN = 0, 1


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox 4x64-10: four 64-bit words for a 128-bit key and a 256-bit counter."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _MASK, (left >> 64) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """The noise of a position: a float64 in [0, 1), with 53 random bits. `draw` counts the draws of one position."""
    return (philox((seed & _MASK, _TOKENS), (position, draw, 0, 0))[0] >> 11) * 2.0**-53


def child_seed(seed: int, child: int) -> int:
    """63 bits: the seed of child number `child`, from 0, of a request with `seed`."""
    return philox((seed & _MASK, _CHILDREN), (child, 0, 0, 0))[0] >> 1
