"""`refold replay`: fold a journal, at once or step by step."""

import sys

import click

from refold.engine.cli.console import journal_argument, painter, reading, verb, write
from refold.engine.cli.places import PLACE, Place, position_of
from refold.engine.cli.progress import bar
from refold.engine.history.plain import count
from refold.engine.history.replay import Contradiction
from refold.engine.history.stepping import HELP, Stepper
from refold.engine.history.timeline import Timeline
from refold.engine.history.verify import verify_journal
from refold.journal.errors import JournalCorrupt
from refold.journal.store import JournalReader
from refold.scheduler.state import digest

EXAMPLES = """Examples:
  refold replay                        fold everything; prints the digest of the last state
  refold replay --step run.db          a prompt: forward, back, to the next event of a request, to the first violation
  printf 'g 812\\np\\nq\\n' | refold replay --step run.db"""


@verb("replay", EXAMPLES)
@click.option("--step", "by_step", is_flag=True, help="Walk about in it, a command a line; h shows them.")
@click.option("--at", type=PLACE, metavar="PLACE", help="Where to begin, or to end without --step.")
@journal_argument
def command(by_step: bool, at: Place | None, journal: str) -> None:
    """Fold a journal with the engine's own code, or walk about in it."""
    with reading(journal) as reader:
        timeline = Timeline(reader)
        if by_step:
            _walk(reader, timeline, journal, at)
            return
        position = position_of(timeline, at, journal)
        with bar("folding", position + 1, "records") as progress:
            for _ in timeline.onward(position + 1):
                progress.advance()
        write(f"{count(position + 1, 'record')} folded; the state hashes to {digest(timeline.state)}")


def _walk(reader: JournalReader, timeline: Timeline, journal: str, at: Place | None) -> None:
    """Read commands from stdin until it ends, or says so."""
    if at is not None:
        timeline.seek(position_of(timeline, at, journal))
    stepper, paint = Stepper(timeline, lambda: _first_violation(reader)), painter(sys.stdout)
    is_watched = sys.stdin.isatty()
    for line in (*HELP.splitlines(), *stepper.where()) if is_watched else stepper.where():
        write(line)
    while True:
        if is_watched:
            sys.stdout.write(paint(f"{timeline.position}> ", dim=True))
        sys.stdout.flush()
        line = sys.stdin.readline()
        answer = stepper.answer(line.rstrip("\n")) if line else None
        if answer is None:
            return
        for each in answer:
            write(each)


def _first_violation(reader: JournalReader) -> int | None:
    try:
        verify_journal(reader)
    except (Contradiction, JournalCorrupt) as error:
        return error.position
    return None
