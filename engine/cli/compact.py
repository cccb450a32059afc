"""`refold compact`: give room back."""

from refold.engine.cli.console import journal_argument, json_option, reading, verb
from refold.engine.cli.output import write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.stat import in_bytes
from refold.engine.history.plain import count
from refold.journal.store import DEFAULT_STREAM

EXAMPLES = """Examples:
  refold compact             after `refold archive`: the journal's file shrinks
  refold compact run.db      no engine may be live meanwhile

Exit status: 0 compacted, 3 the journal is damaged, 5 an engine writes it."""


@verb("compact", EXAMPLES)
@json_option
@journal_argument
def command(as_json: bool, journal: str) -> None:
    """Give back what a journal doesn't need: records that are archived, snapshots that are too many, free pages.

    Records that aren't archived are never touched: they are read first, and a journal that is damaged is left as it is. SQLite needs as much free disk as the journal is large; a folder of segments is
    sealed, and an index that was damaged is written anew. A kill at any moment leaves the journal as it was, or compacted.
    """
    from refold.engine.history.archiving import compact_stream, open_for_keeping
    from refold.engine.history.kept import check_kept
    from refold.journal.stores import open_store
    from refold.journal.stores.sizes import sizes_of

    with reading(journal, tells_doubt=False) as reader:  # refused, if there is any
        names = reader.streams() if hasattr(reader, "streams") else [DEFAULT_STREAM]
        num_records = sum(reader.head(name).position for name in names)
        with bar("checking", num_records, "records") as progress:
            for name in names:
                check_kept(reader, name, progress.advance)
    before = sizes_of(journal).all
    store, deleted = open_store(journal), 0
    try:
        with bar("compacting", num_records, "records") as progress:
            for name in names:
                open_for_keeping(store, name)
                deleted += compact_stream(store, name, progress.advance)
            for name in names[:1] if not _by_stream(store) else names:
                store.compact(name)  # type: ignore[attr-defined]
    finally:
        store.close()
    after = sizes_of(journal).all
    if as_json:
        write_json({"schema": "refold.compact/1", "num_deleted": deleted, "bytes_before": before, "bytes_after": after})
    else:
        gone = f"{count(deleted, 'record')} deleted that are archived; " if deleted else ""
        write(f"{gone}{in_bytes(before)} before, {in_bytes(after)} now")


def _by_stream(store: object) -> bool:
    """Whether each stream has files of its own."""
    from refold.journal.stores.sql import SqlStore

    return not isinstance(store, SqlStore)
