"""The checkout, as the project's own tests see it."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "gpu", "journal", "migrations", "projections", "scheduler")


class Source(NamedTuple):
    """One Python file of ours: its path from the root, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return _parsed(self.text, self.path)


@lru_cache(maxsize=1)  # one rule after the other asks for the same file's
def _parsed(text: str, path: str) -> ast.Module:
    return ast.parse(text, path)


def tracked(*patterns: str) -> list[str]:
    """Files of the commit, or of the folder where there is no git (an unpacked sdist)."""
    if not (ROOT / ".git").exists():
        return sorted(
            str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.rglob(pattern) if path.is_file()
        )
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """The Python files below `folders`."""
    names = tracked(*(f"{folder}/*.py" for folder in folders))
    assert names, f"no Python files below {folders}"
    return tuple(Source(name, (ROOT / name).read_text(encoding="utf-8")) for name in names)


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that is imported anywhere in the file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
