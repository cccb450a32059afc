"""Block hashes: equal if and only if all that a block's content depends on is equal."""

import random

from refold.journal.events import Media, RequestSubmitted, Sampling
from refold.projections import counters
from refold.projections.block_hashes import block_hash, media_identity, root_hash
from refold.projections.requests import Request
from tests.kit.drive import config

GOLDEN = "8ba44e2414382e521844948aa246615c"
"""SHA-256 over the root's and four little-endian 64-bit tokens, cut to 16 bytes; computed once by other means."""


def hashed(tokens: list[int], block_size: int = 4, salt: str = "", adapter: str = "") -> Request:
    """A request whose prompt was hashed."""
    event = RequestSubmitted(
        handle=1,
        request_id="r",
        prompt_token_ids=tokens,
        sampling=Sampling(seed=0, max_tokens=1),
        arrival_ns=0,
        cache_salt=salt,
        adapter=adapter,
    )
    return Request(event, config(block_size=block_size))


def hashes(tokens: list[int], block_size: int = 4, salt: str = "", adapter: str = "") -> list[bytes]:
    """The chain of its block hashes."""
    return hashed(tokens, block_size, salt, adapter).block_hashes


def test_there_is_a_hash_for_each_full_block() -> None:
    assert [len(hashes(list(range(n)))) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_equal_hashes_mean_equal_prefixes() -> None:
    rng, seen = random.Random(1), dict[bytes, tuple[int, ...]]()
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        for i, each in enumerate(hashes(tokens, 2), 1):
            prefix = tuple(tokens[: 2 * i])
            assert seen.setdefault(each, prefix) == prefix
            assert each == hashes(list(prefix), 2)[-1]
    assert len(set(seen.values())) == len(seen)


def test_a_hash_depends_on_salt_adapter_and_every_token_before() -> None:
    tokens = list(range(8))
    chains = [hashes(tokens), hashes(tokens, salt="s"), hashes(tokens, adapter="s"), hashes([9, *tokens[1:]])]
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == 4


def test_tokens_are_hashed_by_their_value_not_by_their_digits() -> None:
    assert hashes([1, 23, 4, 5]) != hashes([12, 3, 4, 5])


def test_a_hash_is_the_same_for_ever() -> None:
    """Journals of today must find their blocks tomorrow: this number may never change within a schema version."""
    assert hashes([1, 2, 3, 4])[0].hex() == GOLDEN
    assert hashes([1, 2, 3, 4])[0] == block_hash(root_hash(""), b"".join(t.to_bytes(8, "little") for t in (1, 2, 3, 4)))


def test_appending_token_by_token_gives_the_same_chain_as_all_at_once() -> None:
    request = hashed([0])
    for token in range(1, 19):
        counters.append_stale(request, [token], 4)
    assert request.block_hashes == hashes(list(range(19)))


def test_without_hashing_nothing_is_hashed() -> None:
    request = hashed([0])
    for token in range(1, 19):
        counters.append_stale(request, [token], 0)
    assert request.block_hashes == []


def test_one_picture_in_two_sizes_is_two_identities() -> None:
    small, large = Media(digest="cat", start=1, num_tokens=2), Media(digest="cat", start=1, num_tokens=3)
    assert media_identity([small], 0, 4) != media_identity([large], 0, 4)
    assert media_identity([small], 0, 4) == media_identity([small], 0, 4)
    assert media_identity([small], 4, 4) == b"", "it ends before the second block"
