"""The sampler: noise by (seed, position), the filters, masks, and numbers that are none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from refold.gpu.sampler import Draw, _largest, _nucleus, choose_tokens, philox, uniform
from refold.journal.errors import WorkerLost
from refold.journal.events import Sampling

EOS = (2,)
DIGITS_OF_PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
ONES = (1 << 64) - 1


def draw(position: int = 10, *, prompt: int = 5, handle: int = 0, **sampling: object) -> Draw:
    fields = {"seed": 1, "max_tokens": 100, "temperature": 1.0} | sampling
    return Draw(handle, position, prompt, Sampling(**fields))  # type: ignore[arg-type]


def choose(logits: list[float] | np.ndarray, **options: object) -> int:
    return choose_tokens(np.array([logits], dtype=np.float32), [draw(**options)], EOS)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
        ((ONES,) * 2, (ONES,) * 4, (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
        (
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            DIGITS_OF_PI,
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_the_noise_is_philox_by_its_published_vectors(key: tuple, counter: tuple, expected: tuple) -> None:
    assert philox(key, counter) == expected


def words(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@given(seed=st.integers(0, ONES), position=st.integers(1, 1 << 40))
def test_the_noise_is_numpys_philox(seed: int, position: int) -> None:
    # numpy counts up before its first block.
    reference = np.random.Philox(key=words(seed, 0), counter=words(position - 1, 0, 0, 0)).random_raw(4)
    assert philox((seed, 0), (position, 0, 0, 0)) == tuple(int(word) for word in reference)


def test_the_noise_is_uniform_over_positions_and_over_seeds() -> None:
    for sample in ([uniform(7, n) for n in range(20_000)], [uniform(n, 7) for n in range(20_000)]):
        counts = np.bincount((np.array(sample) * 100).astype(int), minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 149.4, "chi-square, 99 degrees of freedom, p = 0.001"
        assert min(sample) >= 0
        assert max(sample) < 1


SHARES = np.array([0.4, 0.05, 0.25, 0.1, 0.05, 0.15])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SHARES),
        ({"temperature": 0.5}, SHARES**2 / (SHARES**2).sum()),
        ({"temperature": 2.0}, SHARES**0.5 / (SHARES**0.5).sum()),
        ({"top_k": 3}, np.array([0.4, 0, 0.25, 0, 0, 0.15]) / 0.8),
        ({"top_p": 0.7}, np.array([0.4, 0, 0.25, 0, 0, 0.15]) / 0.8),
        ({"top_p": 0.64}, np.array([0.4, 0, 0.25, 0, 0, 0]) / 0.65),
        ({"top_k": 3, "top_p": 0.8}, np.array([0.4, 0, 0.25, 0, 0, 0]) / 0.65),
        ({"min_tokens": 10**6}, np.array([0.4, 0.05, 0, 0.1, 0.05, 0.15]) / 0.75),
    ],
)
def test_tokens_come_as_often_as_the_filtered_shares_say(options: dict, expected: np.ndarray) -> None:
    logits = np.log(SHARES).astype(np.float32) + 3
    number = 8_000
    drawn = [choose(logits, position=position, seed=position % 13, **options) for position in range(number)]
    counts = np.bincount(drawn, minlength=len(SHARES))
    assert not counts[expected == 0].any()
    seen = expected > 0
    statistic = ((counts[seen] - number * expected[seen]) ** 2 / (number * expected[seen])).sum()
    assert statistic < 20.5, "chi-square, at most 5 degrees of freedom, p = 0.001"


def test_a_token_depends_on_its_own_row_seed_and_position_only() -> None:
    logits = np.random.default_rng(3).standard_normal((64, 500)).astype(np.float32) * 2
    draws = [draw(n, handle=n, seed=n * 7, temperature=(n % 4) * 0.5, top_k=n % 9, top_p=0.9) for n in range(64)]
    alone = [choose_tokens(logits[n : n + 1], [draws[n]], EOS)[0] for n in range(64)]
    assert choose_tokens(logits, draws, EOS) == alone
    order = np.random.default_rng(4).permutation(64)
    assert choose_tokens(logits[order], [draws[n] for n in order], EOS) == [alone[n] for n in order]


def test_another_seed_or_position_draws_anew() -> None:
    flat = [0.0] * 1000
    assert len({choose(flat, seed=seed) for seed in range(50)}) > 40
    assert len({choose(flat, position=position) for position in range(50)}) > 40
    assert choose(flat, seed=5) == choose(flat, seed=5)


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    assert choose([1, 5, 2, 5], temperature=0.0) == 1
    assert choose([1, 5, 2, 5], top_k=1) == 1
    assert choose([1, 5, 2, 5], top_p=1e-9) == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5, 1e300, 1.7e308])
def test_any_temperature_is_safe(temperature: float) -> None:
    token = choose([-3e38, 0, 3e38, 1], temperature=temperature, top_k=3, top_p=0.99)
    assert 0 <= token < 4
    if temperature < 1:
        assert token == 2


def test_ends_are_masked_until_enough_tokens_are_out() -> None:
    logits = [0.0, 1.0, 9.0, 8.0]  # the end of sequence, then a stop token, then 1
    for temperature in (0.0, 1e-3):
        options = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": (3,)}
        assert [choose(logits, position=5 + n, prompt=5, **options) for n in range(5)] == [1, 1, 1, 2, 2]
        assert choose(logits, position=5, prompt=5, ignore_eos=True, **options) == 2
        options["stop_token_ids"] = (99, -1)
        assert choose(logits, position=5, prompt=5, **options) == 3


def test_if_everything_is_masked_nothing_is() -> None:
    assert choose([0.0, 3.0, 1.0], temperature=0.0, min_tokens=50, stop_token_ids=(0, 1, 2)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_lose_the_worker(bad: float, temperature: float) -> None:
    logits = np.zeros((3, 100), dtype=np.float32)
    logits[1, 17] = bad
    draws = [draw(40 + n, handle=7 + n, temperature=temperature) for n in range(3)]
    with pytest.raises(WorkerLost, match=r"handle 8 at position 41 are not finite \(1 of 100, first at token 17\)"):
        choose_tokens(logits, draws, EOS)


def test_large_finite_logits_are_numbers() -> None:
    assert choose([3e38] * 50 + [3.1e38], temperature=0.0) == 50


VALUES = arrays(np.float64, st.integers(1, 40), elements=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 7.5]))


@given(values=VALUES, count=st.integers(1, 40))
def test_the_largest_are_those_of_a_stable_sort(values: np.ndarray, count: int) -> None:
    count = min(count, len(values))
    naive = sorted(sorted(range(len(values)), key=lambda index: -values[index])[:count])
    assert _largest(values, count).tolist() == naive


@given(shares=arrays(np.float64, st.integers(1, 40), elements=st.floats(1e-12, 1)), top_p=st.floats(0.01, 0.99))
@settings(max_examples=300)
def test_the_nucleus_is_the_fewest_largest_that_reach_top_p(shares: np.ndarray, top_p: float) -> None:
    kept = _nucleus(shares, top_p)
    assert kept.tolist() == sorted(kept.tolist())
    mass = shares[kept].sum()
    rest = np.setdiff1d(np.arange(len(shares)), kept)
    assert mass >= top_p * shares.sum() * (1 - 1e-9)
    assert mass - shares[kept].min() <= top_p * shares.sum() * (1 + 1e-9)
    assert not len(rest) or shares[rest].max() <= shares[kept].min()
