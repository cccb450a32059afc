"""`refold redact`: erase what a request said, and keep the proof of everything else."""

import click

from refold.engine.cli.console import remembered, require_journal, stream_option, verb
from refold.engine.cli.output import note, write, write_json
from refold.engine.history.plain import count, safe

EXAMPLES = """Examples:
  refold redact run.db client-9 --reason "asked by mail, 2026-03-01"
  refold verify run.db                 says how many records were redacted

On a live engine: `engine.redact("client-9")`.
Exit status: 0 erased, 1 no such request, 3 there is no journal, 2 the request isn't over or nothing is left of it, 5 a live engine writes the journal."""


@verb("redact", EXAMPLES)
@click.option("--reason", default="", metavar="TEXT", help="Who asked, and why; goes into the journal.")
@stream_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line (NDJSON).")
@click.argument("journal", callback=remembered)
@click.argument("request_id", metavar="REQUEST_ID")
def command(reason: str, stream: str, as_json: bool, journal: str, request_id: str) -> None:
    """Erase the prompt and the output of a finished request from every record, for good.

    What others said stays, and so does all that was decided: the hash chain, the schedule and every counter can still be
    checked. A new record says what was erased. There is no way back.
    """
    from refold.engine.cli.unknown import names_in, unknown_request
    from refold.engine.redacting import redact_at_rest
    from refold.journal.errors import NotFound

    require_journal(journal, stream, tells_doubt=False)  # refused, if there is any
    try:
        done = redact_at_rest(journal, request_id, reason, stream)
    except NotFound as error:
        raise unknown_request(request_id, names_in(journal, stream).similar(request_id), journal, stream) from error
    if as_json:
        write_json({"schema": "refold.redact/1", "request_id": request_id, "records": done.records, "left": done.left})
    else:
        write(f"what {safe(request_id)} said and was told is erased from {count(done.records, 'record')}")
    if done.left:
        note(f"refold: it may still be in {done.left}")
