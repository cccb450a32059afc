"""What the verbs share: options, colours, tables, times."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from refold.engine.cli.app import debug_option
from refold.engine.cli.output import in_code, named, note, note_once
from refold.engine.cli.typed import quoted, typed
from refold.journal.store import DEFAULT_STREAM

if TYPE_CHECKING:
    from pathlib import Path

    from refold.engine.cli.failures import Complaint
    from refold.journal.errors import JournalCorrupt
    from refold.journal.store import JournalReader

DEFAULT_JOURNAL = "refold.db"
_UNITS: dict[str | None, str] = {"MS": "milliseconds"}


def journal_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """`[JOURNAL]`, last."""
    return click.argument(
        "journal", envvar="REFOLD_JOURNAL", default=DEFAULT_JOURNAL, metavar="[JOURNAL]", callback=remembered
    )(function)


def remembered(ctx: click.Context, parameter: click.Parameter, journal: str) -> str:
    """The journal, once whoever reports an error knows which it is."""
    ctx.obj.journal = journal
    a_name(ctx, parameter, journal)
    return journal


def a_name(_ctx: click.Context, param: click.Parameter, journal: str | None) -> str | None:
    """A journal's name, if one was given: an empty one is a variable that wasn't set, say, and the caller's fault."""
    if journal is not None and not journal.strip():
        raise click.BadParameter("it is empty: name a file, a folder or a database", param=param)
    return journal


def stream_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--stream`."""
    words = "Which stream; `main` without."
    return click.option("--stream", default=DEFAULT_STREAM, metavar="NAME", callback=_remembered_stream, help=words)(
        function
    )


def _remembered_stream(ctx: click.Context, _parameter: click.Parameter, stream: str) -> str:
    """The stream, once whoever reports an error knows which it is."""
    ctx.obj.stream = stream
    return stream


def names_stream() -> bool:
    """Whether the command line names a stream, be it the usual one."""
    source = click.get_current_context().get_parameter_source("stream")
    return source is click.core.ParameterSource.COMMANDLINE


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object per line (NDJSON).")(function)


def verb(name: str, epilog: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A verb of the command line: `--help`, `--debug`, and its examples."""

    def wrap(function: Callable[..., Any]) -> click.Command:
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
        return click.command(name, epilog="\b\n" + epilog, context_settings=settings)(debug_option(function))

    return wrap


@contextmanager
def reading(
    journal: str, stream: str | None = None, *, tells_doubt: bool = True, stop: int | None = None
) -> "Iterator[JournalReader]":
    """Open a journal to read a stream of it, which must be there, or whatever there is; or of that what is before position `stop`.

    With `tells_doubt`, say so if nobody can tell whether its end is gone, and, when all was read, that behind its end is damage.

    Raises:
        Complaint: there is none, or it is only just being created, or it has no such stream. Or behind its end is damage.
        JournalError: it can't be read.
    """
    from refold.engine.cli.failures import damaged
    from refold.journal.errors import NotFound
    from refold.journal.stores import open_reader

    try:
        reader = open_reader(journal)
    except NotFound as error:
        raise absent(journal, error) from error
    try:
        _refuse_lost(journal, reader)
        if stream is not None:
            require_stream(reader, stream)
        behind = None
        if tells_doubt:
            tell_beside(reader)
            behind = _tell_doubts(reader, DEFAULT_STREAM if stream is None else stream)
        yield reader
        if behind is not None and (stop is None or behind.position < stop):
            raise damaged(behind, journal, DEFAULT_STREAM if stream is None else stream)
    finally:
        reader.close()


def _refuse_lost(journal: str, reader: "JournalReader") -> None:
    """A journal whose read model knows records of a stream that has none is not read as a new one."""
    from refold.journal.stores.location import locate

    if locate(journal).kind == "segments":
        from refold.engine.audit.witness import check_nothing_lost

        check_nothing_lost(journal, reader=reader)


def streams_of(reader: "JournalReader") -> list[str]:
    """The names of a journal's streams; the usual one, if it can't tell."""
    return list(reader.streams()) if hasattr(reader, "streams") else [DEFAULT_STREAM]


def require_stream(reader: "JournalReader", stream: str) -> None:
    """A stream that somebody named must be there. The usual one may be begun by the first engine, where no other has begun another.

    Raises:
        Complaint: it isn't.
    """
    from refold.engine.cli.failures import Complaint
    from refold.engine.history.plain import safe

    if stream.isprintable() and reader.head(stream).position:  # also where another one's row is gone
        return
    names = streams_of(reader)
    if stream not in names and (names or stream != DEFAULT_STREAM):
        raise Complaint(f"no stream {stream!r} in that journal", f"it has {', '.join(map(safe, names)) or 'none'}")


def tell_doubt(reader: "JournalReader") -> None:
    """Say so if a cut-off end could not be noticed, though all else can be."""
    from refold.journal.stores import doubt_of

    if doubt := doubt_of(reader):
        note_once(f"refold: {doubt}")


def tell_beside(reader: "JournalReader") -> None:
    """Say what is wrong with the journal where no record is: what is read is whole, and an engine would refuse to open it."""
    from refold.journal.beside import damage_beside
    from refold.journal.naming import name, place_of_reader

    for damage in damage_beside(reader):
        note_once(f"refold: {name(damage, place_of_reader(reader))}")


def _tell_doubts(reader: "JournalReader", read: str) -> "JournalCorrupt | None":
    """What is read may not be all there was: say of which streams nobody can tell, once. Returns what is wrong behind the end of the one that is read."""
    from refold.journal.ends import EndChecked, EndInDoubt, check_end
    from refold.journal.errors import JournalCorrupt

    behind = None
    for stream in streams_of(reader) if isinstance(reader, EndChecked) else []:
        try:
            check_end(reader, stream)
        except JournalCorrupt as error:
            if stream == read and not isinstance(error, EndInDoubt):
                behind = error
            else:
                note_once(f"refold: {error}")
    return behind


def require_journal(journal: str, stream: str | None = None, *, tells_doubt: bool = True) -> None:
    """A journal must be there; raises as `reading`. Whoever writes to it next is refused for its doubts: they needn't be told twice."""
    with reading(journal, stream, tells_doubt=tells_doubt, stop=0):  # whoever reads the records tells of damage
        pass


def check_output(output: "Path | None", journal: str) -> None:
    """A file to write must be none of the journal's own; whoever names one would lose it."""
    from refold.engine.cli.failures import USAGE, Complaint
    from refold.journal.stores.location import is_part_of

    if output is not None and is_part_of(journal, output):
        raise Complaint(f"{output} is a file of the journal {named(journal)} itself", "name another file", USAGE)


def finite(_ctx: click.Context, param: click.Parameter, value: float) -> float:
    """A number that can be compared with others: neither NaN nor infinite."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of {_UNITS.get(param.metavar, 'seconds')}", param=param)
    return value


def absent(journal: str, error: Exception) -> "Complaint":
    """Why there is nothing to read. An engine makes the file first and the tables then: for a moment it is empty."""
    from refold.engine.cli.failures import NO_JOURNAL, UNREADABLE, Complaint
    from refold.journal.stores.location import locate

    path = locate(journal).path
    if path is None or not path.exists():
        return Complaint(str(error), NO_JOURNAL, UNREADABLE)
    if path.is_dir():
        removing, making = in_code(f"rmdir {quoted(str(path))}"), in_code(typed("migrate", journal))
        ways = f"{removing}, if it's to be one file; {making} makes it a journal of segment files"
        return Complaint(f"{named(journal)} is an empty folder, and no journal yet", ways, UNREADABLE)
    line = f"{named(journal)} is empty: it has no tables yet; an engine that starts right now is about to make them"
    again = f"try again in a moment; if it stays empty, {in_code(typed('migrate', journal))} makes it a journal"
    return Complaint(line, again, UNREADABLE)


def tell_if_cut(journal: str, position: int, stream: str = DEFAULT_STREAM, *, is_open: bool) -> None:
    """Say so if the stream's last life was never closed, and no engine is at work on it. `position` is the last record's."""
    from refold.journal.errors import JournalError
    from refold.journal.stores import engine_owner

    if not is_open:
        return
    try:
        is_owned = engine_owner(journal, stream) is not None
    except JournalError:
        return
    if not is_owned:
        note(
            f"refold: the last engine ended without a word after record {position}: a crash, or a kill; "
            "what was unfinished goes on when an engine opens the journal"
        )
