"""Builds the package; with REFOLD_COMPILED=1 in the environment, its core as machine code.

The core (scheduler/, projections/, the journal's codec) is pure, strictly typed, and most of what a step costs
the processor. mypyc makes C of the same files that Python would read: there is no second source, and the journals are the same
to the byte (`make compiled` compares them). A wheel made so has both forms; Python takes the compiled one.

Plain Python stays the default: it needs no compiler, its tracebacks show each line, and a debugger may stop in it.
"""

import ast
import os
import tempfile
from pathlib import Path
from typing import Any

from setuptools import setup

SWITCH = "REFOLD_COMPILED"
CORE = ("projections/*.py", "scheduler/*.py", "journal/codec.py", "journal/content.py")
"""What is compiled, below src/refold. What waits for a disk or a device would gain nothing."""

# Types are taken from the core alone: looking into torch and SQLAlchemy would take mypyc minutes and two gigabytes.
MYPY = """
[mypy]
strict = True
mypy_path = src
[mypy-refold.engine.*,refold.migrations.*,torch.*,numpy.*]
follow_imports = skip
"""


def core_files() -> list[str]:
    """The files to compile, as paths below the project's root, sorted."""
    return sorted(
        str(path) for pattern in CORE for path in Path("src", "refold").glob(pattern) if can_be_compiled(path)
    )


def can_be_compiled(path: Path) -> bool:
    """Whether a file has code, and no class with keywords: mypyc would drop the `frozen=True` of a struct without a word."""
    body = ast.parse(path.read_bytes()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    return len(body) > 1 and not any(node.keywords for node in classes)


def compiled() -> list[Any]:
    """The core as extension modules. Raises ImportError without mypyc: build with --no-build-isolation beside mypy."""
    from mypyc.build import mypycify  # noqa: PLC0415 - only here is mypy needed

    with tempfile.NamedTemporaryFile("w", suffix=".ini", encoding="utf-8") as config:
        config.write(MYPY)
        config.flush()
        extensions: list[Any] = mypycify(
            [f"--config-file={config.name}", *core_files()], opt_level="3", debug_level="0"
        )
        return extensions


if __name__ == "__main__":
    setup(ext_modules=compiled() if os.environ.get(SWITCH) == "1" else [])
