"""A digest tells rows of logits apart that differ anywhere, by one bit or by many."""

import numpy as np
import pytest

from refold.gpu.digest import digest_rows


def rows_of(count: int, width: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 7, 160, 49_152])
def test_a_row_has_the_same_digest_alone_and_among_others(width: int) -> None:
    rows = rows_of(5, width)
    assert digest_rows(rows) == [digest_rows(row[None])[0] for row in rows]
    assert digest_rows(rows[:0]) == []
    assert digest_rows(rows[::2]) == digest_rows(rows)[::2]


def test_what_was_recorded_once_is_computed_for_ever() -> None:
    row = np.arange(6, dtype=np.float32)[None]
    assert digest_rows(row) == [3_954_815_812_088_365_056]
    assert digest_rows(np.zeros((1, 6), dtype=np.float32)) == [0]


def test_every_single_bit_counts() -> None:
    row = rows_of(1, 160)
    seen = {digest_rows(row)[0]}
    for place in range(160):
        for bit in range(32):
            changed = row.copy()
            changed.view(np.uint32)[0, place] ^= np.uint32(1 << bit)
            seen.add(digest_rows(changed)[0])
    assert len(seen) == 1 + 160 * 32


@pytest.mark.parametrize("bit", [0, 1, 22, 23, 30, 31])
def test_two_changes_of_the_same_bit_do_not_cancel_out(bit: int) -> None:
    """Signs (bit 31) in the upper halves of two words would, if words weren't folded."""
    row = rows_of(1, 160)
    seen = {digest_rows(row)[0]}
    for other in range(1, 160):
        changed = row.copy()
        changed.view(np.uint32)[0, [0, other]] ^= np.uint32(1 << bit)
        seen.add(digest_rows(changed)[0])
    assert len(seen) == 160


def test_order_counts() -> None:
    row = rows_of(1, 160)
    swapped = row.copy()
    swapped[0, [4, 5, 90, 91]] = row[0, [90, 91, 4, 5]]
    assert digest_rows(swapped) != digest_rows(row)
