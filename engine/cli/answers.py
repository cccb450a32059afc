"""Answers of a database on the screen, as JSON lines or as CSV; and catching up before a question is asked."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import click

from refold.engine.audit.ask import Answer, Questions, is_unasked, questions
from refold.engine.audit.place import Place, catch_up, place_of, writable_place
from refold.engine.cli.console import absent, require_journal
from refold.engine.cli.failures import UNREADABLE, Complaint
from refold.engine.cli.output import in_code, is_told, named, note, painter, write, write_json
from refold.engine.cli.progress import Bar
from refold.engine.cli.typed import typed
from refold.engine.history.plain import safe
from refold.projections.audit.writer import Checkpoint

_PAGE_ROWS = 500
_MAX_CELL = 60


def answer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, `--csv`, `--as-is`."""
    for option in (
        click.option("--as-is", is_flag=True, help="Ask what is there; don't project what was appended since."),
        click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values, with a header."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object per line (NDJSON)."),
    ):
        function = option(function)
    return function


@contextmanager
def there_is_one(journal: str) -> Iterator[None]:
    """A journal that isn't there, as the other verbs tell it.

    Raises:
        Complaint: there is none.
    """
    from refold.journal.errors import NotFound

    try:
        yield
    except NotFound as error:
        raise absent(journal, error) from error


@contextmanager
def asking(journal: str, *, as_is: bool) -> Iterator[Questions]:
    """A read-only connection to a journal's read model, which is brought up to date first.

    Raises:
        JournalError: the journal can't be read, or its read model not be written.
    """
    if as_is:
        with questions(_place_with_model(journal)) as asked:
            if is_unasked(asked):
                note(f"refold: nothing of {named(journal)} is projected yet: without --as-is it is")
            yield asked
        return
    with writable_place(journal) as place:
        if place.is_temporary:
            note(f"refold: {named(journal)} can't be written, or must not be: projecting it into a temporary file")
        is_damaged = any(checkpoint.damage is not None for checkpoint in caught_up(place))
        with questions(place) as asked:
            yield asked
    if is_damaged:  # the answer is there, and it isn't about the whole journal
        raise SystemExit(UNREADABLE)


def _place_with_model(journal: str) -> Place:
    """Where the read model is that is asked as it is. One may be there of a journal that is gone.

    Raises:
        Complaint: none is.
    """
    place = place_of(journal)
    if place.path is not None and not place.path.exists():
        with there_is_one(journal):
            require_journal(journal)
        making = in_code(typed("audit requests", journal))
        raise Complaint(f"{named(journal)} has no read model yet", f"{making} makes it, and asks it", UNREADABLE)
    return place


def caught_up(place: Place, *, rebuilds: bool = False) -> list[Checkpoint]:
    """Bring a read model up to date, with a bar if it takes long, and a word if the journal is damaged."""
    bars: list[Bar] = []

    def advance() -> None:
        bars[0].advance()

    try:
        with there_is_one(place.journal):
            done = catch_up(
                place,
                rebuilds=rebuilds,
                on_start=lambda total: bars.append(Bar("projecting", total, "records")),
                on_record=advance,
            )
    finally:
        for each in bars:
            each.close()
    require_journal(place.journal)  # says so if nobody can tell whether its end is gone
    for checkpoint in done:
        if checkpoint.damage is not None:
            which = "" if is_told(checkpoint.damage) else f": {safe(checkpoint.damage)}"
            note(f"refold: what follows is about the records before the damage{which}")
    return done


def show(answer: Answer, *, as_json: bool, as_csv: bool) -> int:
    """Write an answer; returns how many rows it had.

    Raises:
        click.UsageError: both formats were asked for.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give one", click.get_current_context())
    if as_json:
        return _show_json(answer)
    return _show_csv(answer) if as_csv else _show_table(answer)


def _plain(value: Any) -> Any:
    """A value as JSON and CSV have it."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if value is None or isinstance(value, int | float | str):
        return value
    return float(value) if type(value).__name__ == "Decimal" else str(value)


def _show_json(answer: Answer) -> int:
    if twice := [name for number, name in enumerate(answer.columns) if name in answer.columns[:number]]:
        from refold.journal.errors import Rejected

        raise Rejected(
            f"two columns are called {safe(twice[0])!r}, and a JSON object has room for one: name one with AS"
        )
    num = 0
    for row in answer.rows:
        write_json(dict(zip(answer.columns, map(_plain, row), strict=True)))
        num += 1
    return num


def _show_csv(answer: Answer) -> int:
    import csv

    out, num = csv.writer(sys.stdout, lineterminator="\n"), 0
    out.writerow(answer.columns)
    for row in answer.rows:
        out.writerow(map(_plain, row))
        num += 1
    return num


def _show_table(answer: Answer) -> int:
    """Columns as wide as their widest cell among the first rows; numbers to the right."""
    rows, num = iter(answer.rows), 0
    first = [list(map(_cell, row)) for row in islice(rows, _PAGE_ROWS)]
    right = [all(_is_number(row[i]) for row in first) and bool(first) for i in range(len(answer.columns))]
    widths = [max(map(len, column)) for column in zip(answer.columns, *first, strict=True)]
    bold = painter(sys.stdout)
    write(bold(_line(answer.columns, widths, right), bold=True))
    for row in chain(first, (list(map(_cell, row)) for row in rows)):
        write(_line(row, widths, right))
        num += 1
    if not num:
        note("(no rows)")
    return num


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)]
    return "  ".join(padded).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    text = safe(str(value))
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.lstrip("-")[:1].isdigit()
