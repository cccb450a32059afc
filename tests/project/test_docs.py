"""What the documentation shows is run.

In README.md and docs/, every ```python block runs, and every `$ ` line of a ```console block must exit 0. The blocks of one
page share an empty folder and run in order, so a page may tell a story. Comments just above a block say why it can't be
run, <!-- not run: the reason -->, that it ends otherwise than with 0, <!-- exit status: -9 --> (minus a signal's number), or what a
line that its last command prints begins with, where the page speaks of that, <!-- prints: the beginning -->.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit.started_python import shared
from tests.project.tree import ROOT, tracked

TIMEOUT_S = 300
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>python|console)[^\n]*\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
ABOVE = re.compile(r"(<!-- [^>]*-->\s*)*\Z")
OPT_OUT = re.compile(r"<!-- not run: \S[^>]*-->")
STATUS = re.compile(r"<!-- exit status: (-?\d+) -->")
PRINTS = re.compile(r"<!-- prints: (.*?) -->")
PAGES = tracked("README.md", "docs/*.md")
ANEW = ("README.md", "docs/reference/history.md")
"""Whose examples each start Python anew, as a reader's do. On pages with dozens that would take most of the time."""


class Block(NamedTuple):
    """A runnable block: its language, its code, the line of the page on which it starts, how its last command ends, and what it prints."""

    language: str
    code: str
    line: int
    status: int = 0
    prints: str = ""


def runnable_blocks(page: str) -> list[Block]:
    """The blocks of a page, without those that opt out."""
    found = []
    for match in FENCE.finditer(page):
        above = ABOVE.search(page, 0, match.start())
        comments = above[0] if above else ""
        if not OPT_OUT.search(comments):
            body = re.sub(f"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
            status, prints = STATUS.search(comments), PRINTS.search(comments)
            line = page.count("\n", 0, match.start()) + 1
            ends = (int(status[1]) if status else 0, prints[1] if prints else "")
            found.append(Block(match["language"], body, line, *ends))
    return found


def commands(console: str) -> list[str]:
    """The lines after a `$ ` prompt; a backslash at the end of one joins the next."""
    joined = re.sub(r"\\\n\s*", "", console)
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def run_block(block: Block, folder: Path, environment: Mapping[str, str]) -> None:
    """Run a block in `folder`; a failure shows the code and what it printed."""
    if block.language == "python":
        orders = [["python", "-c", block.code]]
    else:
        orders = [["bash", "-c", command] for command in commands(block.code)]
        assert orders, f"line {block.line}: a console block without a `$ ` line shows nothing that can be run"
    for number, order in enumerate(orders, 1):
        expected = block.status if number == len(orders) else 0
        done = subprocess.run(
            [shutil.which(order[0], path=environment["PATH"]) or order[0], *order[1:]],
            cwd=folder,
            env=dict(environment),
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        shown = f"exit status {done.returncode}, not {expected}\n{order[-1]}\n{done.stdout}"
        assert done.returncode == expected, f"line {block.line}: {shown}"
    if block.prints:
        begins = any(line.startswith(block.prints) for line in done.stdout.splitlines())
        assert begins, f"line {block.line}: no line begins with {block.prints!r}\n{done.stdout}"


@pytest.fixture
def environment() -> dict[str, str]:
    """Ours, with this interpreter's commands first, and nothing of the caller's that changes what refold does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REFOLD_")}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_the_page_run(page: str, tmp_path: Path, environment: dict[str, str]) -> None:
    if page not in ANEW:
        environment["PATH"] = f"{shared().folder.name}{os.pathsep}{environment['PATH']}"
    for block in runnable_blocks((ROOT / page).read_text(encoding="utf-8")):
        run_block(block, tmp_path, environment)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_whose_examples_name_their_requests_says_that_they_run_once(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    names = [block for block in runnable_blocks(text) if re.search(r"request_ids?=[f\"\[]", block.code)]
    asks_first = all("engine.knows(" in block.code for block in names)
    assert asks_first or re.search(r"(runs|is written) once", text), f"{page}: line {names[0].line}"


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", tracked("*.md"))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in targets if target and not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing, f"{page} links to {missing}"


PAGE = """
```python
x = 1
```

<!-- not run: needs a printer -->

```console
$ lp paper
```

1. a list

   ```console
   $ refold log \\
       -n 5
   12 events
   $ refold verify
   ```

<!-- exit status: -9 -->
<!-- prints: a word -->
```python
import os
```

```json
{}
```
"""


def test_blocks_are_found_with_their_lines_and_without_those_that_opt_out() -> None:
    blocks = runnable_blocks(PAGE)
    assert [(block.language, block.line, block.status, block.prints) for block in blocks] == [
        ("python", 2, 0, ""),
        ("console", 14, 0, ""),
        ("python", 23, -9, "a word"),
    ]
    assert commands(blocks[1].code) == ["refold log -n 5", "refold verify"]


def test_an_opt_out_needs_a_reason() -> None:
    assert runnable_blocks("<!-- not run: -->\n```python\nx\n```\n")


@pytest.mark.parametrize(
    "block",
    [
        Block("python", "raise SystemExit(3)", 9),
        Block("console", "$ exit 3\n", 9),
        Block("console", "$ exit 3\n$ exit 4\n", 9, status=4),
        Block("python", "raise SystemExit(3)", 9, status=-9),
    ],
)
def test_an_example_that_fails_is_reported_with_its_line(
    block: Block, tmp_path: Path, environment: dict[str, str]
) -> None:
    with pytest.raises(AssertionError, match="line 9: exit status 3"):
        run_block(block, tmp_path, environment)


def test_an_example_that_prints_something_else_than_the_page_says_is_reported(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    said = Block("python", "print('one word'); print('another')", 9, prints="ano")
    run_block(said, tmp_path, environment)
    with pytest.raises(AssertionError, match="line 9: no line begins with 'word'"):
        run_block(said._replace(prints="word"), tmp_path, environment)
