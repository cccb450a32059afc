"""Logging: one structlog pipeline, which a program configures and a library only borrows.

A log line is for people; the journal is the record. So a line names where to look: the request, the step and the journal
position are bound to it, either on the logger (`get_logger(request="a1")`) or for a stretch of code with
`structlog.contextvars.bound_contextvars(step=7, position=42)`.

Lines go to stderr: stdout belongs to data. They are JSON where nobody watches, and coloured text on a terminal. Tracebacks
carry no local variables: those hold prompts.

A library must not take over its host's logging. `configure_logging` is for our own programs and does nothing where structlog
is configured already; `get_logger` uses the host's configuration if there is one, and otherwise a private pipeline
that speaks from `warning` up and leaves structlog's global state alone.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

DEFAULT_LEVEL = "warning"
LEVELS = ("debug", "info", "warning", "error", "critical")
AroundLine = Callable[[], AbstractContextManager[object]]


class StderrLogger:
    """Writes finished lines to whatever stderr is now. A line that can't be written is lost: logging ends no engine."""

    __slots__ = ("_around_line",)

    def __init__(self, around_line: AroundLine = nullcontext) -> None:
        self._around_line = around_line

    def msg(self, line: str) -> None:
        """Write one line, in one call, so that lines of several threads don't mix."""
        if sys.stderr is None:
            return
        try:
            with self._around_line():
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
        except (OSError, ValueError):  # full disk, broken pipe, closed file
            return

    debug = info = warning = error = critical = exception = msg


def configure_logging(
    json: bool | None = None, level: str = DEFAULT_LEVEL, around_line: AroundLine = nullcontext
) -> None:
    """Configure structlog for this process, unless it is configured already.

    Args:
        json: JSON lines, or text. None: text if stderr is a terminal, otherwise JSON.
        level: the lowest level that is written: one of `LEVELS`.
        around_line: entered while a line is written, in whichever thread writes it. A program that leaves its own lines unfinished
            makes room here.

    Raises:
        ValueError: there is no such level.
    """
    arguments = _pipeline(json, level, around_line)
    if not structlog.is_configured():
        structlog.configure(**arguments)


def get_logger(**bound: object) -> FilteringBoundLogger:
    """A logger of refold's with `bound` on each of its lines. Which pipeline it uses is decided at every line."""
    return cast("FilteringBoundLogger", BorrowedLogger(bound))


class BorrowedLogger:
    """Stands in for the logger that is right at the moment: the host's, or our private one."""

    __slots__ = ("_bound",)

    def __init__(self, bound: dict[str, object]) -> None:
        self._bound = bound

    def __getattr__(self, name: str) -> Any:
        logger = structlog.get_logger("refold") if structlog.is_configured() else _private_logger()
        return getattr(logger.bind(logger="refold", **self._bound), name)


@cache
def _private_logger() -> Any:
    arguments = _pipeline(None, DEFAULT_LEVEL)
    arguments.pop("logger_factory")
    return structlog.wrap_logger(StderrLogger(), **arguments)


def _pipeline(json: bool | None, level: str, around_line: AroundLine = nullcontext) -> dict[str, Any]:
    if level not in LEVELS:
        raise ValueError(f"no log level {level!r}: choose one of {', '.join(LEVELS)}")
    as_json = not _on_terminal() if json is None else json
    make_logger: Callable[..., StderrLogger] = lambda *_names: StderrLogger(around_line)  # noqa: E731 - the factory's signature
    return {
        "processors": _common() + (_json_end() if as_json else _text_end()),
        "wrapper_class": structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        "context_class": dict,
        "logger_factory": make_logger,
        "cache_logger_on_first_use": False,
    }


def _common() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _json_end() -> list[Processor]:
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]


def _text_end() -> list[Processor]:
    colors = _on_terminal() and "NO_COLOR" not in os.environ
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]


def _on_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
