"""The figures of docs/reliability.md: one line for each row and store, between two marks, each replaced by its last run.

The page's text is written by hand. What a campaign found is written by it, with the command that finds it again; a row that a run
was not about keeps its figures.
"""

from pathlib import Path

from tests.reliability.judge import Tally

_BEGIN, _END = "<!-- figures: written by make fault-matrix -->", "<!-- end of figures -->"
_HEAD = [
    "| row | store | cycles | silent wrong state | acknowledged record lost | duplicate | what was seen | command |",
    "|---|---|---:|---:|---:|---:|---|---|",
]


def write_page(path: Path, tallies: list[Tally]) -> None:
    """Put the figures of `tallies` into the page."""
    before, rest = path.read_text(encoding="utf-8").split(_BEGIN)
    table, after = rest.split(_END)
    lines = {_key(line): line for line in table.splitlines() if line.startswith("| `")}
    lines |= {_key(line): line for line in map(_line, tallies)}
    body = "\n".join([_BEGIN, *_HEAD, *(lines[key] for key in sorted(lines)), _END])
    path.write_text(before + body + after, encoding="utf-8")


def _key(line: str) -> tuple[str, str]:
    row, store = line.split("|")[1:3]
    return row.strip(), store.strip()


def _line(tally: Tally) -> str:
    seen = "; ".join(f"{count:,} {what}" for what, count in sorted(tally.seen.items(), key=lambda item: -item[1]))
    cells = [
        f"`{tally.row}`",
        tally.store,
        f"{tally.cycles:,}",
        str(tally.wrong_state),
        str(tally.lost),
        str(tally.duplicates),
        seen,
        f"`make fault-{tally.row}`",
    ]
    return f"| {' | '.join(cells)} |"
