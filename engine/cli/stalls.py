"""`refold stalls`: who waited longest, and for what."""

import sys
from heapq import nlargest

import click

from refold.engine.cli.console import finite, journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.output import clock, duration, painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.history.plain import safe
from refold.engine.history.waits import Wait, all_waits
from refold.scheduler.stall import WAIT_WORDS

EXAMPLES = """Examples:
  refold stalls                        what requests waited for, all together, and the longest waits
  refold stalls --least 100 -n 50      waits of 100 ms and more
  refold stalls --json | jq 'select(.reason == "blocks")'"""


@verb("stalls", EXAMPLES)
@click.option(
    "--least", type=click.FloatRange(0), callback=finite, default=0.0, metavar="MS", help="Leave out shorter waits."
)
@click.option("-n", "--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="The N longest.")
@stream_option
@json_option
@journal_argument
def command(least: float, limit: int, stream: str, as_json: bool, journal: str) -> None:
    """List the longest waits: who waited, for what, what was free, who held the rest, and which record made an end of it."""
    sums: dict[str, int] = {}
    longest: list[Wait] = []
    with reading(journal, stream) as reader, bar("reading", reader.head(stream).position, "records") as progress:
        for wait in all_waits(reader, stream, on_record=progress.advance):
            sums[wait.reason] = sums.get(wait.reason, 0) + wait.duration_ns
            if wait.duration_ns >= max(least * 1e6, 1):
                longest.append(wait)
                if len(longest) > 50 * limit:
                    longest = nlargest(limit, longest, key=lambda wait: wait.duration_ns)
    longest = nlargest(limit, longest, key=lambda wait: wait.duration_ns)
    if as_json:
        for wait in longest:
            write_json({"schema": "refold.stalls/1", **wait._asdict()})
        return
    _tell(sums, longest)


def _tell(sums: dict[str, int], longest: list[Wait]) -> None:
    paint = painter(sys.stdout)
    if not longest:
        write("nobody waited")
        return
    write(paint("all together", bold=True))
    for reason, spent in sorted(sums.items(), key=lambda item: -item[1]):
        write(f"  {duration(spent):>10}  for {WAIT_WORDS[reason]}")  # type: ignore[index]
    write("")
    write(paint("the longest", bold=True))
    for wait in longest:
        where = f"{wait.start:>7}  {clock(wait.start_ns)}  {duration(wait.duration_ns):>9}"
        end = " (still)" if wait.stop is None else f" (until {wait.stop}"
        end += f", by {wait.ended_by})" if wait.ended_by is not None else ")" if wait.stop is not None else ""
        write(f"{paint(where, dim=True)}  {safe(wait.request_id)} for {wait.words}{paint(end, dim=True)}")
