"""Progress: on a terminal's stderr only, and not before its time."""

import io
import sys

import pytest

from refold.engine.cli import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def use(stream):
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return use


def advance(times):
    with progress.bar("verifying", times, "records") as bar:
        for _ in range(times):
            bar.advance()


def test_nothing_is_drawn_where_nobody_watches(stderr, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    stream = stderr(io.StringIO())
    advance(50)
    assert stream.getvalue() == ""


def test_nothing_is_drawn_for_what_is_quick(stderr):
    stream = stderr(Terminal())
    advance(50)
    assert stream.getvalue() == ""


def test_a_bar_is_drawn_for_what_takes_long(stderr, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    stream = stderr(Terminal())
    advance(50)
    assert "verifying" in stream.getvalue()
    assert "records" in stream.getvalue()


def test_a_bar_goes_away_when_the_work_fails(stderr, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    stderr(Terminal())
    bars = []

    def work():
        with progress.bar("x", 3, "y") as bar:
            bars.append(bar)
            bar.advance()
            bar.advance()
            raise ValueError("work")

    with pytest.raises(ValueError, match="work"):
        work()
    assert bars[0]._progress.live.is_started is False
