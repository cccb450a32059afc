"""`refold shrink`: the shortest list of orders that still fails, as a test."""

from pathlib import Path

import click

from refold.engine.cli.console import finite, journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import NOT_SO, USAGE, Complaint, unwritable
from refold.engine.cli.output import named, note, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.orders import orders_of
from refold.engine.history.plain import count
from refold.engine.history.shrink import as_pytest, shrink_orders
from refold.engine.history.whole_file import whole_text
from refold.journal.errors import Rejected

EXAMPLES = """Examples:
  refold shrink bad.db                 print a pytest that fails as the journal's history does
  refold shrink bad.db -o test_bad.py --seconds 120

Exit status: 0 a test was made, 1 the history doesn't fail with this refold."""


@verb("shrink", EXAMPLES)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Where to write the test.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 86_400),
    callback=finite,
    default=60.0,
    show_default=True,
    help="How long to try.",
)
@stream_option
@json_option
@journal_argument
def command(output: Path | None, seconds: float, stream: str, as_json: bool, journal: str) -> None:
    """Reduce a journal to the shortest list of commands that still fails in the same way, and write it as a pytest.

    The journal's commands are played again by this refold, with the model saying what it said; the laws look on. The test needs
    nothing but refold and pytest.
    """
    if output is not None and output.exists():
        raise Complaint(f"{output} exists", "name another file", USAGE)
    with reading(journal, stream) as reader, bar("reading", reader.head(stream).position, "records") as progress:
        heard = orders_of(reader, stream, on_record=progress.advance)
    try:
        shrunk = shrink_orders(heard.orders, heard.said, seconds)
    except Rejected as error:
        again = typed("verify", journal, options=(*of_stream(stream), "--redecide"))
        hint = f"`{again}` says whether the recorded history itself is wrong"
        raise Complaint("played again by this refold, this history doesn't fail", hint, NOT_SO) from error
    text = as_pytest(shrunk, f"Shrunk from a journal of {heard.num_events} events to {shrunk.num_events}.")
    if output is not None:
        try:
            with whole_text(output) as file:
                file.write(text)
        except OSError as error:
            raise unwritable(output, error) from error
    removed = 1 - shrunk.num_events / heard.num_events if heard.num_events else 0.0
    if as_json:
        write_json(
            {
                "schema": "refold.shrink/1",
                "failure": str(shrunk.failure),
                "num_events_before": heard.num_events,
                "num_events": shrunk.num_events,
                "num_orders": len(shrunk.orders),
                "num_plays": shrunk.num_plays,
                "output": str(output) if output else None,
            }
        )
    elif output is None:
        write(text.rstrip("\n"))
    note(
        f"{named(journal)}: {shrunk.failure}; {count(shrunk.num_events, 'event')} of {heard.num_events:,} are enough "
        f"({removed:.1%} removed, {shrunk.num_plays:,} plays)"
    )
