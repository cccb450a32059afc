"""`refold prove`: one record is in a journal."""

from pathlib import Path

import click

from refold.engine.cli.console import reading, remembered, verb
from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.cli.output import write
from refold.engine.cli.typed import of_stream, typed

EXAMPLES = """Examples:
  refold head run.db --out run.head
  refold prove run.db 812 --head run.head > proof.json
  refold check-proof proof.json --head run.head"""


@verb("prove", EXAMPLES)
@click.option(
    "--head",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The head to prove it by; the journal's end without.",
)
@click.option("--stream", default=None, metavar="NAME", help="Which stream; the head's, or `main`, without.")
@click.option("--content", is_flag=True, help="Disclose what the record says, and prove that too.")
@click.argument("journal", callback=remembered)
@click.argument("position", type=click.IntRange(0, 2**62))
def command(head: Path | None, stream: str | None, content: bool, journal: str, position: int) -> None:
    """Prove that the record at POSITION is in the journal, to somebody who has only its head.

    The proof holds the record without what was said, and a path of log2(n) hashes from it to the root in the head.
    """
    import msgspec

    from refold.engine.history.heads import read_head
    from refold.engine.history.proofs import prove
    from refold.journal.errors import NotFound
    from refold.journal.store import DEFAULT_STREAM

    kept = None if head is None else read_head(head)
    if kept is not None and stream not in (None, kept.stream):
        line = f"{head} is the head of stream {kept.stream!a}, and the record is to be of {stream!a}"
        raise Complaint(line, "leave out --stream, or give a head of that one")
    stream, size = (stream or DEFAULT_STREAM, None) if kept is None else (kept.stream, kept.position)
    with reading(journal, stream) as reader:
        try:
            proof = prove(reader, stream, position, size, discloses=content)
        except NotFound as error:
            last = typed("log", journal, options=(*of_stream(stream), "-n", 1))
            raise Complaint(str(error), f"`{last}` shows the last record", NOT_SO) from error
    write(msgspec.json.encode(proof).decode())
