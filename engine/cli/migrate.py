"""`refold migrate`: a journal's tables."""

import click

from refold.engine.cli.console import journal_argument, json_option, reading, require_journal, streams_of, verb
from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.cli.output import named, write, write_json
from refold.engine.cli.typed import typed

EXAMPLES = """Examples:
  refold migrate             create or upgrade ./refold.db; a journal that is current stays as it is
  refold migrate --check     exit status 1 if it needs an upgrade

Exit status: 0 current or upgraded, 1 it needs an upgrade (--check), 3 the journal is damaged."""


@verb("migrate", EXAMPLES)
@click.option("--check", is_flag=True, help="Change nothing; exit status 1 if there is something to upgrade.")
@json_option
@journal_argument
def command(check: bool, as_json: bool, journal: str) -> None:
    """Create a journal's tables, or bring them to those of this refold. All or nothing; records are never changed.

    `refold run` and the engine do this themselves when they open a journal. Then the records are checked; segments have no tables.
    """
    from refold import migrations

    if check:
        current = migrations.is_current(journal)
        if not current:
            _refuse_absent(journal)
            raise Complaint(f"{named(journal)} needs an upgrade", f"`{typed('migrate', journal)}` upgrades it", NOT_SO)
        outcome = "current"
    else:
        outcome = "upgraded" if migrations.ensure(journal) else "current"
    _refuse_damaged(journal)
    if as_json:
        write_json({"schema": "refold.migrate/1", "outcome": outcome, "revision": migrations.current(journal)})
    elif outcome == "upgraded":
        write(f"{named(journal)} has today's tables now")
    else:
        write(f"{named(journal)} is current")


def _refuse_damaged(journal: str) -> None:
    """What is said to be current is taken for whole: so all records are read and checked."""
    from refold.engine.cli.progress import bar
    from refold.engine.history.kept import check_all_there_is

    with reading(journal, tells_doubt=False) as reader:  # what is known to be lost is told as damage
        for stream in streams_of(reader):
            with bar("checking", reader.head(stream).position, "records") as progress:
                check_all_there_is(reader, stream, progress.advance)
    require_journal(journal)  # says so if nobody can tell whether its end is gone


def _refuse_absent(journal: str) -> None:
    """An absent journal needs no upgrade, it needs to exist."""
    from refold.journal.errors import JournalCorrupt, JournalError
    from refold.journal.stores.location import locate

    path = locate(journal).path
    if path is None or not path.exists():
        try:
            with reading(journal):
                pass
        except JournalCorrupt:
            raise
        except JournalError:  # its tables are old
            pass
