"""`refold log`: one line per event."""

import sys
import time
from collections.abc import Callable, Iterator

import click
import msgspec

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, tell_if_cut, verb
from refold.engine.cli.failures import Complaint, damaged
from refold.engine.cli.followed import Followed
from refold.engine.cli.output import clock, note, painter, write
from refold.engine.cli.positions import POSITION
from refold.engine.cli.times import TIME
from refold.engine.cli.unknown import unknown_request
from refold.engine.cli.walk import Line, Walk, Wanted, last_lines
from refold.engine.history.plain import count
from refold.engine.history.relations import Names
from refold.engine.history.times import position_of_time
from refold.engine.history.words import sentence
from refold.journal.errors import JournalCorrupt
from refold.journal.events import EVENT_TYPES, Event, StateDigest
from refold.journal.store import JournalReader

EXAMPLES = """Examples:
  refold log                                     every event of ./refold.db
  refold log -n 20 --follow                      the last 20, then what happens next
  refold log --request req-1 run.db              what happened to one request
  refold log --kind RequestPreempted,WorkerLost
  refold log --after 2026-09-21T14:14:30Z --before 2026-09-21T14:14:31Z
  refold log --json | jq 'select(.event.type == "RequestFinished")'"""

_POLL_S = 0.2
_COUNT = click.IntRange(0, 2**62)
_COLOURS = {
    "EngineOpened": "cyan",
    "EngineClosed": "cyan",
    "WorkerStarted": "cyan",
    "WorkerLost": "red",
    "RequestSubmitted": "blue",
    "RequestPreempted": "yellow",
    "StaleOutputConsumed": "magenta",
    "RequestFinished": "green",
    "RequestAborted": "red",
    "RequestQuarantined": "red",
    "QuarantineLifted": "cyan",
    "CacheReset": "red",
    "ContentRedacted": "red",
}


@verb("log", EXAMPLES)
@click.option("--request", "request_id", metavar="ID", help="Only what names this request.")
@click.option("--step", type=_COUNT, help="Only what a step did.")
@click.option("--kind", multiple=True, metavar="KIND[,KIND]", help="Only these kinds of event.")
@click.option("--since", type=POSITION, default=0, metavar="POS", help="From this position on.")
@click.option("--until", type=POSITION, metavar="POS", help="Up to this position, included.")
@click.option("--after", type=TIME, metavar="TIME", help="Not before this time, e.g. 2026-09-21T14:14:30Z.")
@click.option("--before", type=TIME, metavar="TIME", help="Not after this time.")
@click.option("-n", "--limit", type=_COUNT, metavar="N", help="Only the last N of these.")
@click.option("--reverse", is_flag=True, help="The newest first.")
@click.option("-f", "--follow", is_flag=True, help="Wait for more, until interrupted.")
@stream_option
@json_option
@journal_argument
def command(
    request_id: str | None,
    step: int | None,
    kind: tuple[str, ...],
    since: int,
    until: int | None,
    after: int | None,
    before: int | None,
    limit: int | None,
    reverse: bool,
    follow: bool,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """List the events of a journal: position, time (UTC), engine epoch, and what happened.

    With --json: the events as they are recorded, each with its position, its index within the record, and its time.
    """
    if follow and (reverse or until is not None or before is not None):
        raise click.UsageError(
            "--follow goes on for ever: leave out --reverse, --until and --before", click.get_current_context()
        )
    _refuse_backwards(since, until, after, before)
    wanted = Wanted(request_id, step, _kinds(kind))
    stop = None if until is None else until + 1
    names = Names()
    show = _json_line if as_json else _words_line(names)
    followed = Followed(journal)
    with reading(journal, stream, stop=stop) as reader:
        since, stop = _within(reader, stream, since, stop, after, before)
        walk = Walk(reader, names, wanted, stream)
        end = walk.end if stop is None else min(stop, walk.end)
        is_beyond = since >= walk.end
        try:
            if not (reverse or follow) and limit is None:
                found = _print(walk.lines(since, end), show)
            else:
                last, error = last_lines(walk, since, end, limit)
                found = _print(reversed(last) if reverse else iter(last), show)
                if error is not None:
                    raise error
            if follow:
                with followed.blamed():
                    _follow(walk, since, show, followed)
        except JournalCorrupt as error:
            raise damaged(error, journal, stream) from error
        if not found and request_id is not None and names.handle_of(request_id) is None:
            raise unknown_request(request_id, names.similar(request_id), journal, stream)
        if not found and is_beyond:
            _tell_end(walk.end)
        elif not found and step is not None:
            _tell_steps(step, walk.steps, is_all=since == 0 and end == walk.end)
        if end == walk.end:
            tell_if_cut(journal, end - 1, stream, is_open=walk.is_open)


def _tell_end(end: int) -> None:
    """Who asks for what lies beyond the end is told where that is, lest he believe that nothing has happened."""
    has = f"{count(end, 'record')}, at position{'s 0 to' if end > 1 else ''} {end - 1}" if end else "no record yet"
    note(f"refold: nothing is there: the journal has {has}")


def _tell_steps(step: int, steps: tuple[int, int] | None, *, is_all: bool) -> None:
    """Who asks for a step that there isn't is told which there are; `is_all`: the whole journal was asked for."""
    if steps is not None and steps[0] <= step <= steps[1]:  # it is there, and nothing else that was asked for is in it
        return
    where = "the journal has" if is_all else "the records asked for have"
    has = "no step" if steps is None else f"step{'s' * (steps[1] > steps[0])} {steps[0]}"
    has += f" to {steps[1]}" if steps is not None and steps[1] > steps[0] else ""
    note(f"refold: nothing is there: {where} {has}")


def _refuse_backwards(since: int, until: int | None, after: int | None, before: int | None) -> None:
    """A range that ends before it begins would look like a journal in which nothing happened."""
    if until is not None and until < since:
        raise click.UsageError(f"--since {since} is behind --until {until}: swap them", click.get_current_context())
    if after is not None and before is not None and before < after:
        raise click.UsageError(
            f"--after {clock(after)} is later than --before {clock(before)}: swap them", click.get_current_context()
        )


def _within(
    reader: JournalReader, stream: str, since: int, stop: int | None, after: int | None, before: int | None
) -> tuple[int, int | None]:
    """The range of positions, cut to the records between two times."""
    if after is not None:
        since = max(since, position_of_time(reader, after - 1, stream) + 1)
    if before is not None:
        end = position_of_time(reader, before, stream) + 1
        stop = end if stop is None else min(stop, end)
    return since, stop


def _kinds(given: tuple[str, ...]) -> frozenset[str] | None:
    known = {kind.__name__.lower(): kind.__name__ for kind in EVENT_TYPES}
    names = [part.strip() for text in given for part in text.split(",")]
    for name in names:
        if name.lower() not in known:
            raise Complaint(f"no kind of event is named {name!r}", f"the kinds are {', '.join(known.values())}")
    return frozenset(known[name.lower()] for name in names) or None


def _print(lines: Iterator[Line], show: Callable[[Line], str]) -> bool:
    found = False
    for line in lines:
        found = True
        write(show(line))
    return found


def _follow(walk: Walk, since: int, show: Callable[[Line], str], followed: Followed) -> None:
    """Print what is appended, until interrupted."""
    while True:
        sys.stdout.flush()
        time.sleep(_POLL_S)
        followed.check()
        if walk.look_again():
            _print(walk.lines(since, walk.end), show)


class _LogLine(msgspec.Struct):
    schema: str
    position: int
    index: int
    time_ns: int
    engine_epoch: int
    schema_version: int
    event: Event


_encode = msgspec.json.Encoder().encode


def _json_line(line: Line) -> str:
    record = line.record
    row = _LogLine(
        "refold.log/1",
        record.position,
        line.which,
        record.time_ns,
        record.engine_epoch,
        record.schema_version,
        line.event,
    )
    return _encode(row).decode()


def _words_line(names: Names) -> Callable[[Line], str]:
    paint = painter(sys.stdout)

    def show(line: Line) -> str:
        record, _, event = line
        words = sentence(event, names)
        colour = _COLOURS.get(type(event).__name__)
        where = f"{record.position:>7}  {clock(record.time_ns)}  e{record.engine_epoch}"
        dim = type(event) is StateDigest
        return f"{paint(where, dim=True)}  {paint(words, fg=colour, dim=dim) if colour or dim else words}"

    return show
