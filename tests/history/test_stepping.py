"""Stepping: a command a line."""

import pytest

from refold.engine.history.stepping import Stepper
from refold.engine.history.timeline import Timeline
from tests.history.journals import eventful_lives, sealed
from tests.history.readers import ListReader


@pytest.fixture
def stepper():
    lives, _ = eventful_lives()
    return Stepper(Timeline(ListReader(sealed(lives))), lambda: None)


def test_forward_back_and_to_places(stepper):
    assert stepper.answer("n 12")[0].startswith("     11")
    assert stepper.answer("")[0].startswith("     12")
    assert stepper.answer("b 2")[0].startswith("     10")
    assert stepper.answer("g 40")[0].startswith("     40")
    assert stepper.answer("s 3")[0].startswith("     12")
    assert stepper.answer("e")[0].startswith(f"{len(stepper.timeline) - 1:>7}")
    assert stepper.answer("b 99999") == ["before the first of 98 records"]


def test_to_the_next_event_of_a_request_or_a_kind(stepper):
    assert "req-3 submitted" in stepper.answer("r req-3")[0]
    assert "preempted for" in stepper.answer("k preempted")[0]
    before = stepper.timeline.position
    assert stepper.answer("r nobody") == ["nothing further on names 'nobody'"]
    assert stepper.answer("k nothing") == ["nothing further on is a 'nothing'"]
    assert stepper.timeline.position == before


def test_the_state_and_what_changed(stepper):
    stepper.answer("g 12")
    assert stepper.answer("p")[0] == "running  req-0, req-1, req-2"
    assert any(line.split() == ["num_preemptions", "1"] for line in stepper.answer("p req-3"))
    assert stepper.answer("p nobody") == ["'nobody' is not live here"]
    stepper.answer("n")
    assert any(line.startswith("window[0]") for line in stepper.answer("d"))


def test_to_the_first_violation():
    lives, _ = eventful_lives()
    stepper = Stepper(Timeline(ListReader(sealed(lives))), lambda: 30)
    assert stepper.answer("v")[0] == "the first violation is at record 30; this is the state before it"
    assert stepper.timeline.position == 29


@pytest.mark.parametrize("line", ["x", "g", "g x", "g 99999", "s 99999", "n x", "\x1b[31m"])
def test_what_is_no_command_is_answered_in_a_line(stepper, line):
    answer = stepper.answer(line)
    assert len(answer) == 1
    assert answer[0].isprintable()


@pytest.mark.parametrize("line", ["q", "quit", "exit"])
def test_leaving(stepper, line):
    assert stepper.answer(line) is None


def test_help_names_every_command(stepper):
    text = "\n".join(stepper.answer("h"))
    assert all(f"{word} " in text or f"\n{word}" in text for word in stepper._commands)
