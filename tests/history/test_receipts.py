"""Receipts against the journal: every token once, and the right one."""

import pytest

from refold.engine.history.receipts import Receipt, settle

OUTPUTS = {"a": [1, 2, 3, 4], "b": [9]}


def test_every_token_once_is_a_clean_account():
    receipts = [Receipt("a", 0, [1, 2]), Receipt("b", 0, [9]), Receipt("a", 2, [3, 4])]
    account = settle(receipts, OUTPUTS)
    assert account == (5, 0, 0, 0)
    assert account.is_clean


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ([], (0, 5, 0, 0)),
        ([Receipt("a", 0, [1, 2, 3, 4])], (4, 1, 0, 0)),
        ([Receipt("a", 0, [1, 2]), Receipt("a", 1, [2, 3, 4]), Receipt("b", 0, [9])], (6, 0, 1, 0)),
        ([Receipt("a", 0, [1, 2]), Receipt("a", 3, [4]), Receipt("b", 0, [9])], (4, 1, 0, 0)),
        ([Receipt("a", 0, [1, 2, 3, 5]), Receipt("b", 0, [9])], (5, 0, 0, 1)),
        ([Receipt("a", 0, [1, 2, 3, 4, 5]), Receipt("b", 0, [9])], (6, 0, 0, 1)),
        ([Receipt("a", 0, [1, 2, 3, 4]), Receipt("b", 0, [9]), Receipt("ghost", 0, [1])], (6, 0, 0, 1)),
        ([Receipt("a", -1, [4, 1, 2, 3, 4]), Receipt("b", 0, [9])], (6, 0, 0, 1)),
    ],
)
def test_whatever_is_off_is_counted(receipts, expected):
    account = settle(receipts, OUTPUTS)
    assert account == expected
    assert not account.is_clean
