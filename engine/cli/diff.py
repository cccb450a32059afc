"""`refold diff`: where two journals part, or a journal and what today's code would have decided."""

import sys
from typing import Any

import click

from refold.engine.cli.console import a_name, reading, stream_option, verb
from refold.engine.cli.failures import NOT_SO, USAGE, Complaint
from refold.engine.cli.output import named, note, painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.compare import Compared, Parting, compare
from refold.engine.history.differences import Difference
from refold.engine.history.plain import count
from refold.engine.history.redecide import Divergence, first_divergence
from refold.engine.history.relations import Names
from refold.engine.history.words import sentence
from refold.journal.codec import decode
from refold.journal.errors import JournalError
from refold.journal.events import Event
from refold.journal.record import Record

EXAMPLES = """Examples:
  refold diff a.db b.db                the first record that isn't the same in both, and what differs
  refold diff run.db --redecide        the first decision that today's code would take otherwise
  refold diff a.db a.db --with-stream b two streams of one journal, `main` and b
  refold diff a.db b.db --times        record times count too
  refold diff a.db b.db --exact        so do seeds and ids that were drawn, and digests that cover them

Exit status: 0 alike, 1 they differ."""

MAX_SHOWN = 20


@verb("diff", EXAMPLES)
@click.option("--redecide", is_flag=True, help="Compare with what today's code decides, instead of another journal.")
@click.option("--times", is_flag=True, help="Compare record times and engine epochs as well.")
@click.option("--exact", is_flag=True, help="Compare seeds and ids that nobody gave, and digests, as well.")
@stream_option
@click.option("--with-stream", metavar="NAME", help="Which stream of the other journal; one of the same name without.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("left", metavar="JOURNAL", callback=a_name)
@click.argument("right", metavar="[OTHER]", required=False, callback=a_name)
def command(
    redecide: bool,
    times: bool,
    exact: bool,
    stream: str,
    with_stream: str | None,
    as_json: bool,
    left: str,
    right: str | None,
) -> None:
    """Compare two journals, decision by decision; or a journal with its re-decision.

    What was decided is compared, not when. What two runs never have in common (seeds and ids that were drawn because nobody gave
    any) is a note on stderr; --exact makes it count. Every record is checked against its hash, on both sides. The first journal is taken for
    the right one: the class says what is wrong with the other. Of both the same stream is compared; with --with-stream another of the other journal, which may be
    the same one.
    """
    if redecide == (right is not None):
        raise Complaint("give two journals, or one and --redecide", "`refold diff --help` shows examples", USAGE)
    if redecide and with_stream is not None:
        raise Complaint("--with-stream is of another journal, and there is none", "leave it out, or --redecide", USAGE)
    if right is None:
        _redecided(left, stream, as_json=as_json)
        return
    streams = (stream, stream if with_stream is None else with_stream)
    with reading(left, streams[0]) as one, reading(right, streams[1]) as other:
        shortest = min(one.head(streams[0]).position, other.head(streams[1]).position)
        with bar("comparing", shortest, "records") as progress:
            found = compare(one, other, streams, with_times=times, exact=exact, on_record=progress.advance)
    if as_json:
        write_json(_as_json(found))
    for each in found.notes:
        note(f"note: {each}")
    if found.parting is None:
        if not as_json:
            write(f"alike: {count(found.num_alike, 'record')}, {found.num_copied:,} of them known by their hash")
        return
    if not as_json:
        write(f"{count(found.num_alike, 'record')} alike, then they part")
        _parted(found.parting, left, right)
    place = typed("log", left, options=(*of_stream(stream), "--since", max(found.parting.position - 5, 0)))
    kind = f"class {found.parting.cause}; " if found.parting.cause else ""
    raise Complaint(found.parting.words, f"{kind}`{place}` shows the place", NOT_SO)


def _redecided(journal: str, stream: str, *, as_json: bool) -> None:
    with reading(journal, stream) as reader, bar("deciding again", reader.head(stream).position, "records") as progress:
        found = first_divergence(reader, stream, on_record=progress.advance)
    if as_json:
        write_json({"schema": "refold.diff/1", "ok": found is None} | ({} if found is None else _divergence(found)))
    if found is None:
        if not as_json:
            write("alike: today's code decides every record as it is recorded")
        return
    if not as_json:
        _sides("recorded", found.recorded, "decided today", found.decided)
        _list(found.differences)
    before = typed("show", journal, options=(*of_stream(stream), "--at", max(found.position - 1, 0)))
    hint = f"class {found.cause.kind}; `{before}` shows the state before"
    raise Complaint(f"record {found.position}: {found.words}", hint, NOT_SO)


def _divergence(found: Divergence) -> dict[str, Any]:
    return {
        "position": found.position,
        "kind": "decision",
        "cause": found.cause.kind,
        "words": found.words,
        "differences": [difference.plain() for difference in found.differences],
    }


def _as_json(found: Compared) -> dict[str, Any]:
    row: dict[str, Any] = {"schema": "refold.diff/1", "ok": found.parting is None, "num_alike": found.num_alike}
    row["notes"] = found.notes
    if found.parting is not None:
        p = found.parting
        row |= {"position": p.position, "kind": p.kind, "cause": p.cause, "words": p.words}
        row["differences"] = [difference.plain() for difference in p.differences]
    return row


def _parted(parting: Parting, left: str, right: str) -> None:
    sides = [_events(record) for record in (parting.left, parting.right)]
    _sides(named(left), sides[0], named(right), sides[1])
    _list(parting.differences)


def _events(record: Record | None) -> list[Event]:
    """What a side says there; nothing, if it can't be read."""
    try:
        return [] if record is None else decode(record)
    except JournalError:
        return []


def _sides(left: str, one: Any, right: str, other: Any) -> None:
    paint, names = painter(sys.stdout), Names()
    for sign, title, events, colour in (("-", left, one, "red"), ("+", right, other, "green")):
        write(paint(f"{sign}{sign}{sign} {title}", fg=colour))
        for event in events:
            assert isinstance(event, Event), event
            write(paint(f"{sign} {sentence(event, names)}", fg=colour))


def _list(found: list[Difference]) -> None:
    for difference in found[:MAX_SHOWN]:
        write(f"  {difference.words('-', '+')}")
    if len(found) > MAX_SHOWN:
        write(f"  and {len(found) - MAX_SHOWN} more")
