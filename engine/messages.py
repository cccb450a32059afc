"""What comes into the engine's inbox, and how the engine words what went wrong."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from refold.gpu.batch import StepOutput
from refold.journal.errors import InvariantViolation, JournalError, RefoldError, Rejected, WorkerLost
from refold.projections.outbox import Output
from refold.scheduler.commands import Command
from refold.scheduler.state import State

CLOSED = "closed"
INTERRUPTED = "interrupted"
"""Why an engine was closed, as the journal is told: all was well, or by Ctrl-C or SIGTERM, with work that may not have been submitted yet."""

_MAX_REASON_CHARS = 500


class EngineStopped(Rejected):
    """The engine is closed. What was unfinished is in the journal, and continues when it is opened again."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's command. `make` builds it in the engine's thread; the reply comes when its record is durable.

    The reply carries the output of `request_id` if one is named and known, None otherwise. `contents` says, after `make`, which
    contents the journal replaces with the record. `is_patient`: what is of use to the client comes with later records, and the
    reply may come with those.
    """

    make: Callable[[State], Command]
    request_id: str | None = None
    contents: Callable[[], Mapping[int, bytes | None] | None] = lambda: None
    reply: "Future[Output | None]" = field(default_factory=Future)
    is_patient: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """A client's question about the state: `read` answers it in the engine's thread, between two turns."""

    read: Callable[[State], Any]
    reply: "Future[Any]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Durable:
    """Every record before `position` is on disk."""

    position: int


@dataclass(frozen=True, slots=True)
class JournalFailed:
    """The journal's writer has given up."""

    cause: JournalError


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what is in flight, and close. `reason`: what the journal is told."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is built. `thread` tells it from its predecessors, here and below."""

    thread: object
    kind: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step's output. It carries its generation itself."""

    output: StepOutput


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker could not be built, or raised, or answered something that is no answer. Its thread is at its end."""

    thread: object
    cause: BaseException


WorkerMessage = WorkerReady | StepDone | WorkerFailed


def one_line(error: BaseException) -> str:
    """An error as it may stand in a journal or a message: one line of valid Unicode, not for pages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_REASON_CHARS].encode("utf-8", "backslashreplace").decode()


def violation(where: str, error: Exception) -> InvariantViolation:
    """A bug of ours, for those who must hear of it."""
    if isinstance(error, InvariantViolation):
        return error
    found = InvariantViolation(
        f"{where}: {type(error).__name__}: {one_line(error)}; this is a bug of refold: keep the journal and report it"
    )
    found.__cause__ = error
    return found


def worker_lost(cause: BaseException) -> RefoldError:
    """Why a worker is gone. What already says whose fault it is, stays."""
    if isinstance(cause, RefoldError):
        return cause
    lost = WorkerLost(f"the worker failed with {type(cause).__name__}: {one_line(cause)}")
    lost.__cause__ = cause
    return lost
