"""`refold copy`: a journal from one store to another."""

import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from refold.engine.cli.console import (
    a_name,
    json_option,
    reading,
    remembered,
    require_stream,
    streams_of,
    tell_beside,
    tell_doubt,
    verb,
)
from refold.engine.cli.failures import Complaint
from refold.engine.cli.followed import Followed
from refold.engine.cli.output import note, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.unfinished import UnderWay, telling_what_is_there
from refold.engine.history.plain import count, safe
from refold.journal.beside import check_streams_there
from refold.journal.copying import check_source
from refold.journal.errors import JournalCorrupt, JournalError, Rejected
from refold.journal.naming import name
from refold.journal.record import Head
from refold.journal.replicas import ReplicaStore
from refold.journal.store import DEFAULT_STREAM, Erased

if TYPE_CHECKING:
    from refold.journal.copying import Copied
    from refold.journal.store import JournalReader

POLL_S = 0.2
_WITNESSES = {
    "mark": "the mark beside the records of {}",
    "snapshot": "a snapshot beside the records of {}",
    "head": "the head that {} stores",
}

EXAMPLES = """Examples:
  refold copy refold.db backup.db                        what is there now; the engine may go on writing refold.db
  refold copy refold.db postgresql://user@host/journals  the same command again goes on where it was, or catches up
  refold copy --follow refold.db segments:///replica     and whatever comes, until Ctrl-C
  refold copy --accept-end damaged/ mended/              what is whole of a journal that has lost its end, or its mark

Exit status: 0 copied and verified, 2 the target holds something else, 3 a journal is damaged, 5 an engine writes the target."""


@verb("copy", EXAMPLES)
@click.option("--stream", default=None, metavar="NAME", help="Only this stream; all of them without.")
@click.option("--follow", is_flag=True, help="Go on copying what is appended, until interrupted.")
@click.option(
    "--accept-end",
    is_flag=True,
    help="Copy what is whole, though later records are gone, or nobody can tell whether they are.",
)
@json_option
@click.argument("source", metavar="FROM", callback=remembered)
@click.argument("target", metavar="TO", callback=a_name)
def command(stream: str | None, follow: bool, accept_end: bool, as_json: bool, source: str, target: str) -> None:
    """Copy a journal between any two stores, record for record, and verify the copy.

    Positions, engine epochs, times and hashes stay what they are, so the copy's head is the original's, and an engine can
    open it. What is in the target already is not copied again: after a kill at any moment, the same command goes on. The
    original may be live; what was there when the copying began is copied. The target must be new, or a copy of the same.

    What the original has redacted since it was copied is erased from the copy too, with the record that says so.

    A journal that ends before what was acknowledged, or a folder of segments that has lost the mark of it, is copied with
    --accept-end only: the copy is a journal like any other, and doesn't show that its end was gone or in doubt.
    """
    under_way = UnderWay(source, target)
    with ExitStack() as opened, telling_what_is_there(under_way, as_json=as_json):
        _refuse_itself(source, target)
        followed = Followed(source)
        reader = opened.enter_context(reading(source, tells_doubt=accept_end))
        tell_doubt(reader)
        tell_beside(reader)
        names = _streams(reader, stream)
        if follow and len(names) != 1:
            raise Complaint(f"{count(len(names), 'stream')} can't be followed at once", "name one with --stream")
        check_source(reader, names[0], accepts_end=accept_end)  # before there's a target, which would be empty
        under_way.store = store = opened.enter_context(closing(_open_target(target)))
        for under_way.stream in names:
            done = _copy(reader, store, under_way.stream, accept_end, target)
            places = {"schema": "refold.copy/1", "from": source, "to": target}
            _say(places | _verified(reader, store, under_way.stream, done), as_json)
        if follow:
            _follow(reader, store, names[0], followed, under_way)


class _Done(NamedTuple):
    copied: "Copied"
    started_s: float
    erasures: list[Erased]
    left: str


def _copy(reader: "JournalReader", store: ReplicaStore, stream: str, accept_end: bool, target: str) -> _Done:
    from refold.journal.copying import copy_stream

    started_s, erasures = time.perf_counter(), list[Erased]()
    with bar(f"copying {stream}", reader.head(stream).position, "records") as progress:
        copied = copy_stream(
            reader, store, stream, on_records=progress.advance, on_erased=erasures.append, accepts_end=accept_end
        )
    return _Done(copied, started_s, erasures, _left(erasures, target))


def _left(erasures: list[Erased], target: str) -> str:
    """Where what was erased from the target may still be; empty if it's gone, from a read model beside it too."""
    from refold.engine.audit.place import forget_beside

    beside = forget_beside(target) if erasures else ""
    return "; ".join(dict.fromkeys(filter(None, (*(erased.left for erased in erasures), beside))))


def _verified(reader: "JournalReader", store: ReplicaStore, stream: str, done: _Done) -> dict[str, Any]:
    """Verify a copy that is finished, and tell of it."""
    from refold.engine.history.verify import format_head
    from refold.journal.copying import copy_newest_snapshot, verify_copy

    head, num_found, doubt = done.copied
    with bar(f"verifying {stream}", head.position, "records") as progress:
        if head.position:
            verify_copy(store, stream, head, progress.advance)
    num_lost = max(0, doubt.num_known - head.position) if doubt is not None else 0
    return {
        "stream": stream,
        "ok": True,
        "num_records": head.position,
        "num_copied": head.position - num_found,
        "head": format_head(head),
        "end_is_vouched": doubt is None,
        "num_lost": num_lost,
        "lost_told_by": doubt.told_by if doubt is not None and num_lost else None,
        "num_redactions": len(done.erasures),
        "erased_left": done.left,
        "snapshot": copy_newest_snapshot(reader, store, stream, head.position),
        "seconds": round(time.perf_counter() - done.started_s, 3),
    }


def _say(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(report)
        return
    found = report["num_records"] - report["num_copied"]
    there = f", {found:,} were there" if found else ""
    write(f"copied {count(report['num_copied'], 'record')} of stream {safe(report['stream'])}{there}; verified")
    write(f"  head {report['head']}")
    if report["num_redactions"]:
        write(f"  {_what_is_erased(report['num_redactions'], report['erased_left'])}")
    if not report["end_is_vouched"]:
        write(f"  {_what_is_lost(report)}")


def _what_is_erased(num_redactions: int, left: str) -> str:
    words = f"erased here too: what {count(num_redactions, 'redaction')} erased there since it was copied"
    return f"{words}; it may still be in {left}" if left else words


def _what_is_lost(report: dict[str, Any]) -> str:
    """What is known of a stream behind its end."""
    source, end, num_lost = safe(report["from"]), report["num_records"], report["num_lost"]
    if not num_lost:
        return f"whether {source} had acknowledged records from {end} on can't be known"
    lost = f"records {end} to {end + num_lost - 1} are" if num_lost > 1 else f"record {end} is"
    told_by = _WITNESSES[report["lost_told_by"]].format(source)
    had = f"it had {count(end + num_lost, 'record')}"
    return f"{lost} lost: {told_by} says that {had}; whether it had acknowledged more can't be known"


def _follow(reader: "JournalReader", store: ReplicaStore, stream: str, followed: Followed, under_way: UnderWay) -> None:
    """Copy what comes. Ctrl-C ends it between two batches."""
    from refold.journal.copying import copy_on

    head: Head = store.head(stream)
    note("following; Ctrl-C ends")
    try:
        while True:
            followed.check()
            with followed.blamed():
                goal = reader.head(stream)
                if goal.position > head.position:
                    erasures: list[Erased] = []
                    head = copy_on(reader, store, stream, head, goal, on_erased=erasures.append)
                    if erasures:
                        note(_what_is_erased(len(erasures), _left(erasures, under_way.target)))
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        there = under_way.num_there()  # it may have come further than what returned
        note(f"copied up to {head.position if there is None else there}")


def _streams(reader: "JournalReader", stream: str | None) -> list[str]:
    if stream is None:
        check_streams_there(reader)
        return streams_of(reader) or [DEFAULT_STREAM]
    require_stream(reader, stream)
    return [stream]


def _open_target(target: str) -> ReplicaStore:
    from refold.engine.folding import warn_of_doubt
    from refold.journal.stores import open_store
    from refold.journal.stores.location import locate, place_of
    from refold.migrations import ensure

    if locate(target).kind == "memory":
        raise Rejected("a copy in memory: would be gone at once: name a file, a folder or a database")
    try:
        ensure(target)
        store = open_store(target)
    except JournalCorrupt as error:
        name(error, place_of(target))
        raise
    warn_of_doubt(store)
    if not isinstance(store, ReplicaStore):
        raise JournalError(f"{target!r} is a store that takes no copies: it has no open_replica")
    return store


def _refuse_itself(source: str, target: str) -> None:
    from refold.journal.stores.location import locate

    ours, theirs = locate(source), locate(target)
    same_file = ours.path is not None and theirs.path is not None and ours.path.resolve() == theirs.path.resolve()
    if same_file or (ours.path is None and ours.url == theirs.url):
        raise Rejected("a journal can't be copied to itself: name another target")
