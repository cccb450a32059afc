"""`refold why`: what led to a request's delays, preemptions and stale tokens."""

import sys
from typing import Literal

import click
import msgspec

from refold.engine.cli.console import finite, journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.output import clock, duration, painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.unknown import unknown_request
from refold.engine.history.plain import safe
from refold.engine.history.waits import by_reason
from refold.engine.history.why import Chain, WhyStory, why
from refold.scheduler.stall import WAIT_WORDS

EXAMPLES = """Examples:
  refold why req-1                     what it waited for, what preempted it, what became stale; each as a chain of causes
  refold why req-1 --only preemption
  refold why req-1 --least 50 --json   delays of 50 ms and more, as data"""

_COLOURS = {"delay": "yellow", "preemption": "red", "stale": "magenta"}


@verb("why", EXAMPLES)
@click.argument("request_id", metavar="ID")
@click.option("--only", type=click.Choice(["delay", "preemption", "stale"]), help="Only chains of this kind.")
@click.option(
    "--least", type=click.FloatRange(0), callback=finite, default=0.0, metavar="MS", help="Leave out shorter delays."
)
@stream_option
@json_option
@journal_argument
def command(
    request_id: str,
    only: Literal["delay", "preemption", "stale"] | None,
    least: float,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """Tell why a request waited, was preempted, or got stale output: each a chain of causes, with the record of each."""
    with reading(journal, stream) as reader, bar("reading", reader.head(stream).position, "records") as progress:
        story = why(reader, request_id, stream, on_record=progress.advance)
    if not story.is_known:
        raise unknown_request(request_id, story.names.similar(request_id), journal, stream)
    chains = [c for c in story.chains if only in (None, c.kind) and (c.kind != "delay" or c.duration_ns >= least * 1e6)]
    if as_json:
        sums = by_reason(story.waits)
        write_json(
            {
                "schema": "refold.why/1",
                "request_id": request_id,
                "waited_ns": sums,
                "chains": msgspec.to_builtins(chains),
            }
        )
        return
    _tell(story, chains)


def _tell(story: WhyStory, chains: list[Chain]) -> None:
    paint = painter(sys.stdout)
    waited = sum(wait.duration_ns for wait in story.waits)
    write(paint(f"{safe(story.request_id)} waited {duration(waited)} in all", bold=True))
    for reason, spent in by_reason(story.waits).items():
        write(f"  {duration(spent):>10}  for {WAIT_WORDS[reason]}")
    for chain in chains:
        length = f"  ({duration(chain.duration_ns)})" if chain.duration_ns else ""
        write("")
        write(paint(f"{chain.kind}: {chain.title}", fg=_COLOURS[chain.kind]) + paint(length, dim=True))
        for link in chain.links:
            write(f"{paint(f'{link.position:>7}  {clock(link.time_ns)}', dim=True)}  {link.words}")
