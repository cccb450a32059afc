"""Rules of the house that a linter doesn't know. Each rule is shown to catch an offender before it is trusted on ours."""

import ast
import textwrap
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.project.tree import PACKAGES, Source, imported, sources

Rule = Callable[[Source], Iterator[str]]

BANNED_SUFFIXES = ("Manager", "Handler", "Helper", "Processor", "Util", "Utils", "Impl", "Mixin")
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 400

_SHELL = {"asyncio", "threading", "multiprocessing", "time", "datetime", "random", "secrets", "uuid", "os", "socket"}
_SHELL |= {"sqlalchemy", "sqlite3", "logging", "structlog", "pydantic"}
FORBIDDEN_IMPORTS = {
    "scheduler/": _SHELL,
    "projections/": _SHELL,
    "journal/events.py": _SHELL,
    "journal/codec.py": _SHELL,
    "journal/record.py": _SHELL,
    "journal/": {"pydantic", "torch", "click", "rich", "structlog"},
    "gpu/": {"pydantic", "sqlalchemy", "click", "rich", "structlog"},
    "engine/": {"torch", "gguf", "safetensors"},
    "migrations/": {"torch", "gguf", "safetensors", "pydantic"},
}
PYDANTIC_AT = ("engine/checked.py", "engine/config.py", "engine/sampling_params.py", "engine/cli/", "engine/service/")
COUNTERS = ("placeholder", "stale", "in_flight", "computed")


def bad_class_names(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(BANNED_SUFFIXES):
            yield f"{source.path}:{node.lineno} class {node.name}: name it after what it is"


def long_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{source.path}:{node.lineno} {node.name}: {length} lines, more than {MAX_FUNCTION_LINES}"


def long_files(source: Source) -> Iterator[str]:
    length = source.text.count("\n")
    if length > MAX_FILE_LINES:
        yield f"{source.path}: {length} lines, more than {MAX_FILE_LINES}"


EXEMPT = {
    "projections/audit/tables.py": {"sqlalchemy"},
    "projections/audit/postgres_writer.py": {"sqlalchemy"},
    "projections/audit/sqlite_writer.py": {"sqlite3"},
    "projections/audit/beside.py": {"sqlite3"},
}
"""The trailing projection writes into databases; what makes its rows is as pure as the rest of projections/."""


def forbidden_imports(source: Source) -> Iterator[str]:
    for prefix, shell in FORBIDDEN_IMPORTS.items():
        if source.path.startswith(prefix):
            banned = shell - EXEMPT.get(source.path, set())
            for line, name in imported(source.tree):
                if name.partition(".")[0] in banned:
                    yield f"{source.path}:{line} imports {name}, which {prefix} must not"


def pydantic_in_the_middle(source: Source) -> Iterator[str]:
    if not source.path.startswith(PYDANTIC_AT):
        for line, name in imported(source.tree):
            if name.partition(".")[0] == "pydantic":
                yield f"{source.path}:{line} imports pydantic, which belongs to the edges: {', '.join(PYDANTIC_AT)}"


def logging_past_the_host(source: Source) -> Iterator[str]:
    """structlog unconfigured prints to stdout, debug lines too: only our borrowed logger may decide what to use."""
    if source.path != "engine/logs.py":
        for line, name in imported(source.tree):
            if name.partition(".")[0] in {"structlog", "logging"}:
                yield f"{source.path}:{line} imports {name}: use refold.engine.logs.get_logger"


def salted_hashes(source: Source) -> Iterator[str]:
    """Python's `hash` of text differs from process to process, and `id` from run to run: neither may reach a decision."""
    if source.path.startswith(("scheduler/", "projections/", "journal/")):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"hash", "id"}:
                yield f"{source.path}:{node.lineno} calls {node.func.id}(): not the same in another process"


def replay_flags(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        if isinstance(name, str) and name in {"replaying", "is_replaying", "in_replay", "is_replay"}:
            yield f"{source.path}:{getattr(node, 'lineno', 0)} {name}: replay is the live code with another source"


def clamped_counters(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if "max(0, " in line and any(word in line for word in COUNTERS):
            yield f"{source.path}:{number} a counter clamped at zero: find out why it goes below"


OFFENDERS: dict[Rule, Source] = {
    bad_class_names: Source("engine/x.py", "class BlockManager: ..."),
    long_functions: Source("engine/x.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES),
    long_files: Source("engine/x.py", "\n" * (MAX_FILE_LINES + 1)),
    forbidden_imports: Source("scheduler/x.py", "def f():\n    from time import monotonic\n"),
    pydantic_in_the_middle: Source("engine/engine.py", "import pydantic.dataclasses"),
    logging_past_the_host: Source("engine/core.py", "import structlog"),
    salted_hashes: Source("projections/x.py", "key = hash('a')"),
    replay_flags: Source("engine/x.py", "def f(self):\n    if self.replaying: ..."),
    clamped_counters: Source("scheduler/x.py", "n = max(0, request.num_stale - 1)"),
}
RULES = pytest.mark.parametrize("rule", OFFENDERS, ids=lambda rule: rule.__name__)


@RULES
def test_the_rule_catches_an_offender(rule: Rule) -> None:
    assert list(rule(OFFENDERS[rule]))


@RULES
def test_the_rule_lets_good_code_pass(rule: Rule) -> None:
    good = textwrap.dedent(
        """
        import msgspec

        class KeyValueBlocks:
            def free(self, num_wanted: int) -> int:
                return max(0, num_wanted)
        """
    )
    assert not list(rule(Source("projections/blocks.py", good)))


@cache
def offences() -> dict[Rule, list[str]]:
    """What each rule finds in our code. File by file, so that each is parsed once."""
    found: dict[Rule, list[str]] = {rule: [] for rule in OFFENDERS}
    for source in sources(*PACKAGES, "src", "benchmarks", "docs"):
        for rule in OFFENDERS:
            found[rule] += rule(source)
    return found


@RULES
def test_our_code_keeps_the_rule(rule: Rule) -> None:
    assert not offences()[rule], "\n".join(offences()[rule])


def test_relative_imports_are_refused() -> None:
    with pytest.raises(AssertionError, match="imports are absolute"):
        list(imported(ast.parse("from . import events")))
