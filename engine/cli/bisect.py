"""`refold bisect`: the first position where something turns true."""

import sys

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import NOT_SO, USAGE, Complaint
from refold.engine.cli.output import clock, painter, write, write_json
from refold.engine.cli.places import PLACE, Place, position_of
from refold.engine.cli.predicates_in import predicate_options, predicates
from refold.engine.cli.progress import bar
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.plain import safe
from refold.engine.history.predicates import Named
from refold.engine.history.replay import Contradiction
from refold.engine.history.timeline import Timeline
from refold.engine.history.verify import verify_journal
from refold.engine.history.words import sentence
from refold.journal.errors import JournalCorrupt

EXAMPLES = """Examples:
  refold bisect --sql "select 1 from requests where num_stale_output_tokens > 3"
  refold bisect --python "len(waiting) > 100" --scan    asked at every record: for what comes and goes
  refold bisect --law L2 run.db                         the first state that breaks a law
  refold bisect --wrong run.db                          the first record that isn't as it must be, and its class

Exit status: 0 found, 1 it is never true."""


@verb("bisect", EXAMPLES)
@predicate_options
@click.option("--from", "low", type=PLACE, metavar="PLACE", help="Where it is known to be false.")
@click.option("--to", "high", type=PLACE, metavar="PLACE", help="Where it is known to be true; the end without.")
@click.option("--scan", is_flag=True, help="Ask at every record instead of halving.")
@click.option(
    "--wrong",
    is_flag=True,
    help="Ask whether the record is whole, lawful, and decided alike today: `verify --redecide`.",
)
@stream_option
@json_option
@journal_argument
def command(
    sql: tuple[str, ...],
    python: tuple[str, ...],
    law: tuple[str, ...],
    low: Place | None,
    high: Place | None,
    scan: bool,
    wrong: bool,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """Find the first position where a predicate of the state turns true.

    Halving asks about log2(n) states and is right for what stays true once it is. If it isn't true at the end, or with --scan,
    every record is asked.
    """
    if wrong:
        if sql or python or law or low or high or scan:
            raise Complaint("--wrong asks about the whole journal, and nothing else", "give it alone", USAGE)
        _tell_wrong(journal, stream, as_json=as_json)
        return
    asked = predicates(sql, python, law)
    if len(asked) > 1:
        raise Complaint("there is more than one predicate", "give one; `and` joins them, in SQL and in Python", USAGE)
    with reading(journal, stream) as reader:
        timeline = Timeline(reader, stream)
        start = 0 if low is None else position_of(timeline, low, journal) + 1
        end = position_of(timeline, high, journal)
        if low is not None and start > end:
            raise Complaint(
                f"--from is record {start - 1} and --to is record {end}: there is none between them",
                "give --from a place before --to",
                USAGE,
            )
        found, is_first = _search(timeline, asked[0], start, end, scan=scan)
        if found is None:
            end_state = typed("show", journal, options=of_stream(stream))
            raise Complaint(
                f"{asked[0].text[:80]!r} is never true", f"`{end_state}` shows the state at the end", NOT_SO
            )
        timeline.seek(found)
        _tell(timeline, found, is_first=is_first, as_json=as_json)


def _tell_wrong(journal: str, stream: str, *, as_json: bool) -> None:
    with reading(journal, stream) as reader, bar("asking", reader.head(stream).position, "records") as progress:
        try:
            verify_journal(reader, stream, redecide=True, on_record=progress.advance)
        except (JournalCorrupt, Contradiction) as error:
            position, text = error.position, str(error)
            kind = error.cause.kind if isinstance(error, Contradiction) else error.kind
        else:
            checked = typed("verify", journal, options=of_stream(stream))
            raise Complaint("no record is wrong", f"`{checked}` says what was checked", NOT_SO)
    if as_json:
        write_json(
            {"schema": "refold.bisect/1", "position": position, "is_first": True, "cause": kind, "words": safe(text)}
        )
        return
    paint = painter(sys.stdout)
    write(paint(f"turns wrong at record {position}", bold=True) + paint(f", class {kind}", dim=True))
    write(f"  {safe(text)}")


def _search(timeline: Timeline, asked: Named, start: int, stop: int, *, scan: bool) -> tuple[int | None, bool]:
    """The position, and whether it is known to be the first."""
    if stop < start:
        return None, True
    if not scan:
        with bar("folding once", len(timeline), "records") as progress:
            timeline.warm(progress.advance)
        found = timeline.first(asked.holds, start - 1, stop)
        if found is not None:
            return found, False
    with bar("asking", stop - start + 1, "records") as progress:
        found = timeline.scan(asked.holds, start, progress.advance)
    return (found if found is not None and found <= stop else None), True


def _tell(timeline: Timeline, position: int, *, is_first: bool, as_json: bool) -> None:
    record = timeline.record
    assert record is not None, position
    if as_json:
        write_json({"schema": "refold.bisect/1", "position": position, "time_ns": record.time_ns, "is_first": is_first})
        return
    timeline.learn_names()
    paint = painter(sys.stdout)
    sure = "" if is_first else "; if it came and went before, --scan finds the first"
    write(paint(f"turns true at record {position}", bold=True) + paint(f", {clock(record.time_ns)}{sure}", dim=True))
    for event in timeline.events:
        write(f"  {sentence(event, timeline.names)}")
