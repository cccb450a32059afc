"""`refold report`: a journal explained on one page."""

from pathlib import Path

import click

from refold.engine.cli.console import check_output, journal_argument, reading, stream_option, verb
from refold.engine.cli.failures import unwritable
from refold.engine.cli.output import named, write
from refold.engine.cli.progress import bar
from refold.engine.history.plain import count, safe
from refold.engine.history.replay import replay
from refold.engine.history.report import page
from refold.engine.history.report_data import gather
from refold.engine.history.whole_file import whole_text

EXAMPLES = """Examples:
  refold report                        ./refold.html, from ./refold.db
  refold report -o monday.html run.db"""


@verb("report", EXAMPLES)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default="refold.html", show_default=True, metavar="FILE"
)
@click.option("--title", default="", metavar="TEXT", help="The page's title; the journal's name without.")
@stream_option
@journal_argument
def command(output: Path, title: str, stream: str, journal: str) -> None:
    """Write one HTML page: timeline, KV occupancy, queues, latency percentiles, waits and preemptions. It loads nothing from anywhere."""
    check_output(output, journal)
    with reading(journal, stream) as reader, bar("reading", reader.head(stream).position, "records") as progress:
        data = gather(replay(reader, stream, expect=reader.head(stream)), progress.advance)
    text = page(data, title or Path(named(journal)).name)
    try:
        with whole_text(output) as file:
            file.write(text)
    except OSError as error:
        raise unwritable(output, error) from error
    write(f"{named(journal)}: {count(data.num_records, 'record')} on {safe(str(output))}, {len(text):,} bytes")
