"""What the verbs write, and where: data to stdout, notes to stderr, colours and wrapping on terminals only; times as people read them."""

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

import click

from refold.engine.cli.app import Settings

if TYPE_CHECKING:
    from rich.console import Console


def in_code(command: str) -> str:
    """A command in the middle of a sentence."""
    return f"`{command}`"


def named(journal: str) -> str:
    """A journal as it may appear on a screen: without control characters, and without a password."""
    from refold.engine.history.plain import safe
    from refold.journal.stores.location import shown

    return safe(shown(journal))


def write(line: str) -> None:
    """One line of data."""
    sys.stdout.write(line + "\n")


def write_json(value: object) -> None:
    """One JSON object on a line."""
    import msgspec

    write(msgspec.json.encode(value).decode())


def note(line: str) -> None:
    """One line for the reader at the terminal, not for the next program."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def note_once(line: str) -> None:
    """As `note`, unless this command has said it already."""
    from refold.engine.history.plain import safe

    told = click.get_current_context().find_object(Settings)
    if told is None or line not in told.told:
        note(safe(line))
    if told is not None:
        told.told.add(line)


def is_told(message: str) -> bool:
    """Whether this command has noted it already, whatever blanks are in it."""
    told = click.get_current_context().find_object(Settings)
    return told is not None and f"refold: {message}".split() in [line.split() for line in told.told]


def colour_on(stream: TextIO) -> bool:
    """Whether to write colours: on a terminal that can, unless $NO_COLOR; $FORCE_COLOR beats all."""
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def painter(stream: TextIO) -> Callable[..., str]:
    """`click.style`, or the same without effect."""
    return click.style if colour_on(stream) else lambda text, **_: str(text)


def is_one_place(stream: TextIO, other: TextIO) -> bool:
    """Whether both streams go to one terminal, pipe or file, so that what is written to one lands between what is written to the other."""
    try:
        return os.path.sameopenfile(stream.fileno(), other.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False


def rich_console(stream: TextIO) -> "Console":
    """A rich console that wraps on terminals only: a program that reads us gets whole lines."""
    from rich.console import Console

    class RaisingConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # noqa: PLE0704 - what is being handled: rich would exit with 1, which means "not found" here

    width = None if stream.isatty() else 10_000
    return RaisingConsole(
        file=stream, width=width, highlight=False, markup=False, emoji=False, soft_wrap=not stream.isatty()
    )


def clock(time_ns: int) -> str:
    """A record's time, UTC, to the millisecond. A time that no calendar has is shown as it is."""
    try:
        moment = datetime.fromtimestamp(time_ns // 1_000_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ns // 1_000_000 % 1000:03d}Z"


def duration(nanoseconds: int) -> str:
    """`812 µs`, `12.3 ms`, `4.56 s`."""
    if nanoseconds < 1_000_000:
        return f"{nanoseconds / 1e3:.0f} µs"
    if nanoseconds < 1_000_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    return f"{nanoseconds / 1e9:.2f} s"
