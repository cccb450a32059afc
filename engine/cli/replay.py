"""`refold replay`: fold a journal, at once or step by step; or execute its schedule again."""

import sys

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import NOT_SO
from refold.engine.cli.output import painter, write, write_json
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
  printf 'g 812\\np\\nq\\n' | refold replay --step run.db
  refold replay --execute run.db       compute all of it again, and compare every token (and digest of logits)

Exit status with --execute: 0 all equal, 1 something differs, or can't be expected to be equal here."""


@verb("replay", EXAMPLES)
@click.option("--step", "by_step", is_flag=True, help="Walk about in it, a command a line; h shows them.")
@click.option("--at", type=PLACE, metavar="PLACE", help="Where to begin, or to end without --step.")
@click.option("--execute", is_flag=True, help="Run the recorded schedule again on new workers, and compare.")
@click.option("--model", metavar="NAME", help="Where the weights are now, if not where they were.")
@click.option("--any-environment", is_flag=True, help="Compare though device, versions or threads differ.")
@stream_option
@json_option
@journal_argument
def command(
    by_step: bool,
    at: Place | None,
    execute: bool,
    model: str | None,
    any_environment: bool,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """Fold a journal with the engine's own code, or walk about in it.

    With --execute, the recorded schedule runs again: the same batches in the same order and the same blocks, on a new worker for
    each that the journal had. Each token must be the recorded one, and each row of logits too where their digests were recorded.
    """
    if by_step and execute:
        raise click.UsageError("--step walks, --execute computes: give one of them")
    with reading(journal, stream) as reader:
        timeline = Timeline(reader, stream)
        if execute:
            _execute(reader, timeline, journal, at, model, any_environment=any_environment, as_json=as_json)
            return
        if by_step:
            _walk(timeline, journal, at)
            return
        position = position_of(timeline, at, journal)
        with bar("folding", position + 1, "records") as progress:
            for _ in timeline.onward(position + 1):
                progress.advance()
        write(f"{count(position + 1, 'record')} folded; the state hashes to {digest(timeline.state)}")


def _execute(
    reader: JournalReader,
    timeline: Timeline,
    journal: str,
    at: Place | None,
    model: str | None,
    *,
    any_environment: bool,
    as_json: bool,
) -> None:
    """Execute the schedule again, and say what was compared."""
    from refold.engine.cli import executed
    from refold.engine.history.reexecution import OtherEnvironment, reexecute
    from refold.engine.successors import Successors

    stop = position_of(timeline, at, journal) + 1
    expect = reader.head(timeline.stream) if at is None else None  # all of it: what the head promises must be there
    try:
        with bar("executing", stop, "records") as progress:
            found = reexecute(
                reader,
                Successors(model).make,
                timeline.stream,
                stop=stop if expect is None else expect.position,
                expect=expect,
                on_record=progress.advance,
                any_environment=any_environment,
            )
    except OtherEnvironment as error:
        raise executed.refusal(error, journal, timeline.stream) from error
    if as_json:
        write_json(executed.as_json(found))
        if found.first is not None:
            raise SystemExit(NOT_SO)
        return
    executed.print_executed(found, journal, timeline.stream)


def _walk(timeline: Timeline, journal: str, at: Place | None) -> None:
    """Read commands from stdin until it ends, or says so."""
    if at is not None:
        timeline.seek(position_of(timeline, at, journal))
    stepper, paint = Stepper(timeline, lambda: _first_violation(timeline)), painter(sys.stdout)
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


def _first_violation(timeline: Timeline) -> int | None:
    try:
        verify_journal(timeline.reader, timeline.stream)
    except (Contradiction, JournalCorrupt) as error:
        return error.position
    return None
