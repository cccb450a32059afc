"""`refold blame`: where each token of a request came from."""

import sys

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import NOT_SO, USAGE, Complaint
from refold.engine.cli.output import painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.unknown import unknown_request
from refold.engine.history.blame import Origin, blame, rows
from refold.engine.history.plain import listed, safe

EXAMPLES = """Examples:
  refold blame req-1                   every output token: its step, its batch, sampled or drafted
  refold blame req-1:7                 output 7, with its batch-mates
  refold blame req-1 --json | jq 'select(.is_stale)'"""


@verb("blame", EXAMPLES)
@click.argument("what", metavar="ID[:INDEX]")
@stream_option
@json_option
@journal_argument
def command(what: str, stream: str, as_json: bool, journal: str) -> None:
    """Say of each output token which step made it, when it was planned and came back, in which epoch, and with whom.

    Also whether it was sampled or is a draft that was accepted, and whether it came as stale output. An id with a colon in
    it is taken as it is, if there is such a request.
    """
    with reading(journal, stream) as reader, bar("reading", reader.head(stream).position, "records") as progress:
        story, index = blame(reader, what, stream, on_record=progress.advance), None
        if not story.is_known and ":" in what:
            name, _, number = what.rpartition(":")
            if not number.isdigit():
                raise Complaint(f"{number[:20]!r} is no index of an output", "give ID:INDEX, from 0", USAGE)
            story, index = blame(reader, name, stream, on_record=progress.advance), int(number[:18])
    if not story.is_known:
        raise unknown_request(story.request_id, story.names.similar(story.request_id), journal, stream)
    origins = [origin for origin in story.origins if index in (None, origin.index)]
    if index is not None and not origins:
        hint = f"it has {len(story.origins)} outputs, from 0"
        raise Complaint(f"{story.request_id!r} has no output {index}", hint, NOT_SO)
    if as_json:
        for row in rows(origins):
            write_json({"schema": "refold.blame/1", "request_id": story.request_id, **row})
        return
    for origin in origins:
        _tell(origin, story.request_id, with_mates=index is not None)


def _tell(origin: Origin, request_id: str, *, with_mates: bool) -> None:
    paint = painter(sys.stdout)
    token = f"output {origin.index:>4}  token {origin.token_id:>6}"
    write(f"{paint(token, dim=True)}  {paint(origin.words, fg='magenta' if origin.is_stale else None)}")
    if with_mates:
        mates = [safe(name) for name in origin.batch if name != request_id]
        write(f"  entry {origin.entry} of {len(origin.batch)}; with {listed(mates, 40) or 'nobody'}")
        write(f"  engine {origin.engine_epoch}, worker {origin.worker_generation}")
