"""`refold quarantine`: what killed the worker, and letting it in again."""

import click

from refold.engine.cli.console import journal_argument, json_option, require_journal, stream_option, verb
from refold.engine.cli.failures import Complaint
from refold.engine.cli.output import write, write_json
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.plain import listed, safe
from refold.journal.store import DEFAULT_STREAM

EXAMPLES = """Examples:
  refold quarantine run.db                  whose content killed workers and is kept out
  refold quarantine --lift client-9 run.db  the cause is mended: let it in again

On a live engine: `engine.quarantined()` and `engine.lift_quarantine("client-9")`.
Exit status: 0 all is well, 1 no such request, 2 nothing of that request is quarantined, 5 a live engine writes the journal."""


@verb("quarantine", EXAMPLES)
@click.option("--lift", metavar="REQUEST_ID", help="Let the content of this request be computed again.")
@stream_option
@json_option
@journal_argument
def command(lift: str | None, stream: str, as_json: bool, journal: str) -> None:
    """Show the requests that killed workers; their content is rejected when it is submitted again.

    A line is one content: all requests that were found out with it, any of which lifts it. `refold stat`, `refold verify` and
    `refold run` say how many contents are kept out.

    A request that was in the last step of dying workers again and again is tried alone. If the worker dies of it, the request
    ends with an error, and what it asked for is quarantined. `refold why` and `refold request` tell how it was found.
    """
    from refold.engine.quarantine import quarantined_at_rest

    require_journal(journal, stream, tells_doubt=lift is None)
    if lift is not None:
        _lift(journal, lift, stream)
        if as_json:
            write_json({"schema": "refold.quarantine/1", "request_id": lift, "is_quarantined": False})
        else:
            write(f"the content of {safe(lift)} is quarantined no longer")
        return
    found = quarantined_at_rest(journal, stream)
    for each in found:
        if as_json:
            told = {"request_id": each.culprit, "request_ids": each.request_ids, "is_quarantined": True}
            write_json({"schema": "refold.quarantine/1", **told})
        else:
            write(", ".join(map(safe, each.request_ids)))
    if not found and not as_json:
        write("nothing is quarantined")


def _lift(journal: str, request_id: str, stream: str) -> None:
    """Lift it. An id that the journal doesn't know is not found; one whose content isn't kept out is refused."""
    from refold.engine.cli.unknown import names_in, unknown_request
    from refold.engine.quarantine import lift_at_rest, quarantined_at_rest
    from refold.engine.submissions import check_request_id
    from refold.journal.errors import Rejected

    try:
        lift_at_rest(journal, check_request_id(request_id), stream)
    except Rejected as error:
        kept = [name for each in quarantined_at_rest(journal, stream) for name in each.request_ids]
        names = names_in(journal, stream)
        if names.handle_of(request_id) is None and request_id:
            raise unknown_request(request_id, kept or names.similar(request_id), journal, stream) from error
        whose = (
            f"quarantined is what {listed([repr(name) for name in kept])} asked for"
            if kept
            else "nothing is quarantined"
        )
        raise Complaint(str(error), whose) from error


def quarantine_line(num_quarantined: int, journal: str, stream: str = DEFAULT_STREAM) -> list[tuple[str, str]]:
    """What `stat` and `verify` say of a standing quarantine; nothing if there is none."""
    if not num_quarantined:
        return []
    kept = "1 content is" if num_quarantined == 1 else f"{num_quarantined} contents are"
    whose = typed("quarantine", journal, options=of_stream(stream))
    return [("kept out", f"{kept} quarantined, for killing workers: `{whose}` tells whose")]
