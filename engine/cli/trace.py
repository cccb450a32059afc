"""`refold trace`: a journal for Perfetto or chrome://tracing."""

import sys
from pathlib import Path

import click

from refold.engine.cli.console import check_output, journal_argument, reading, stream_option, verb
from refold.engine.cli.failures import unwritable
from refold.engine.cli.output import named, note
from refold.engine.cli.progress import bar
from refold.engine.history.plain import count, safe
from refold.engine.history.replay import replay
from refold.engine.history.trace import write_trace
from refold.engine.history.whole_file import whole_text

EXAMPLES = """Examples:
  refold trace -o run.trace.json       then open it in ui.perfetto.dev, which keeps it in the browser
  refold trace run.db > trace.json"""


@verb("trace", EXAMPLES)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it; stdout without."
)
@stream_option
@journal_argument
def command(output: Path | None, stream: str, journal: str) -> None:
    """Write a journal as Chrome's trace JSON: a track per request, the worker's steps, counters, and flows from preemption to resumption."""
    check_output(output, journal)
    with reading(journal, stream) as reader, bar("tracing", reader.head(stream).position, "records") as progress:
        if output is None:
            write_trace(replay(reader, stream, expect=reader.head(stream)), sys.stdout, progress.advance)
            return
        try:
            with whole_text(output) as file:
                rows = write_trace(replay(reader, stream, expect=reader.head(stream)), file, progress.advance)
        except OSError as error:
            raise unwritable(output, error) from error
    note(f"{named(journal)}: {count(rows, 'row')} in {safe(str(output))}")
