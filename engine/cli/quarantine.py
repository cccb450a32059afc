"""`refold quarantine`: what killed the worker, and letting it in again."""

import click

from refold.engine.cli.console import journal_argument, json_option, require_journal, verb, write, write_json
from refold.engine.cli.typed import typed
from refold.engine.history.plain import safe

EXAMPLES = """Examples:
  refold quarantine run.db                  whose content killed workers and is kept out
  refold quarantine --lift client-9 run.db  the cause is mended: let it in again

On a live engine: `engine.quarantined()` and `engine.lift_quarantine("client-9")`.
Exit status: 0 all is well, 2 nothing of that request is quarantined, 5 a live engine writes the journal."""


@verb("quarantine", EXAMPLES)
@click.option("--lift", metavar="REQUEST_ID", help="Let the content of this request be computed again.")
@json_option
@journal_argument
def command(lift: str | None, as_json: bool, journal: str) -> None:
    """Show the requests that killed workers; their content is rejected when it is submitted again.

    A line is one content: all requests that were found out with it, any of which lifts it. `refold stat`, `refold verify` and
    `refold run` say how many contents are kept out.

    A request that was in the last step of dying workers again and again is tried alone. If the worker dies of it, the request
    ends with an error, and what it asked for is quarantined. `refold why` and `refold request` tell how it was found.
    """
    from refold.engine.quarantine import lift_at_rest, quarantined_at_rest

    require_journal(journal)
    if lift is not None:
        lift_at_rest(journal, lift)
        if as_json:
            write_json({"schema": "refold.quarantine/1", "request_id": lift, "is_quarantined": False})
        else:
            write(f"the content of {safe(lift)} is quarantined no longer")
        return
    found = quarantined_at_rest(journal)
    for each in found:
        if as_json:
            told = {"request_id": each.culprit, "request_ids": each.request_ids, "is_quarantined": True}
            write_json({"schema": "refold.quarantine/1", **told})
        else:
            write(", ".join(map(safe, each.request_ids)))
    if not found and not as_json:
        write("nothing is quarantined")


def quarantine_line(num_quarantined: int, journal: str) -> list[tuple[str, str]]:
    """What `stat` and `verify` say of a standing quarantine; nothing if there is none."""
    if not num_quarantined:
        return []
    kept = "1 content is" if num_quarantined == 1 else f"{num_quarantined} contents are"
    return [("kept out", f"{kept} quarantined, for killing workers: `{typed('quarantine', journal)}` tells whose")]
