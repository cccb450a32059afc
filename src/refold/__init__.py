"""refold: an LLM inference engine that keeps a journal.

    from refold import Engine, SamplingParams

Names are loaded on first use, so that `import refold` costs nothing and reading a journal never imports torch. Not even `typing` is
imported: what takes time before the first line of a command runs is time in which Ctrl-C is a traceback.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from refold.engine.sampling_params import SamplingParams
    from refold.engine.engine import Completion, Delta, Engine
    from refold.engine.messages import EngineStopped
    from refold.engine.models import Text
    from refold.engine.opening import Recovery
    from refold.engine.redacting import Redaction
    from refold.engine.session import Session
    from refold.engine.stats import Stats
    from refold.journal.errors import (
        Fenced,
        InvariantViolation,
        JournalCorrupt,
        JournalError,
        JournalOwned,
        NotFound,
        PositionConflict,
        RefoldError,
        Rejected,
        SchemaTooNew,
        WorkerLost,
    )
    from refold.journal.events import EngineConfig
    from refold.scheduler.stall import StallReport, Waiter

__version__ = "0.1.0"

_HOME = {
    "SamplingParams": "refold.engine.sampling_params",
    "Completion": "refold.engine.engine",
    "Delta": "refold.engine.engine",
    "Engine": "refold.engine.engine",
    "EngineStopped": "refold.engine.messages",
    "Text": "refold.engine.models",
    "Recovery": "refold.engine.opening",
    "Redaction": "refold.engine.redacting",
    "Session": "refold.engine.session",
    "Stats": "refold.engine.stats",
    "Fenced": "refold.journal.errors",
    "InvariantViolation": "refold.journal.errors",
    "JournalCorrupt": "refold.journal.errors",
    "JournalError": "refold.journal.errors",
    "JournalOwned": "refold.journal.errors",
    "NotFound": "refold.journal.errors",
    "PositionConflict": "refold.journal.errors",
    "RefoldError": "refold.journal.errors",
    "Rejected": "refold.journal.errors",
    "SchemaTooNew": "refold.journal.errors",
    "WorkerLost": "refold.journal.errors",
    "EngineConfig": "refold.journal.events",
    "StallReport": "refold.scheduler.stall",
    "Waiter": "refold.scheduler.stall",
}

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineStopped",
    "Fenced",
    "InvariantViolation",
    "JournalCorrupt",
    "JournalError",
    "JournalOwned",
    "NotFound",
    "PositionConflict",
    "Recovery",
    "Redaction",
    "RefoldError",
    "Rejected",
    "SamplingParams",
    "SchemaTooNew",
    "Session",
    "StallReport",
    "Stats",
    "Text",
    "Waiter",
    "WorkerLost",
]


def __getattr__(name: str) -> "Any":
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'refold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
