"""`refold head`: the end of a journal, to keep elsewhere."""

import time
from pathlib import Path

import click

from refold.engine.cli.console import check_output, journal_argument, reading, stream_option, verb
from refold.engine.cli.failures import unwritable
from refold.engine.cli.output import note, write
from refold.engine.cli.progress import bar

EXAMPLES = """Examples:
  refold head run.db --out /mnt/elsewhere/run.head
  refold head run.db --key signing.pem > run.head     signed: it may lie anywhere
  refold verify run.db --head run.head --key signing.pub.pem
  refold head run.db --stream engine-7 > 7.head        of another stream, which the head names

`openssl genpkey -algorithm ed25519 -out signing.pem` makes a key, `openssl pkey -in signing.pem -pubout` its public half."""


@verb("head", EXAMPLES)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it; standard output without."
)
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Sign it: an Ed25519 private key, in PEM.")
@stream_option
@journal_argument
def command(out: Path | None, key: Path | None, stream: str, journal: str) -> None:
    """Export the head of a journal: position and hash of its end, and the root over all of its records.

    Whoever keeps it finds out later whether the tail was cut off or the journal was written anew, and can check a proof of a single
    record. The chain is verified on the way. Damage where no record is, such as to an index, is told on stderr, and the head is exported.
    """
    from refold.engine.history.heads import encoded, export, write_head
    from refold.journal.errors import JournalCorrupt, JournalError
    from refold.journal.merkle import Tree
    from refold.journal.verify import read_verified

    check_output(out, journal)
    tree = Tree()
    with reading(journal, stream, tells_doubt=False) as reader:  # refused, if there is any
        end = reader.head(stream)
        with bar("reading", end.position, "records") as progress:
            try:
                for record in read_verified(reader, stream):
                    tree.add(record.hash)
                    last = record
                    progress.advance()
            except JournalCorrupt as error:
                if error.kind != "unindexed":  # which is told once all records were read
                    raise
                note(f"refold: {error}; the head is that of the records, which are whole")
    if tree.size:
        end = end._replace(position=tree.size, hash=last.hash, engine_epoch=max(end.engine_epoch, last.engine_epoch))
    exported = export(stream, end, time.time_ns(), root=tree.close()[0], key=key)
    if out is None:
        write(encoded(exported).decode())
        return
    try:
        write_head(out, exported)
    except JournalError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise unwritable(out, error.__cause__) from error
