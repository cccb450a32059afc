"""`refold migrate`: a journal's tables."""

import click

from refold.engine.cli.console import journal_argument, json_option, named, reading, streams_of, verb, write, write_json
from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.cli.typed import typed

EXAMPLES = """Examples:
  refold migrate             create or upgrade ./refold.db; a journal that is current stays as it is
  refold migrate --check     exit status 1 if it needs an upgrade"""


@verb("migrate", EXAMPLES)
@click.option("--check", is_flag=True, help="Change nothing; exit status 1 if there is something to upgrade.")
@json_option
@journal_argument
def command(check: bool, as_json: bool, journal: str) -> None:
    """Create a journal's tables, or bring them to those of this refold. All or nothing; records are never changed.

    `refold run` and the engine do this themselves when they open a journal.
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
    _refuse_cut(journal)
    if as_json:
        write_json({"schema": "refold.migrate/1", "outcome": outcome, "revision": migrations.current(journal)})
    elif outcome == "upgraded":
        write(f"{named(journal)} has today's tables now")
    else:
        write(f"{named(journal)} is current")


def _refuse_cut(journal: str) -> None:
    """Tables that are current are no journal that is whole: what is seen to be missing without reading it, is told."""
    from refold.journal.ends import check_parts

    with reading(journal) as reader:
        for stream in streams_of(reader):
            check_parts(reader, stream, reader.head(stream).position)


def _refuse_absent(journal: str) -> None:
    """An absent journal needs no upgrade, it needs to exist."""
    import contextlib

    from refold.journal.errors import JournalError
    from refold.journal.stores.location import locate

    path = locate(journal).path
    if path is None or not path.exists():
        with contextlib.suppress(JournalError), reading(journal):
            pass
