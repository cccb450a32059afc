"""`refold audit`: the named queries, and the read model that answers them."""

import sys
import time
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from refold.engine.audit.ask import Answer, Questions
from refold.engine.cli.answers import answer_options, asking, caught_up, show, there_is_one
from refold.engine.cli.app import debug_option
from refold.engine.cli.console import journal_argument, json_option, reading, require_journal, verb
from refold.engine.cli.failures import NOT_SO, UNREADABLE, Complaint, damaged, unwritable
from refold.engine.cli.followed import Followed
from refold.engine.cli.output import named, note, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.typed import of_stream, typed
from refold.engine.cli.unknown import unknown_request
from refold.engine.history.plain import count, safe
from refold.engine.history.relations import similar
from refold.journal.errors import JournalCorrupt
from refold.journal.store import DEFAULT_STREAM
from refold.projections.audit.catalogue import BY_NAME, VIEWS, View

if TYPE_CHECKING:
    from collections.abc import Iterator

EPILOG = """\b
Examples:
  refold audit list                            what can be asked
  refold audit requests run.db                 every request: how long it waited, and how it ended
  refold audit tokens run.db --request req-1   where each token of an output came from
  refold audit violations run.db               must be empty; exit status 1 if it isn't
  refold audit follow run.db                   project what a running engine writes, as it writes it

Each named query is a view with the same name: `refold sql run.db "SELECT * FROM requests"`."""

_POLL_S = 0.2
_READS_AGAIN = (
    "Every record that isn't archived is read again and checked against the one before; with --as-is none is."
)
_COUNT = click.IntRange(0, 2**62)
_OWN = ("list", "follow", "rebuild", "export")


class Queries(click.Group):
    """A group that has a command for each named query, beside those that it is given."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Those about the read model itself, then the named queries."""
        return [*_OWN, *BY_NAME]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Make a named query's command."""
        return _query(BY_NAME[cmd_name]) if cmd_name in BY_NAME else super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find it, or say which one is close."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(name, self.list_commands(ctx), n=1)
            guess = f"; did you mean `refold audit {close[0]}`?" if close else "; `refold audit list` shows them"
            raise click.UsageError(f"no audit query {name!r}{guess}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The named queries by name alone: `list` says what each answers."""
        own = [(name, found.get_short_help_str(90)) for name in _OWN if (found := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl(own)
        with formatter.section("Named queries"):
            formatter.write_text(", ".join(BY_NAME))


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group("audit", cls=Queries, epilog=EPILOG, context_settings=_SETTINGS)
@debug_option
def command() -> None:
    """Answer an auditor's questions: requests, steps, preemptions, tokens, counters, and whatever must not be."""


@command.add_command
@verb("list", "")
@json_option
def list_queries(as_json: bool) -> None:
    """Show what can be asked."""
    for view in VIEWS:
        if as_json:
            write_json({"schema": "refold.audit.list/1", "name": view.name, "question": view.question})
        else:
            write(f"{view.name:<20}{view.question}")


@command.add_command
@verb("follow", "")
@json_option
@journal_argument
def follow_journal(as_json: bool, journal: str) -> None:
    """Project what is appended, as it is appended, until interrupted. An engine can do this itself (`audit=True`)."""
    from refold.engine.audit.place import follow, place_of

    def tell(batch: Any) -> None:
        at = batch.checkpoint
        if as_json:
            facts = {"stream": at.stream, "position": at.position, "num_rows": batch.num_rows, "damage": at.damage}
            write_json({"schema": "refold.audit.follow/1", **facts})
        else:
            write(f"{at.stream}: up to record {at.position}, {count(batch.num_rows, 'row')}")
        sys.stdout.flush()
        if at.damage is not None:
            note(f"refold: nothing can be projected from the damage on: {safe(at.damage)}")
            raise SystemExit(UNREADABLE)

    def pause() -> None:
        time.sleep(_POLL_S)
        followed.check()

    followed = Followed(journal)
    with there_is_one(journal):
        require_journal(journal)  # says so if nobody can tell whether its end is gone
        with followed.blamed():
            follow(place_of(journal), tell, pause)


@command.add_command
@verb("rebuild", "")
@journal_argument
def rebuild(journal: str) -> None:
    """Build the read model anew beside the one that is shown, then show it. Who asks meanwhile sees the old one."""
    from refold.engine.audit.place import place_of

    built = caught_up(place_of(journal), rebuilds=True)
    for done in built:
        write(f"{done.stream}: {count(done.position, 'record')}, {count(done.num_events, 'event')}")
    if any(done.damage is not None for done in built):
        raise SystemExit(UNREADABLE)


@command.add_command
@verb("export", "")
@click.argument("folder")
@journal_argument
@click.option(
    "--view",
    "views",
    multiple=True,
    type=click.Choice([view.name for view in VIEWS]),
    metavar="NAME",
    help="Only this view (may be given again).",
)
def export(folder: str, journal: str, views: tuple[str, ...]) -> None:
    """Write the views to FOLDER as Parquet files, for DuckDB, pandas and the like (needs refold[analytics]).

    batch_mates, which is step_entries joined with itself and as many times larger as batches are wide, only by its name.
    """
    from refold.engine.audit.export import PAIRS, export_views

    with asking(journal, as_is=False) as asked:
        exported = export_views(asked, folder, views)
        while (done := _next_written(exported, folder)) is not None:
            write(f"{done[0]}.parquet: {count(done[1], 'row')}")
    if not views:
        note(f"{PAIRS} is step_entries joined with itself: left out; --view {PAIRS} writes it too")


def _next_written(exported: "Iterator[tuple[str, int]]", folder: str) -> tuple[str, int] | None:
    """The next view that is in the folder; stdout, which may fail too, is another matter."""
    try:
        return next(exported, None)
    except OSError as error:
        raise unwritable(folder, error) from error


_FILTERS = {
    "request_id": ("--request", "request_id", str, "Only of this request."),
    "step": ("--step", "step", _COUNT, "Only of this step."),
    "minute": ("--minute", "minute", _COUNT, "Only of this minute (since 1970, UTC)."),
    "kind": ("--kind", "kind", str, "Only of this kind."),
    "tenant": ("--tenant", "tenant", str, "Only of this tenant."),
    "output_index": ("--index", "output_index", _COUNT, "Only of this output index."),
}


def _about_known(request_id: str, answer: Answer, asked: Questions, journal: str) -> Answer:
    """An answer about a request, of which nothing is shown yet: if it is empty, there may be no such request.

    Raises:
        Complaint: there is none; or none before the damage, and nobody knows what is behind it.
    """
    first = next(answer.rows, None)
    if first is not None:
        return answer._replace(rows=chain([first], answer.rows))
    known = [str(row[0]) for row in asked.ask("SELECT request_id FROM requests").rows]
    if request_id not in known:
        unknown = unknown_request(request_id, similar(request_id, known), journal)
        if unknown.status == NOT_SO and next(asked.ask("SELECT 1 FROM integrity WHERE damage IS NOT NULL").rows, None):
            raise Complaint(f"{unknown} before the damage", unknown.hint, UNREADABLE)
        raise unknown
    return answer._replace(rows=iter(()))


def _checked(answer: Answer, journal: str, *, as_is: bool) -> tuple[Answer, JournalCorrupt | None]:
    """The rows of `integrity` after the journal was read again, and damage that they didn't know; a word on what wasn't read."""
    from refold.engine.audit.reread import as_it_is, read_again

    if as_is:
        note(
            "refold: the records were not read again: with --as-is, whole means that they were when they were projected"
        )
        return answer, None
    with reading(journal) as reader, bar("checking", reader.head().position, "records") as progress:
        found = read_again(reader, progress.advance)
    for stream, read in found.items():
        if read.num_archived:
            archived = count(read.num_archived, "record")
            note(f"refold: the first {archived} of stream {safe(stream)} are archived, and were not read again")
    return as_it_is(answer, found)


def _violated(asked: Questions, journal: str) -> Complaint:
    """That the view which must be empty isn't, with a command for the first stream that it is about."""
    found = asked.ask("SELECT stream FROM integrity WHERE num_violations > 0 ORDER BY stream LIMIT 1").rows
    stream = next((str(row[0]) for row in found), DEFAULT_STREAM)
    verify = typed("verify", journal, options=of_stream(stream))
    return Complaint(f"{named(journal)} has violations", f"`{verify}` says where the first law is broken", NOT_SO)


def _query(view: View) -> click.Command:
    """The command of a named query."""

    def run(journal: str, limit: int, as_json: bool, as_csv: bool, as_is: bool, **wanted: Any) -> None:
        damage: JournalCorrupt | None = None
        chosen = {column: value for column, value in wanted.items() if value is not None}
        columns = "*" if as_json or as_csv else view.shown.replace(" ", ", ")
        with asking(journal, as_is=as_is) as asked:
            where = " AND ".join(f"{column} = {asked.mark}" for column in chosen)
            sql = f"SELECT {columns} FROM {view.name}{f' WHERE {where}' if where else ''} ORDER BY {view.order}"  # noqa: S608
            if limit:
                sql += f" LIMIT {limit}"
            answer = asked.ask(sql, list(chosen.values()))
            if "request_id" in chosen:
                answer = _about_known(chosen["request_id"], answer, asked, journal)
            if view.name == "integrity":
                answer, damage = _checked(answer, journal, as_is=as_is)
            num = show(answer, as_json=as_json, as_csv=as_csv)
            if view.name == "violations" and num:
                raise _violated(asked, journal)
            if damage is not None:
                raise damaged(damage, journal)

    again = f"{_READS_AGAIN} " if view.name == "integrity" else ""
    run.__doc__ = (
        f"{view.question}\n\n    {again}A terminal shows the columns that matter most; --json and --csv have all."
    )
    options = [click.option("-n", "--limit", type=_COUNT, default=0, metavar="N", help="At most N rows; 0 for all.")]
    for column in view.filters:
        flag, name, kind, text = _FILTERS[column]
        options.append(click.option(flag, name, type=kind, help=text))
    wrapped: Any = answer_options(journal_argument(run))
    for option in options:
        wrapped = option(wrapped)
    made = verb(view.name, f"Example:\n  refold sql run.db {view.example!r}")(wrapped)
    made.hidden = True
    return made
