"""refold: an LLM inference engine that keeps a journal.

    from refold import Engine, SamplingParams

Names are loaded on first use, so that `import refold` costs nothing and reading a journal never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refold.engine.config import SamplingParams
    from refold.engine.engine import Completion, Delta, Engine
    from refold.journal.errors import (
        Fenced,
        InvariantViolation,
        JournalCorrupt,
        JournalError,
        JournalOwned,
        NotFound,
        RefoldError,
        Rejected,
        WorkerLost,
    )

__version__ = "0.1.0"

_HOME = {
    "Engine": "refold.engine.engine",
    "Delta": "refold.engine.engine",
    "Completion": "refold.engine.engine",
    "SamplingParams": "refold.engine.config",
    "RefoldError": "refold.journal.errors",
    "Rejected": "refold.journal.errors",
    "NotFound": "refold.journal.errors",
    "JournalError": "refold.journal.errors",
    "JournalCorrupt": "refold.journal.errors",
    "JournalOwned": "refold.journal.errors",
    "Fenced": "refold.journal.errors",
    "WorkerLost": "refold.journal.errors",
    "InvariantViolation": "refold.journal.errors",
}

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "Fenced",
    "InvariantViolation",
    "JournalCorrupt",
    "JournalError",
    "JournalOwned",
    "NotFound",
    "RefoldError",
    "Rejected",
    "SamplingParams",
    "WorkerLost",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'refold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
