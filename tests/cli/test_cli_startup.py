"""How fast the command starts, and what it must not import to do so."""

import subprocess
import sys
import time

import pytest

from tests.cli.command import BARE, finished
from tests.history.journals import eventful_lives, write_journal

TWIN = [sys.executable, "-c", "import click"]
"""What no command can be faster than: it takes its turn beside ours, so that a busy machine is as busy for both."""

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


INTERRUPTED_AT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000): pass  # where the signal is answered
sys.meta_path.insert(0, Interrupt())
sys.argv = ["refold", "log", {journal!r}]
from refold.__main__ import run
run()
"""


@pytest.mark.parametrize("module", ["refold.engine.cli", "click", "refold.engine.cli.log", "msgspec"])
def test_ctrl_c_while_the_command_starts_is_one_line_and_130(journal, module):
    code = INTERRUPTED_AT.format(module=module, journal=journal)
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        text=True,
        env=BARE,
        timeout=60,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "refold: interrupted\n")


@pytest.mark.parametrize(("arguments", "most_twins"), [(("--help",), 2.5), (("log",), 4.0)])
def test_the_command_starts_fast(journal, arguments, most_twins):
    ratios = []
    while len(ratios) < 10 and min(ratios, default=most_twins) >= most_twins:
        began = time.perf_counter()
        subprocess.run(TWIN, check=True, env=BARE)
        between = time.perf_counter()
        status, stdout, _ = finished(*arguments, *([journal] if arguments == ("log",) else []))
        ratios.append((time.perf_counter() - between) / (between - began))
        assert status == 0
        assert stdout
    assert min(ratios) < most_twins, ratios


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
