"""Errors by blame.

Every error that refold raises says whose fault it is, because the remedy depends on that and on nothing else:
`Rejected` is the caller's, `JournalError` the storage's, `WorkerLost` the device's and `InvariantViolation` ours.
A message carries the numbers that led to it and what to do next, in one line.
"""


class RefoldError(Exception):
    """The root of every error that refold raises on purpose.

    Attributes:
        place: where the journal is that it is about, once `refold.journal.naming` has said so.
    """

    place = ""


class Rejected(RefoldError, ValueError):
    """The caller asked for something that can't be done. The state is untouched; becomes a 4xx at the service."""


class NotFound(Rejected):
    """The caller named a request, position or journal that doesn't exist."""


class JournalError(RefoldError):
    """The storage failed, or holds something that isn't a journal."""


class JournalCorrupt(JournalError):
    """A stored record contradicts its hash, its neighbours or the event vocabulary.

    Attributes:
        position: the first bad position.
        kind: what is wrong there: one of `refold.journal.verify.KINDS`, or `undecodable` or `foreign`.
    """

    def __init__(self, message: str, *, position: int, kind: str) -> None:
        super().__init__(message)
        self.position = position
        self.kind = kind


def bad_record(position: int, kind: str, what: str) -> JournalCorrupt:
    """The error of a record that isn't what was written: `record 12 WHAT (KIND)`."""
    return JournalCorrupt(f"record {position} {what} ({kind}); restore a backup", position=position, kind=kind)


class SchemaTooNew(JournalError):
    """The journal was written by a newer refold than this one."""


class JournalOwned(JournalError):
    """Another live engine writes this journal."""


class Fenced(JournalError):
    """This writer lost the journal to an engine with a higher engine epoch. It must stop."""


class PositionConflict(JournalError):
    """The head of the stream is not where the writer expected it: someone else appended."""


class WorkerLost(RefoldError):
    """The device died, hung, or answered something that can't be its answer. Its steps are lost, its requests are not."""


class InvariantViolation(RefoldError, AssertionError):
    """A law of the scheduler is broken: a bug of ours. The journal up to here reproduces it."""
