"""Failures: an exception becomes one line, one hint and an exit status."""

import contextlib
import errno
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import click

from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.plain import count, safe
from refold.journal.beside import DamageBeside
from refold.journal.errors import (
    Fenced,
    InvariantViolation,
    JournalCorrupt,
    JournalError,
    JournalOwned,
    PositionConflict,
    Rejected,
    SchemaTooNew,
    WorkerLost,
)
from refold.journal.naming import name
from refold.journal.store import DEFAULT_STREAM
from refold.journal.stores.location import NoStore, locate, place_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from refold.engine.history.replay import Contradiction

NOT_SO, USAGE, UNREADABLE, TOO_NEW, OWNED = 1, 2, 3, 4, 5
BUG, UNWRITABLE, INTERRUPTED, PIPE_CLOSED, TERMINATED = 70, 74, 130, 141, 143

NO_JOURNAL = "the journal is an argument, or $REFOLD_JOURNAL, or ./refold.db; `refold run` and `refold demo` make one"

_FROM_A_FILE = "a journal in memory ends with its process; `refold run --journal FILE` keeps one"
GOES_ON = "once that is mended, the same command goes on"
_UNTRUSTED = "nothing in it can be trusted: restore a backup"
_HELP = "`{} --help` shows the options and examples"
_OUTPUT_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}
_SQLITE_BUSY_OR_LOCKED = {5, 6}
_POSTGRESQL_LOCKED = "55P03"


class Complaint(Exception):
    """An error that the command line found: the line, the hint and the exit status."""

    def __init__(self, line: str, hint: str, status: int = USAGE) -> None:
        super().__init__(line)
        self.hint = hint
        self.status = status


class _Blame(NamedTuple):
    status: int
    hint: str


# The first match counts: subclasses before their parents.
_BLAMES: tuple[tuple[type[BaseException], _Blame], ...] = (
    (JournalOwned, _Blame(OWNED, "`refold log`, `show`, `request` and `verify` read a journal while its engine runs")),
    (Fenced, _Blame(OWNED, "another engine has this journal now; what it says is what holds")),
    (PositionConflict, _Blame(OWNED, "someone else appended to this journal; start again")),
    (SchemaTooNew, _Blame(TOO_NEW, "`refold --version` says which one this is; nothing was changed")),
    (NoStore, _Blame(UNREADABLE, NO_JOURNAL)),
    (JournalError, _Blame(UNREADABLE, GOES_ON)),
    (Rejected, _Blame(USAGE, _HELP)),
    (WorkerLost, _Blame(BUG, "the journal is whole: run the same command again to carry on")),
    (InvariantViolation, _Blame(BUG, "this is a bug of refold: `refold verify` on the journal reproduces it")),
)


def report(
    error: BaseException,
    *,
    debug: bool,
    command: str = "refold",
    journal: str = "JOURNAL",
    stream: str = DEFAULT_STREAM,
    told: Collection[str] = (),
) -> int:
    """Say on stderr what went wrong with `command` on a stream of `journal`, unless it's among the lines that it was `told`; returns the exit status."""
    if isinstance(error, BrokenPipeError):
        _silence_stdout()
        return PIPE_CLOSED
    if debug:
        import traceback

        traceback.print_exception(error)
    line, hint, status = explain(error, command, journal, stream)
    if status == UNWRITABLE:
        _silence_stdout()
    with contextlib.suppress(OSError, ValueError):
        if line and f"refold: {line}" not in told:
            sys.stderr.write(f"refold: {_one_line(line)}\n")
        if hint:
            sys.stderr.write(f"  hint: {safe(hint)}\n")
        sys.stderr.flush()
    return status


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether a Ctrl-C is behind it, also where an import that it fell into made something else of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt | click.Abort):
            return True
        error = error.__cause__
    return False


def explain(
    error: BaseException, command: str = "refold", journal: str = "JOURNAL", stream: str = DEFAULT_STREAM
) -> tuple[str, str, int]:
    """The line, the hint and the exit status of an error of `command`, such as `refold run`, on a stream of `journal`."""
    if isinstance(error, Complaint):
        return str(error), error.hint, error.status
    if isinstance(error, click.ClickException):
        return _explain_usage(error)
    if _is_interrupt(error):
        return "interrupted", "", INTERRUPTED
    if isinstance(error, SystemExit):
        return "", "", error.code if isinstance(error.code, int) else BUG
    if isinstance(error, JournalCorrupt) or (isinstance(error, InvariantViolation) and _is_contradiction(error)):
        return str(error), damage_hint(error, journal, stream), UNREADABLE
    for kind, blame in _BLAMES:
        if isinstance(error, kind):
            if blame.status == UNREADABLE and _is_locked(error):
                return str(error), "wait for the other program, or stop it", OWNED
            hint = _FROM_A_FILE if isinstance(error, NoStore) and journal.startswith("memory:") else blame.hint
            return str(error), hint.format(command), blame.status
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRNOS:
        reason = "stdout is closed" if error.errno == errno.EBADF else error.strerror
        return f"the output can't be written: {reason}", "the journal is as it was, or whole", UNWRITABLE
    if isinstance(error, MemoryError):
        return "out of memory", "ask for fewer blocks or shorter prompts", BUG
    what = f"{type(error).__name__}: {error}"
    return (
        f"a bug of refold: {what}",
        "run it again with --debug for the traceback, and report it with the journal",
        BUG,
    )


def unwritable(path: object, error: OSError) -> Complaint:
    """The complaint about a file of the user's that can't be written: a full disk isn't a wrong name."""
    status = UNWRITABLE if error.errno in _OUTPUT_ERRNOS else USAGE
    hint = "the journal is as it was, or whole" if status == UNWRITABLE else "name another file"
    return Complaint(f"{path} can't be written: {error.strerror or error}", hint, status)


def damage_hint(error: "JournalCorrupt | Contradiction", journal: str = "JOURNAL", stream: str = DEFAULT_STREAM) -> str:
    """What to do about a stream of a journal that is damaged, or contradicts itself."""
    journal = error.place if error.place not in {"", place_of(journal)} else journal  # of two, the error knows which
    if not isinstance(error, JournalCorrupt):
        log = typed("log", journal, options=(*of_stream(stream), "--until", error.position))
        return f"`{typed('verify', journal, options=of_stream(stream))}` says which law is broken, `{log}` shows the events that lead there"
    if error.kind == "foreign":
        return NO_JOURNAL
    if error.kind == "unmarked":
        return f"`{typed('log', journal, options=(*of_stream(stream), '-n', 20))}` lists the last of what is whole"
    if error.kind == "unindexed":
        if locate(journal).kind == "segments":
            return f"nothing is lost: `{typed('compact', journal)}` mends it, while no engine runs"
        return f"nothing is lost: `{typed('copy', journal, 'NEW')}` makes a whole journal of it"
    if error.kind == "renamed":
        log = typed("log", journal, options=(*of_stream(stream), "-n", 5))
        return f"nothing is lost, and nothing is written until the names are right: `{log}` lists the last of what is kept there"
    if isinstance(error, DamageBeside) and error.kind == "inserted":
        return f"nothing is lost: `{typed('copy', journal, 'NEW')}` makes a journal without them"
    if isinstance(error, DamageBeside) and error.kind == "edited":
        return f"`{typed('copy', journal, 'NEW', options=('--accept-end',))}` makes a journal of the {count(error.position, 'record')} before it"
    if error.position == 0:
        return _asks_read_model(journal) if error.kind in {"truncated", "deleted"} else _UNTRUSTED
    before = typed("log", journal, options=(*of_stream(stream), "--until", error.position - 1))
    return f"the records before it are whole: `{before}` lists them; for the others, restore a backup"


def _asks_read_model(journal: str) -> str:
    """What a read model beside segments that are gone still tells of them; empty if there's none."""
    from refold.engine.audit.witness import known_beside

    num_known = sum(position for _, position, _ in known_beside(journal))
    if not num_known:
        return ""
    ask = typed("audit requests", journal, options=("--as-is",))
    return f"`{ask}` asks the read model, which was made of {count(num_known, 'record')}"


def damaged(error: "JournalCorrupt | Contradiction", journal: str, stream: str = DEFAULT_STREAM) -> Complaint:
    """The complaint about a stream that turned out to be damaged, with commands for it."""
    return Complaint(str(name(error, place_of(journal))), damage_hint(error, journal, stream), UNREADABLE)


def _is_contradiction(error: InvariantViolation) -> "TypeIs[Contradiction]":
    """Whether a journal contradicts itself, rather than a running engine its own laws."""
    from refold.engine.history.replay import Contradiction

    return isinstance(error, Contradiction)


def _explain_usage(error: click.ClickException) -> tuple[str, str, int]:
    ctx = getattr(error, "ctx", None)
    path = ctx.command_path if ctx is not None else "refold"
    message = error.format_message()
    return message[:1].lower() + message[1:], _HELP.format(path), USAGE


def _is_locked(error: BaseException) -> bool:
    """Whether the database said that somebody else holds a lock, at any place in the chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        for candidate in (cause, getattr(cause, "orig", None)):
            code = getattr(candidate, "sqlite_errorcode", None)
            if isinstance(code, int) and code & 0xFF in _SQLITE_BUSY_OR_LOCKED:
                return True
            if getattr(candidate, "sqlstate", None) == _POSTGRESQL_LOCKED:
                return True
        cause = cause.__cause__
    return False


def _one_line(text: str) -> str:
    return safe(" ".join(part.strip() for part in text.splitlines()))


def _silence_stdout() -> None:
    """Nobody reads stdout any more: let the interpreter's last flush go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
