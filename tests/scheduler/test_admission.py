"""Admission: what can never fit is refused at the door, with the numbers; what is let in can always be served."""

from typing import Any

import pytest

from refold.journal.errors import Rejected
from refold.journal.events import Media, RequestSubmitted, Sampling
from refold.scheduler.admission import num_blocks_at_most
from refold.scheduler.commands import CloseEngine, PauseEngine, ResumeEngine, SubmitRequest
from tests.kit.drive import Drive, config
from tests.kit.sentences import all_due, ends, nothing_changes, opened, outputs, the

SURROGATE = "\ud800"

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no id", {"request_id": ""}, r"request id '' \(0 characters\): give 1 to 256 printable"),
    ("an id too long", {"request_id": "x" * 257}, r"\(257 characters\)"),
    ("an id with a line break", {"request_id": "a\nb"}, r"request id 'a\\nb'"),
    ("an id with a NUL", {"request_id": "a\x00"}, r"printable"),
    ("a salt too long", {"cache_salt": "s" * 257}, r"cache salt of 257 characters: give at most 256"),
    ("a salt with half a character", {"cache_salt": SURROGATE}, r"valid Unicode"),
    ("a priority too small", {"priority": -(2**63) - 1}, r"priority -9223372036854775809: give a 64-bit integer"),
    ("a priority too large", {"priority": 2**63}, r"priority 9223372036854775808"),
    ("no prompt", {"prompt": []}, r"'r': the prompt is empty"),
    ("a prompt as long as the model", {"prompt": [1] * 24}, r"24 tokens, the model takes 24.*shorten the prompt to 23"),
    ("a prompt much too long", {"prompt": [1] * 5000}, r"5000 tokens, the model takes 24"),
    (
        "a token too large",
        {"prompt": [1, 1000]},
        r"token 1000 at index 1 is not one of the model's 1000 tokens \(0 to 999\)",
    ),
    ("a negative token", {"prompt": [-1]}, r"token -1 at index 0"),
    ("a token that is a float", {"prompt": [1.0]}, r"token 1\.0 at index 0"),
    ("a token that is a bool", {"prompt": [True]}, r"token True at index 0"),
    ("a token that is text", {"prompt": [3, "3"]}, r"token '3' at index 1"),
    ("no tokens wanted", {"max_tokens": 0}, r"'r': max_tokens is 0; give at least 1"),
    ("a negative number wanted", {"max_tokens": -5}, r"max_tokens is -5"),
    ("far too many wanted", {"max_tokens": 2**31}, r"max_tokens is 2147483648"),
    ("a least above the most", {"max_tokens": 4, "min_tokens": 5}, r"min_tokens is 5; give 0 to max_tokens"),
    ("a negative least", {"min_tokens": -1}, r"min_tokens is -1"),
    ("a negative temperature", {"temperature": -0.5}, r"temperature is -0\.5; give 0 or more"),
    ("a temperature that is no number", {"temperature": float("nan")}, r"temperature is nan"),
    ("an infinite temperature", {"temperature": float("inf")}, r"temperature is inf"),
    ("a top_p of nothing", {"top_p": 0.0}, r"top_p is 0\.0; give more than 0 and at most 1"),
    ("a top_p above all", {"top_p": 1.5}, r"top_p is 1\.5"),
    ("a top_p that is no number", {"top_p": float("nan")}, r"top_p is nan"),
    ("a negative top_k", {"top_k": -1}, r"top_k is -1; give 0 \(no limit\) or more"),
    ("a top_k beyond bounds", {"top_k": 2**31}, r"top_k is 2147483648"),
    ("a negative seed", {"seed": -1}, r"seed is -1; give 0 to 2\^63 - 1"),
    ("a seed too large", {"seed": 2**63}, r"seed is 9223372036854775808"),
    ("a tenant with half a character", {"tenant": SURROGATE}, r"tenant '.ud800' \(1 characters\): give at most 256"),
    ("an adapter with half a character", {"adapter": SURROGATE}, r"adapter '.ud800'"),
    ("an adapter with a NUL", {"adapter": "a\x00b"}, r"adapter 'a.x00b' \(3 characters\): give at most 256 printable"),
    ("a tenant too long", {"tenant": "t" * 257}, r"tenant 't{40}' \(257 characters\): give at most 256"),
    ("a grammar with half a character", {"grammar": SURROGATE}, r"grammar .*valid Unicode"),
]


def small(**changes: object) -> Drive:
    """Six blocks of four, a model of 24 tokens, a vocabulary of 1000."""
    return opened(**({"num_blocks": 6, "block_size": 4, "max_model_len": 24, "vocab_size": 1000} | changes))


@pytest.mark.parametrize(("wrong", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_it_is_refused_with_the_value_and_what_to_do(wrong: dict[str, Any], message: str) -> None:
    drive = small()
    command = {"request_id": "r", "prompt": [1, 2, 3]} | wrong
    with nothing_changes(drive), pytest.raises(Rejected, match=message) as refusal:
        drive.submit(**command)
    assert "\n" not in str(refusal.value)
    drive.submit("next", [1, 2, 3], 2)
    drive.run()
    assert outputs(drive) == all_due(drive), "and the next one is served as if nothing had been"


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("an id of one character", {"request_id": "x"}),
    ("an id of 256", {"request_id": "x" * 256}),
    ("an id beyond ASCII", {"request_id": "é世🎈"}),
    ("a salt of 256", {"cache_salt": "s" * 256}),
    ("a salt with a NUL", {"cache_salt": "\x00"}),
    ("the smallest priority", {"priority": -(2**63)}),
    ("the largest priority", {"priority": 2**63 - 1}),
    ("the longest prompt", {"prompt": [1] * 23}),
    ("one token", {"prompt": [999]}),
    ("the first token", {"prompt": [0]}),
    ("far more than the model can say", {"max_tokens": 2**31 - 1}),
    ("as many at least as at most", {"max_tokens": 4, "min_tokens": 4}),
    ("the coldest", {"temperature": 0.0}),
    ("the hottest", {"temperature": 1e308}),
    ("the smallest top_p", {"top_p": 5e-324}),
    ("the largest seed", {"seed": 2**63 - 1}),
    ("the largest top_k", {"top_k": 2**31 - 1}),
    ("stop tokens that do not exist", {"stop_token_ids": (-1, 2**40)}),
]


@pytest.mark.parametrize("edge", [case[1] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_the_last_value_that_is_right_is_accepted_and_served(edge: dict[str, Any]) -> None:
    drive = small()
    command = {"request_id": "r", "prompt": [1, 2, 3]} | edge
    drive.submit(**command)
    drive.run()
    assert outputs(drive) == all_due(drive)
    assert drive.state.is_quiescent


def test_an_id_with_half_a_character_is_no_id() -> None:
    drive = small()
    command = SubmitRequest(
        request_id=SURROGATE, prompt_token_ids=[1], sampling=Sampling(seed=0, max_tokens=1), arrival_ns=0
    )
    with nothing_changes(drive), pytest.raises(Rejected, match=r"request id '.ud800' \(1 characters\)"):
        drive.do(command)


def test_an_id_is_taken_as_long_as_it_is_remembered() -> None:
    drive = small()
    drive.submit("r", 3, 2)
    with nothing_changes(drive), pytest.raises(Rejected, match=r"'r' is taken: resume it, or submit under another id"):
        drive.submit("r", 3, 2)
    drive.run()
    with nothing_changes(drive), pytest.raises(Rejected, match=r"'r' is taken"):
        drive.submit("r", 3, 2)


def test_handles_follow_the_order_of_admission_and_refusals_use_none_up() -> None:
    drive = small()
    assert the(RequestSubmitted, drive.submit("a", 3)).handle == 1
    with pytest.raises(Rejected):
        drive.submit("b", [])
    assert the(RequestSubmitted, drive.submit("c", 3)).handle == 2


# -- what fits --------------------------------------------------------------------------------------------------------


def test_what_can_come_to_need_more_blocks_than_there_are_is_refused() -> None:
    drive = small(num_blocks=3)
    with (
        nothing_changes(drive),
        pytest.raises(
            Rejected,
            match=r"5 prompt tokens and max_tokens 9 can need 4 blocks of 4, the pool has 3; lower max_tokens or enlarge",
        ),
    ):
        drive.submit("r", 5, 9)


def test_the_last_token_needs_no_place() -> None:
    drive = small(num_blocks=3)
    drive.submit("r", 5, 8)
    drive.run()
    assert ends(drive.records, drive) == {"r": ("length", 8)}


def test_the_models_length_bounds_what_a_request_can_need() -> None:
    drive = small(num_blocks=3, max_model_len=13)
    drive.submit("r", 5, 1_000_000)
    drive.run()
    assert ends(drive.records, drive) == {"r": ("length", 8)}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "blocks"), [(1, 1, 1), (4, 1, 1), (4, 2, 2), (5, 1, 2), (5, 4, 2), (5, 5, 3), (20, 99, 6)]
)
def test_blocks_that_a_request_can_come_to_need(prompt: int, max_tokens: int, blocks: int) -> None:
    assert num_blocks_at_most(prompt, max_tokens, config(max_model_len=24)) == blocks


@pytest.mark.parametrize("admit_full_sequence", [True, False])
def test_whoever_is_let_in_can_be_served_alone(admit_full_sequence: bool) -> None:
    for prompt in range(1, 13):
        for max_tokens in (1, 2, 5, 12):
            drive = small(num_blocks=3, max_num_batched_tokens=5, admit_full_sequence=admit_full_sequence)
            try:
                drive.submit("r", prompt, max_tokens)
            except Rejected:
                assert num_blocks_at_most(prompt, max_tokens, drive.config) > 3
                continue
            drive.run()
            assert outputs(drive) == all_due(drive)


# -- media ------------------------------------------------------------------------------------------------------------


MEDIA: list[tuple[str, list[Media], str]] = [
    ("beyond the prompt", [Media(digest="cat", start=6, num_tokens=3)], r"at 6, 3 places, overlaps another or leaves"),
    ("over another", [Media(digest="a", start=0, num_tokens=3), Media(digest="b", start=2, num_tokens=2)], r"'b' at 2"),
    ("out of order", [Media(digest="a", start=4, num_tokens=2), Media(digest="b", start=0, num_tokens=2)], r"'b' at 0"),
    ("before the prompt", [Media(digest="cat", start=-1, num_tokens=2)], r"at -1"),
    ("of no places", [Media(digest="cat", start=1, num_tokens=0)], r"0 places"),
    ("larger than the encoder", [Media(digest="cat", start=0, num_tokens=5)], r"5 embeddings, the encoder takes 4"),
    ("with half a character", [Media(digest=SURROGATE, start=0, num_tokens=2)], r"media digest '.ud800'"),
]


@pytest.mark.parametrize(("media", "message"), [case[1:] for case in MEDIA], ids=[case[0] for case in MEDIA])
def test_media_that_can_not_be_are_refused(media: list[Media], message: str) -> None:
    drive = small(encoder_budget_tokens=4, encoder_cache_tokens=6)
    with nothing_changes(drive), pytest.raises(Rejected, match=message):
        drive.submit("r", 8, 2, media=media)


# -- a closed door ----------------------------------------------------------------------------------------------------


def test_a_closed_engine_takes_nobody() -> None:
    drive = small()
    drive.do(CloseEngine(reason="test"))
    with nothing_changes(drive), pytest.raises(Rejected, match=r"'r': the engine is closed; open it first"):
        drive.submit("r", 3)


def test_an_engine_that_never_opened_takes_nobody() -> None:
    drive = Drive()
    with pytest.raises(Rejected, match="closed"):
        drive.submit("r", 3)


def test_a_draining_engine_takes_nobody_until_it_goes_on() -> None:
    drive = small()
    drive.do(PauseEngine(mode="drain"))
    with nothing_changes(drive), pytest.raises(Rejected, match="draining"):
        drive.submit("r", 3)
    drive.do(ResumeEngine())
    drive.submit("r", 3, 2)
    drive.run()
    assert outputs(drive) == all_due(drive)
