"""`refold capsule`: a journal in one small file for a bug report, and back."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import click

from refold.engine.cli.console import reading, stream_option, verb
from refold.engine.cli.failures import UNREADABLE, USAGE, Complaint, unwritable
from refold.engine.cli.output import named, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.history.capsule import CapsuleRecord, new_note, read_capsule, write_capsule
from refold.engine.history.plain import count, is_unicode, safe
from refold.engine.history.sealing import sealed_records
from refold.engine.history.whole_file import whole_file
from refold.journal.errors import JournalError, RefoldError, SchemaTooNew
from refold.journal.store import DEFAULT_STREAM

EXAMPLES = """Examples:
  refold capsule run.db bug.capsule         pack: tokens permuted, names and texts replaced, the schedule intact
  refold capsule --open bug.capsule bug.db  unpack into a journal, which every verb reads
  refold capsule --open bug.capsule         only look whether it is one"""

RECORDS_PER_APPEND = 512


@verb("capsule", EXAMPLES)
@click.option("--open", "unpack", is_flag=True, help="Read a capsule, and write it as a journal.")
@click.option("--note", default="", metavar="TEXT", help="A line for whoever opens it.")
@stream_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("source", metavar="JOURNAL|CAPSULE")
@click.argument("target", metavar="[FILE]", required=False)
def command(unpack: bool, note: str, stream: str, as_json: bool, source: str, target: str | None) -> None:
    """Write a journal as a capsule: one file that may be attached to a bug report, and opened from a stranger.

    Every token goes through one secret permutation that is thrown away; ids, names and texts are replaced; times keep their
    distances only. What was decided stays as it is. It is pseudonymous, not secret: with much text, frequencies tell.
    """
    if not unpack and target is None:
        raise Complaint("no file to write", "`refold capsule JOURNAL FILE`", USAGE)
    if not is_unicode(note):
        raise Complaint("the note has bytes in it that are no UTF-8", "leave them out", USAGE)
    if unpack and stream != DEFAULT_STREAM:
        raise Complaint("a capsule has no streams", "leave out --stream; it is unpacked into `main`", USAGE)
    if target is not None and Path(target).exists():
        raise Complaint(f"{target} exists", "name another file", USAGE)
    records = _unpack(source, target) if unpack else _pack(source, stream, str(target), note)
    if as_json:
        write_json({"schema": "refold.capsule/1", "num_records": records, "source": source, "target": target})
    elif not unpack and target is not None:
        size = Path(target).stat().st_size
        write(f"{named(source)}: {count(records, 'record')} in {safe(target)}, {size:,} bytes")
    else:
        write(
            f"{safe(source)}: a capsule of {count(records, 'record')}" + (f", now in {safe(target)}" if target else "")
        )


def _pack(journal: str, stream: str, target: str, note: str) -> int:
    with reading(journal, stream) as reader, bar("packing", reader.head(stream).position, "records") as progress:
        try:
            with whole_file(Path(target)) as file:
                header = write_capsule(reader, file, stream, note=note or new_note(), on_record=progress.advance)
        except OSError as error:
            raise unwritable(target, error) from error
    return header.num_records


def _unpack(capsule: str, target: str | None) -> int:
    try:
        header, records = read_capsule(Path(capsule))
    except SchemaTooNew:
        raise
    except JournalError as error:
        raise Complaint(str(error), "`refold capsule JOURNAL FILE` makes one", UNREADABLE) from error
    with bar("unpacking", header.num_records, "records") as progress:
        if target is None:
            for _ in records:
                progress.advance()
        else:
            _write(_counted(records, progress.advance), target)
    return header.num_records


def _counted(records: Iterator[CapsuleRecord], advance: object) -> Iterator[CapsuleRecord]:
    assert callable(advance), advance
    for record in records:
        advance()
        yield record


def _write(records: Iterator[CapsuleRecord], target: str) -> None:
    """Write a journal with a chain of its own. If the capsule is bad, what was written of it goes."""
    from refold import migrations
    from refold.journal.replicas import ReplicaStore
    from refold.journal.stores import open_store

    migrations.ensure(target)
    store = open_store(target)
    assert isinstance(store, ReplicaStore), store
    try:
        store.open_replica()
        made = sealed_records(records)
        while batch := list(islice(made, RECORDS_PER_APPEND)):
            store.append(DEFAULT_STREAM, batch)
    except RefoldError:
        store.close()
        for suffix in ("", "-wal", "-shm", ".lock", ".mark"):
            Path(f"{target}{suffix}").unlink(missing_ok=True)
        raise
    store.close()
