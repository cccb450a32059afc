"""`refold archive`: the oldest records into a compressed file."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import Complaint
from refold.engine.cli.output import write, write_json
from refold.engine.cli.progress import bar
from refold.engine.history.plain import count, safe
from refold.journal.errors import Rejected

if TYPE_CHECKING:
    from refold.journal.store import JournalReader

_UNITS = {"d": "days", "h": "hours", "m": "minutes"}

EXAMPLES = """Examples:
  refold archive --until 30d --to archive/ refold.db      what is older than 30 days
  refold archive --until 2026-10-01 --to archive/         what was written before October, UTC
  refold archive --until 120000 --to archive/             records 0 to 119999
  refold archive --until 30d --to lake/ --format parquet  the same as Parquet, for DuckDB and others (refold[analytics])
  refold archive --adopt archive/ refold.db               the journal has lost its list of archives: they are in archive/

Exit status: 0 archived, or nothing to archive; 2 it can't be; 3 the journal is damaged; 5 an engine writes it."""


@verb("archive", EXAMPLES)
@click.option("--until", metavar="POS|TIME|AGE", help="The first record that stays: a position, a date or an age.")
@click.option("--to", "folder", type=click.Path(file_okay=False, path_type=Path), help="The archive's folder.")
@click.option(
    "--adopt",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="FOLDER",
    help="Archive nothing: list the archives in this folder anew, in a journal that has lost its list.",
)
@click.option(
    "--format", "form", type=click.Choice(["zstd", "parquet"]), default="zstd", help="Of the file; zstd without."
)
@stream_option
@json_option
@journal_argument
def command(
    until: str | None, folder: Path | None, adopt: Path | None, form: str, stream: str, as_json: bool, journal: str
) -> None:
    """Move the oldest records of a journal to a compressed file, and keep the chain.

    The journal then begins at a border. All verbs read across it while the file is where it was put, or beside the journal. An
    engine opens without it, by a snapshot that is kept at the border. No engine may be live meanwhile. A kill at any moment
    loses nothing: the same command, or `refold compact`, goes on. The file's room in the journal is used again;
    `refold compact` gives it back.

    Where the archives are is listed in the journal. If that list is lost, --adopt makes it anew: it reads the archives, and takes
    those that lead to the journal's own first record.
    """
    if adopt is not None and until is None and folder is None:
        _adopt(journal, stream, adopt, as_json=as_json)
        return
    if adopt is not None or until is None or folder is None:
        raise click.UsageError("give --until and --to, or --adopt", click.get_current_context())
    from refold.engine.history.archiving import archive_until, delete_archived, open_for_keeping, position_at_time
    from refold.journal.archives import ArchivingStore, border_of
    from refold.journal.stores import open_store

    with reading(journal, stream, tells_doubt=False) as reader:  # refused, if there is any
        _check(reader, stream)
        stop = _position(reader, stream, until, position_at_time)
        todo = stop - border_of(reader, stream).position
    store = open_store(journal)
    try:
        if not isinstance(store, ArchivingStore):
            raise Rejected(f"{journal} is a store that can't let records go: copy it to another one first")
        open_for_keeping(store, stream)
        with bar("archiving", todo, "records") as progress:
            archive = archive_until(store, stream, stop, folder, form=form, on_records=progress.advance)
        with bar("deleting", todo, "records") as progress:
            deleted = delete_archived(store, stream, progress.advance)
    finally:
        store.close()
    _say(archive, deleted, as_json)


def _check(reader: "JournalReader", stream: str) -> None:
    """Of a damaged journal nothing is moved, and it isn't opened for writing, which would change it. Raises as `check_kept`."""
    from refold.engine.history.kept import check_kept

    with bar("checking", reader.head(stream).position, "records") as progress:
        check_kept(reader, stream, progress.advance)


def _adopt(journal: str, stream: str, folder: Path, *, as_json: bool) -> None:
    from refold.engine.history.archiving import adopt_archives, open_for_keeping
    from refold.journal.stores import open_store

    store = open_store(journal)
    try:
        open_for_keeping(store, stream)
        found = adopt_archives(store, stream, folder)
    finally:
        store.close()
    for archive in found:
        if as_json:
            row = {"start": archive.start, "stop": archive.stop, "path": archive.path}
            write_json({"schema": "refold.archive/1", "adopted": True, **row})
        else:
            write(f"adopted records {archive.start:,} to {archive.stop - 1:,} in {safe(archive.path)}")


def _position(reader: "JournalReader", stream: str, until: str, at_time: Any) -> int:
    """What `--until` means: a position, a date (UTC unless it says otherwise) or an age."""
    if until.isdecimal() and len(until) < 19:
        return int(until)
    if until[-1:] in _UNITS and until[:-1].isdecimal() and len(until) < 8:
        age = timedelta(**{_UNITS[until[-1]]: int(until[:-1])})
        moment = datetime.now(UTC) - age
    else:
        try:
            moment = datetime.fromisoformat(until)
        except ValueError as error:
            hint = "give a position, a date like 2026-10-01 or 2026-10-01T12:00, or an age like 30d, 12h or 90m"
            raise Complaint(f"--until {safe(until[:60])!r} is no position, date or age", hint) from error
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    stop: int = at_time(reader, stream, int(moment.timestamp() * 1e9))
    return min(stop, max(0, reader.head(stream).position - 1))


def _say(archive: Any, deleted: int, as_json: bool) -> None:
    if as_json:
        told = {} if archive is None else {"start": archive.start, "stop": archive.stop, "path": archive.path}
        told |= {} if archive is None else {"num_bytes": archive.num_bytes, "checksum": archive.checksum.hex()}
        write_json({"schema": "refold.archive/1", "archived": archive is not None, "num_deleted": deleted, **told})
    elif archive is None:
        rest = f"; deleted {count(deleted, 'record')} that were archived" if deleted else ""
        write(f"nothing to archive{rest}")
    else:
        write(f"archived records {archive.start:,} to {archive.stop - 1:,} in {safe(archive.path)}")
        write(f"  {archive.num_bytes:,} bytes, sha256 {archive.checksum.hex()}")
