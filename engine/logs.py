"""Logging: one structlog pipeline, which a program configures and a library only borrows.

A log line is for people; the journal is the record. So a line names where to look: the request, the step and the journal
position are bound to it, either on the logger (`get_logger(request="a1")`) or for a stretch of code with
`structlog.contextvars.bound_contextvars(step=7, position=42)`.

Lines go to stderr: stdout belongs to data. They are JSON where nobody watches, and coloured text on a terminal. Tracebacks
carry no local variables: those hold prompts.

A library must not take over its host's logging. `configure_logging` is for our own programs and does nothing where structlog
is configured already; `get_logger` uses the host's configuration if there is one, and otherwise a private pipeline
that speaks from `warning` up and leaves structlog's global state alone.

structlog brings rich with it, and takes a tenth of the time that `Engine` takes to be imported. It's imported for the first line that
is written; most engines write none.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
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
    asked = _Pipeline(not _on_terminal() if json is None else json, _checked(level), around_line)
    if not _is_imported():
        _waiting.pipeline = asked
    elif not (structlog := _structlog()).is_configured():
        structlog.configure(**asked.arguments())


def get_logger(**bound: object) -> "FilteringBoundLogger":
    """A logger of refold's with `bound` on each of its lines. Which pipeline it uses is decided at every line."""
    return cast("FilteringBoundLogger", BorrowedLogger(bound))


class BorrowedLogger:
    """Stands in for the logger that is right at the moment: the host's, or our private one."""

    __slots__ = ("_bound",)

    def __init__(self, bound: dict[str, object]) -> None:
        self._bound = bound

    def __getattr__(self, name: str) -> Any:
        if not _is_imported() and name in _below(_waiting.level):
            return _unsaid
        structlog = _structlog()
        logger = structlog.get_logger("refold") if structlog.is_configured() else _private_logger()
        return getattr(logger.bind(logger="refold", **self._bound), name)


class _Pipeline(NamedTuple):
    """How lines are written."""

    as_json: bool
    level: str
    around_line: AroundLine = nullcontext

    def arguments(self) -> dict[str, Any]:
        """For structlog."""
        make_logger: Callable[..., StderrLogger] = lambda *_names: StderrLogger(self.around_line)  # noqa: E731 - the factory's signature
        number = logging.getLevelNamesMapping()[self.level.upper()]
        return {
            "processors": _common() + (_json_end() if self.as_json else _text_end()),
            "wrapper_class": _structlog().make_filtering_bound_logger(number),
            "context_class": dict,
            "logger_factory": make_logger,
            "cache_logger_on_first_use": False,
        }


class _Waiting:
    """What `configure_logging` was told before anybody had imported structlog. One for the process, as structlog's own configuration is."""

    __slots__ = ("pipeline",)

    def __init__(self) -> None:
        self.pipeline: _Pipeline | None = None

    @property
    def level(self) -> str:
        """The lowest level that will be written."""
        return DEFAULT_LEVEL if self.pipeline is None else self.pipeline.level

    def take(self) -> _Pipeline | None:
        """What was asked for, once."""
        asked, self.pipeline = self.pipeline, None
        return asked


_waiting = _Waiting()


def _is_imported() -> bool:
    """Whether structlog is there. If it isn't, nobody has configured it."""
    return "structlog" in sys.modules


def _structlog() -> Any:
    """structlog, configured if that was asked for."""
    import structlog  # noqa: PLC0415 - see the module's text

    if (asked := _waiting.take()) and not structlog.is_configured():
        structlog.configure(**asked.arguments())
    return structlog


def _below(level: str) -> tuple[str, ...]:
    return LEVELS[: LEVELS.index(level)]


def _unsaid(*_: object, **__: object) -> None:
    """A line below the level."""


@cache
def _private_logger() -> Any:
    arguments = _Pipeline(not _on_terminal(), DEFAULT_LEVEL).arguments()
    arguments.pop("logger_factory")
    return _structlog().wrap_logger(StderrLogger(), **arguments)


def _checked(level: str) -> str:
    if level not in LEVELS:
        raise ValueError(f"no log level {level!r}: choose one of {', '.join(LEVELS)}")
    return level


def _common() -> "list[Processor]":
    structlog = _structlog()
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _json_end() -> "list[Processor]":
    structlog = _structlog()
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]


def _text_end() -> "list[Processor]":
    structlog = _structlog()
    colors = _on_terminal() and "NO_COLOR" not in os.environ
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]


def _on_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
