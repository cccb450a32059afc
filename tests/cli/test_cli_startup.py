"""How fast the command starts, and what it must not import to do so."""

import subprocess
import sys
import time

import pytest

from tests.cli.command import BARE, finished
from tests.history.journals import eventful_lives, write_journal

MARGIN = 3
"""Budgets are for an idle laptop; a busy CI machine gets this much more."""

GUARD = """
import sys
FORBIDDEN = {forbidden!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FORBIDDEN:
            raise ImportError(f"{{name}} is not installed here")
sys.meta_path.insert(0, Refuse())
sys.argv = ["refold", *{arguments!r}]
from refold.engine.cli import main
try:
    main()
finally:
    loaded = sorted(FORBIDDEN & set(name.split(".")[0] for name in sys.modules))
    assert not loaded, loaded
"""

HEAVY = {"torch", "gguf", "safetensors", "numpy", "tokenizers", "sqlalchemy", "alembic", "pydantic", "asyncio"}


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    path = tmp_path_factory.mktemp("startup") / "refold.db"
    write_journal(path, eventful_lives()[0])
    return str(path)


def guarded(*arguments, forbidden):
    code = GUARD.format(forbidden=forbidden, arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True, env=BARE, timeout=60
    )


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (("--help",), set()),
        (("--version",), set()),
        (("log",), set()),
        (("log", "--json", "--request", "req-1"), set()),
        (("verify",), set()),
        (("show",), set()),
        (("show", "--json"), set()),
        (("request", "req-2"), set()),
        (("request", "req-2", "--json"), set()),
    ],
)
def test_reading_needs_no_torch_no_database_toolkit_and_no_model(journal, arguments, allowed):
    at_the_end = () if arguments[0].startswith("--") else (journal,)
    forbidden = HEAVY - allowed | (set() if arguments == ("show",) else {"rich"})
    result = guarded(*arguments, *at_the_end, forbidden=forbidden)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_the_guard_of_these_tests_would_notice(journal):
    assert guarded("show", journal, forbidden={"rich"}).returncode != 0
    assert guarded("log", journal, forbidden={"sqlite3"}).returncode != 0


@pytest.mark.parametrize(("arguments", "budget_s"), [(("--help",), 0.150), (("log",), 0.400)])
def test_the_command_starts_fast(journal, arguments, budget_s):
    took = []
    while len(took) < 6 and min(took, default=9.0) >= budget_s * MARGIN:
        started = time.perf_counter()
        status, stdout, _ = finished(*arguments, *([journal] if arguments == ("log",) else []))
        took.append(time.perf_counter() - started)
        assert status == 0
        assert stdout
    assert min(took) < budget_s * MARGIN, took


def test_help_lists_every_verb_and_loads_none():
    code = (
        "import sys; sys.argv = ['refold', '--help']\n"
        "from refold.engine.cli import main\n"
        "try: main()\n"
        "finally:\n"
        " from refold.engine.cli.app import VERBS\n"
        " loaded = [v for v in VERBS if f'refold.engine.cli.{v}' in sys.modules]\n"
        " assert not loaded, loaded\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert result.returncode == 0, result.stderr
    for verb in ("run", "log", "show", "request", "verify", "migrate", "demo"):
        assert f"\n  {verb} " in result.stdout
