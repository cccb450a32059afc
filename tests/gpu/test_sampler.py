"""The sampler: noise by (seed, position), the filters, masks, and numbers that are none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from refold.gpu.logprobs import surprisals
from refold.gpu.noise import child_seed, philox, uniform
from refold.gpu.sampler import Draw, _nucleus, choose_tokens, largest, verify_drafts
from refold.journal.errors import WorkerLost
from refold.journal.events import Sampling
from tests.gpu.sampler_campaign import count_differences

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
    assert largest(values, count).tolist() == naive


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


# -- penalties, biases, min-p -----------------------------------------------------------------------------------------

CONTEXT = (3, 0, 3, 5, 3)  # a prompt of two tokens, then three outputs


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    number, seen = counts.sum(), expected > 0
    assert not counts[~seen].any(), "a token came that can't"
    return float(((counts[seen] - number * expected[seen]) ** 2 / (number * expected[seen])).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


LOGITS = np.array([1.2, -0.7, 0.4, 2.0, -1.5, 0.9])


def adjusted(repetition: float = 1.0, presence: float = 0.0, frequency: float = 0.0, bias: dict = {}) -> np.ndarray:  # noqa: B006
    """By the definitions, one token after the other."""
    prompt, outputs, values = CONTEXT[:2], CONTEXT[2:], []
    for token, logit in enumerate(LOGITS):
        value = logit
        if token in (*prompt, *outputs):
            value = value / repetition if value > 0 else value * repetition
        value -= presence * (token in outputs) + frequency * outputs.count(token)
        values.append(value + bias.get(token, 0.0))
    return np.array(values)


def kept(shares: np.ndarray, *tokens: int) -> np.ndarray:
    left = np.zeros_like(shares)
    left[list(tokens)] = shares[list(tokens)]
    return left / left.sum()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_penalty": 1.8}, softmax(adjusted(repetition=1.8))),
        ({"repetition_penalty": 0.5}, softmax(adjusted(repetition=0.5))),
        ({"presence_penalty": 1.1}, softmax(adjusted(presence=1.1))),
        ({"presence_penalty": -2.0}, softmax(adjusted(presence=-2.0))),
        ({"frequency_penalty": 0.8}, softmax(adjusted(frequency=0.8))),
        ({"logit_bias": ((1, 2.5), (3, -3.0))}, softmax(adjusted(bias={1: 2.5, 3: -3.0}))),
        ({"min_p": 0.3}, kept(softmax(LOGITS), 0, 3, 5)),
        ({"min_p": 1.0}, kept(softmax(LOGITS), 3)),
        ({"min_p": 0.4, "temperature": 2.0}, kept(softmax(LOGITS / 2), 0, 2, 3, 5)),
        (
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": ((4, 3.0),)},
            softmax(adjusted(1.3, 0.5, 0.4, {4: 3.0})),
        ),
        (
            {"frequency_penalty": 1.0, "top_k": 3, "min_p": 0.35},
            kept(softmax(adjusted(frequency=1.0)), 0, 2),
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_tokens_come_as_often_as_the_definitions_say(options: dict, expected: np.ndarray) -> None:
    number, logits = 2_500, LOGITS.astype(np.float32)[None]
    draws = [
        Draw(0, 5, 2, Sampling(**{"seed": seed, "max_tokens": 9, "temperature": 1.0} | options), CONTEXT)  # type: ignore[arg-type]
        for seed in range(number)
    ]
    drawn = [choose_tokens(logits, [each], EOS)[0] for each in draws]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    assert chi_square(counts, expected) < 20.5, "chi-square, at most 5 degrees of freedom, p = 0.001"


def test_greedy_hears_penalties_and_biases_too() -> None:
    def greedy(**options: object) -> int:
        sampling = Sampling(seed=0, max_tokens=9, **options)  # type: ignore[arg-type]
        return choose_tokens(LOGITS.astype(np.float32)[None], [Draw(0, 5, 2, sampling, CONTEXT)], EOS)[0]

    assert greedy() == 3
    assert greedy(presence_penalty=1.5) == 0
    assert greedy(repetition_penalty=1.9) == 3
    assert greedy(logit_bias=((1, 3.0),)) == 1
    assert greedy(logit_bias=((3, -100.0),)) == 0


def test_a_penalty_without_the_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="0 tokens before position 10"):
        choose([0.0, 1.0], presence_penalty=1.0)


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_rejection_sampling_keeps_the_target_distribution() -> None:
    """Of the first token whatever the draft is; of the second, given that the draft was accepted."""
    first, second = SHARES, np.array([0.1, 0.3, 0.2, 0.2, 0.15, 0.05])
    logits, number = np.log(np.stack([first, second])).astype(np.float32), 3_000
    for drafted in (0, 3):
        runs = [verify_drafts(logits, [drafted], draw(7, seed=seed), EOS) for seed in range(number)]
        accepted = [run for run in runs if len(run) == 2]
        assert all(run[0] == drafted for run in accepted)
        assert all(run[0] != drafted for run in runs if len(run) == 1)
        counts = np.bincount([run[0] for run in runs], minlength=6)
        assert chi_square(counts, first) < 20.5, "chi-square, 5 degrees of freedom, p = 0.001"
        counts = np.bincount([run[1] for run in accepted], minlength=6)
        assert chi_square(counts, second) < 20.5
        assert abs(len(accepted) / number - first[drafted]) < 0.03


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"frequency_penalty": 1.0, "min_p": 0.1},
    ],
    ids=str,
)
def test_with_drafts_the_output_is_the_same_to_the_token(options: dict) -> None:
    """A toy model whose logits depend on the last two tokens; drafts right, wrong and half right."""
    model = np.random.default_rng(8).standard_normal((12, 12, 12)).astype(np.float32) * 1.5
    noise = np.random.default_rng(9)

    def logits_after(tokens: list[int]) -> np.ndarray:
        return model[tokens[-2], tokens[-1]]

    def next_draw(tokens: list[int], seed: int) -> Draw:
        return draw(len(tokens), prompt=2, seed=seed, **options)._replace(token_ids=tokens)

    num_accepted = 0
    for seed in range(12):
        plain = [1, 4]
        while len(plain) < 40:
            plain += choose_tokens(logits_after(plain)[None], [next_draw(plain, seed)], EOS)
        drafted = [1, 4]
        while len(drafted) < 40:
            right = plain[len(drafted) : len(drafted) + 3]
            drafts = [token if noise.random() < 0.7 else int(noise.integers(12)) for token in right]
            rows = np.stack([logits_after([*drafted, *drafts[:ahead]]) for ahead in range(len(drafts) + 1)])
            run = verify_drafts(rows, drafts, next_draw(drafted, seed), EOS)
            num_accepted += len(run) - 1
            drafted += run
        assert drafted[:40] == plain[:40]
    assert num_accepted > 50


# -- mixes ------------------------------------------------------------------------------------------------------------


def test_no_mix_changes_a_token() -> None:
    compared, differ = count_differences(300, seed=4, num_requests=40)
    assert compared > 1_500
    assert differ == 0


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_surprisals_are_those_of_the_models_own_logits() -> None:
    rank, chosen, *top = surprisals(LOGITS.astype(np.float32), 5, 3)
    expected = -np.log(softmax(LOGITS.astype(np.float32).astype(np.float64))) * 1e6
    assert rank == 3
    assert chosen == round(expected[5])
    assert top == [3, round(expected[3]), 0, round(expected[0]), 5, round(expected[5])]
    assert surprisals(LOGITS.astype(np.float32), 4, 0) == [6, round(expected[4])]


def test_of_equals_the_first_comes_first_and_both_have_one_rank() -> None:
    assert surprisals(np.array([1, 5, 5, 0], dtype=np.float32), 2, 2)[0] == 1
    assert surprisals(np.array([1, 5, 5, 0], dtype=np.float32), 2, 2)[2::2] == [1, 2]


def test_certainty_and_the_impossible_can_be_written() -> None:
    extreme = np.array([3e38, -3e38, 0], dtype=np.float32)
    assert surprisals(extreme, 0, 1) == [1, 0, 0, 0]
    assert surprisals(extreme, 1, 0) == [3, 2**62]
    assert len(surprisals(extreme, 0, 20)) == 2 + 2 * 3


def test_children_have_seeds_that_are_no_neighbours() -> None:
    seeds = {child_seed(seed, child) for seed in range(40) for child in range(40)}
    assert len(seeds) == 1600
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert uniform(child_seed(5, 0), 3) != uniform(5, 3)
    assert uniform(5, 3, draw=1) != uniform(5, 3)
