"""`refold verify`: is the journal whole, were the laws kept?"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from refold.engine.cli.console import (
    journal_argument,
    json_option,
    names_stream,
    reading,
    stream_option,
    streams_of,
    tell_doubt,
    verb,
)
from refold.engine.cli.failures import NOT_SO, UNREADABLE, USAGE, Complaint, damage_hint
from refold.engine.cli.output import named, painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.quarantine import quarantine_line
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.heads import ExportedHead, check_root, export, read_head
from refold.engine.history.plain import count, safe
from refold.engine.history.replay import Contradiction
from refold.engine.history.verify import Verdict, format_head, parse_head, verify_journal
from refold.journal.errors import JournalCorrupt, Rejected
from refold.journal.record import Head
from refold.journal.store import DEFAULT_STREAM
from refold.scheduler.laws import LAWS

if TYPE_CHECKING:
    from refold.journal.store import JournalReader

EXAMPLES = """Examples:
  refold verify                        ./refold.db
  refold verify run.db --head run.head also: does it still reach the head that I kept? (812:9f… will do, too)
  refold verify --redecide run.db      also: would today's code have decided all of it?
  refold verify --stream engine-7      the laws of another stream
  refold verify --json run.db || echo "not what it was"

Exit status: 0 clean, or empty, 1 a law or a digest is violated, 3 damaged."""


@verb("verify", EXAMPLES)
@click.option(
    "--head", metavar="FILE|POS:HASH", help="A head that was kept: detects a cut-off tail and a journal written anew."
)
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Who must have signed it: the public key.")
@click.option("--redecide", is_flag=True, help="Take every decision again with today's code (law L12).")
@click.option("--every-event", is_flag=True, help="Check all laws after every event of a long journal, too.")
@stream_option
@json_option
@journal_argument
def command(
    head: str | None,
    key: Path | None,
    redecide: bool,
    every_event: bool,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """Check that a journal is whole and that its engine kept the laws.

    Three checks in one pass: the hash chain (edited, deleted, inserted, moved, torn or cut-off records, and content
    that was erased without a record that says so), the scheduler's laws after every
    event, and the digests that the engine recorded of its own state. What is wrong is named with its class: whose fault it is.

    In a journal of more than 2,000 records the laws of the state are checked at intervals, and a violation is then traced to
    its first event; --every-event checks after each.

    All this is of one stream. Of the others the chain is checked, and no laws.
    """
    kept = _kept_head(head, key, stream, journal)
    expect = None if kept is None else kept.head
    required = (
        stream if stream != DEFAULT_STREAM or names_stream() else None
    )  # the chains of others are checked all the same
    with reading(journal, required, tells_doubt=False) as reader:  # it's what this is about to complain of
        tell_doubt(reader)
        try:
            with bar("verifying", reader.head(stream).position, "records") as progress:
                verdict = verify_journal(
                    reader, stream, expect, progress.advance, redecide=redecide, every_event=every_event
                )
                if kept is not None and kept.root:
                    check_root(reader, kept)
        except (JournalCorrupt, Contradiction) as error:
            if as_json:
                write_json(_failure(error, stream))
            raise _complaint(error, journal, stream) from error
        others = _others(reader, stream, as_json=as_json)
    if as_json:
        write_json(_success(verdict, stream) | {"other_streams": others})
    elif not verdict.num_records and not others:
        write(
            f"empty: no record is in {named(journal)}, so nothing was verified; one that was emptied looks like a new one"
        )
    else:
        _print(verdict, journal, stream, others)


def _others(reader: "JournalReader", verified: str, *, as_json: bool) -> dict[str, int]:
    """The records of the streams that aren't the one that was verified, each checked against the one before: how many there are, by name.

    Raises:
        Complaint: one is damaged.
    """
    from refold.engine.history.kept import check_kept

    found = dict[str, int]()
    for stream in sorted(streams_of(reader)):
        if stream == verified:
            continue
        try:
            with bar(f"verifying {safe(stream)}", reader.head(stream).position, "records") as progress:
                found[stream] = check_kept(reader, stream, progress.advance)[1].position
        except JournalCorrupt as error:
            if as_json:
                write_json(_failure(error, stream))
            line = f"{error.kind} at record {error.position} of stream {safe(stream)!r}: {error}"
            raise Complaint(
                line, f"stream {safe(verified)!r} is whole; restore this one from a backup", UNREADABLE
            ) from error
    return found


def _kept_head(text: str | None, key: Path | None, stream: str, journal: str) -> ExportedHead | None:
    """The head in a file, which says of which stream it is, or in words, which are taken to be of this one."""
    if text is not None and Path(text).is_dir():
        raise Complaint(f"--head {text[:80]!r} is a folder", "name the file in it that `refold head` wrote", USAGE)
    if text is None or not Path(text).is_file():
        if key is not None:
            raise Complaint("--key needs a --head in a file, which it signed", "`refold head --key` writes one")
        return None if text is None else export(stream, _head_in_words(text), 0)
    kept = read_head(Path(text), key)
    if kept.stream != stream:
        line = f"{text} is the head of stream {kept.stream!a}, and verify reads {stream!a}"
        its_own = typed("verify", journal, options=(*of_stream(kept.stream), "--head", text))
        raise Complaint(line, f"`{its_own}` verifies that one", USAGE)
    return kept


def _head_in_words(text: str) -> Head:
    try:
        return parse_head(text)
    except Rejected as error:
        what = f"--head {text[:80]!r} is no file, and no POSITION:HASH with 64 hexadecimal digits"
        raise Complaint(what, "`refold head` writes such a file, and `refold verify` prints a POSITION:HASH") from error


def _success(verdict: Verdict, stream: str) -> dict[str, Any]:
    totals = verdict.totals
    return {
        "schema": "refold.verify/1",
        "ok": True,
        "stream": stream,
        "is_empty": not verdict.num_records,
        "num_records": verdict.num_records,
        "num_events": verdict.num_events,
        "num_engines": verdict.num_engines,
        "num_digests": verdict.num_digests,
        "num_erased_digests": verdict.num_erased_digests,
        "num_redacted_records": verdict.num_redacted_records,
        "num_redacted_requests": verdict.num_redacted_requests,
        "num_checks": verdict.num_checks,
        "num_redecided": verdict.num_decided,
        "num_not_redecidable": verdict.num_forgotten,
        "totals": totals.counts(),
        "num_quarantined": len(verdict.state.suspicion.quarantined),
        "laws": list(verdict.laws),
        "head": format_head(verdict.head),
    }


def _failure(error: JournalCorrupt | Contradiction, stream: str) -> dict[str, Any]:
    kind = error.kind if isinstance(error, JournalCorrupt) else "violated"
    law = error.law if isinstance(error, Contradiction) else None
    return {
        "schema": "refold.verify/1",
        "ok": False,
        "stream": stream,
        "position": error.position,
        "kind": kind,
        "law": law,
        "cause": error.cause.kind if isinstance(error, Contradiction) else error.kind,
        "message": str(error),
    }


def _complaint(error: JournalCorrupt | Contradiction, journal: str, stream: str) -> Complaint:
    if isinstance(error, Contradiction):
        says = LAWS.get(error.law, "an event fits the state before it")
        of = of_stream(stream)
        hint = f"`{typed('log', journal, options=(*of, '--until', error.position))}` lists what leads there"
        if error.position:
            hint += f", `{typed('show', journal, options=(*of, '--at', error.position - 1))}` shows the state before it"
        return Complaint(
            f"violated at record {error.position}: {error}",
            f"class {error.cause.kind}; {hint}; the law: {says}",
            NOT_SO,
        )
    return Complaint(
        f"{error.kind} at record {error.position}: {error}", damage_hint(error, journal, stream), UNREADABLE
    )


def _print(verdict: Verdict, journal: str, stream: str, others: dict[str, int]) -> None:
    paint = painter(sys.stdout)
    more = [("stream", f"{safe(other)}: {count(size, 'record')}, chain whole") for other, size in others.items()]
    verified = paint("verified", fg="green", bold=True)
    if not verdict.num_records:
        its_laws = typed("verify", journal, options=of_stream(next(iter(others))))
        write(f"{verified}: the chain of {count(len(others), 'stream')} of {named(journal)}; {safe(stream)} is empty")
        for name, words in [*more, ("laws", f"of no stream: `{its_laws}` checks those of one")]:
            write(f"  {name:<10}{words}")
        return
    is_all = stream == DEFAULT_STREAM and not others
    which = named(journal) if is_all else f"stream {safe(stream)} of {named(journal)}"
    write(f"{verified}: {which} is whole, and every law was kept")
    kept_out = quarantine_line(len(verdict.state.suspicion.quarantined), journal, stream)
    for name, words in [*_lines(verdict), *kept_out, *more]:
        write(f"  {name:<10}{words}")
    again = typed("verify", journal, options=(*of_stream(stream), "--head", format_head(verdict.head)))
    write(paint(f"  keep the head: `{again}` finds a tail that was cut off", dim=True))


def _lines(verdict: Verdict) -> list[tuple[str, str]]:
    totals = verdict.totals
    return [
        (
            "chain",
            (
                f"{count(verdict.num_records, 'record')} with {count(verdict.num_events, 'event')}, "
                f"written by {count(verdict.num_engines, 'engine')} in turn"
            ),
        ),
        (
            "requests",
            (
                f"{totals.requests:,} submitted, {sum(totals.finished.values()):,} finished; "
                f"{count(totals.tokens, 'token')} in {count(totals.steps, 'step')}"
            ),
        ),
        (
            "trouble",
            (
                f"{count(totals.preemptions, 'preemption')}, "
                f"{count(totals.lost_workers, 'worker')} lost "
                f"with {count(totals.lost_steps, 'step')} in flight; "
                f"stale tokens: {totals.stale_tokens_delivered:,} delivered, {totals.stale_tokens_dropped:,} dropped"
            ),
        ),
        ("laws", _laws(verdict)),
        ("digests", _digests(verdict)),
        *_redactions(verdict),
        ("head", format_head(verdict.head)),
    ]


def _laws(verdict: Verdict) -> str:
    words = f"{count(len(verdict.laws), 'law')} along {count(verdict.num_events, 'event')}, "
    words += f"those of the state at {count(verdict.num_checks, 'place')}"
    if verdict.num_decided:
        words += f"; {count(verdict.num_decided, 'decision')} taken again, all alike"
        words += f" ({verdict.num_forgotten:,} can't be)" if verdict.num_forgotten else ""
    return words


def _digests(verdict: Verdict) -> str:
    erased = f"; {verdict.num_erased_digests:,} not checkable" if verdict.num_erased_digests else ""
    return f"{verdict.num_digests - verdict.num_erased_digests:,} recorded, all equal to the replay's{erased}"


def _redactions(verdict: Verdict) -> list[tuple[str, str]]:
    if not verdict.num_redacted_records:
        return []
    requests, records = verdict.num_redacted_requests, verdict.num_redacted_records
    return [("redacted", f"{count(requests, 'request')}, from {count(records, 'record')}; all of it attested")]
