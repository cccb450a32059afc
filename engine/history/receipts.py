"""Receipts: what clients say they saw, against what the journal says they were given.

A client's word and the journal are kept apart on purpose: the journal can't vouch for what reached a client, and a client
doesn't know what it missed. Together they settle it, token by token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec


class Receipt(msgspec.Struct, frozen=True):
    """One piece of output as a client saw it: `index` is the output index of its first token."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None


class Account(NamedTuple):
    """Tokens that never arrived, arrived twice, or arrived as something else than the journal has at their index."""

    num_seen: int
    num_lost: int
    num_duplicated: int
    num_wrong: int

    @property
    def is_clean(self) -> bool:
        """Every token once, and the right one."""
        return not (self.num_lost or self.num_duplicated or self.num_wrong)


def settle(receipts: Iterable[Receipt], outputs: Mapping[str, Sequence[int]]) -> Account:
    """Compare what was seen with what the journal says (request id -> output tokens)."""
    seen: dict[tuple[str, int], int] = {}
    num_seen = num_duplicated = num_wrong = 0
    for receipt in receipts:
        given = outputs.get(receipt.request_id, ())
        for index, token_id in enumerate(receipt.token_ids, start=receipt.index):
            num_seen += 1
            num_duplicated += (receipt.request_id, index) in seen
            seen[receipt.request_id, index] = token_id
            num_wrong += not (0 <= index < len(given) and given[index] == token_id)
    num_lost = sum(
        (request_id, index) not in seen for request_id, given in outputs.items() for index in range(len(given))
    )
    return Account(num_seen, num_lost, num_duplicated, num_wrong)
