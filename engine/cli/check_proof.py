"""`refold check-proof`: does a proof hold? Needs no journal."""

from pathlib import Path

import click

from refold.engine.cli.console import json_option, verb
from refold.engine.cli.failures import NOT_SO, USAGE, Complaint
from refold.engine.cli.output import write, write_json

EXAMPLES = """Examples:
  refold check-proof proof.json --head run.head
  refold check-proof proof.json --head run.head --key signing.pub.pem

Exit status: 0 it holds, 1 it doesn't, 2 one of the files isn't what it should be."""
_MAX_BYTES = 1 << 28


@verb("check-proof", EXAMPLES)
@click.option("--head", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The head that you kept.")
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Who must have signed it: the public key.")
@json_option
@click.argument("proof", type=click.Path(path_type=Path))
def command(head: Path, key: Path | None, as_json: bool, proof: Path) -> None:
    """Check that a record is in the journal that a head was made of. Reads two files and no journal."""
    from refold.engine.history.heads import read_head
    from refold.engine.history.proofs import Disproved, check_proof, decode_proof

    try:
        with proof.open("rb") as file:
            shown = decode_proof(file.read(_MAX_BYTES))
    except OSError as error:
        raise Complaint(
            f"cannot read {proof}: {error.strerror}", "name a file that `refold prove` wrote", USAGE
        ) from error
    kept = read_head(head, key)
    try:
        check_proof(shown, kept)
    except Disproved as error:
        if as_json:
            write_json({"schema": "refold.check-proof/1", "ok": False, "message": str(error)})
        raise Complaint(str(error), "don't believe it", NOT_SO) from error
    if as_json:
        write_json(
            {"schema": "refold.check-proof/1", "ok": True, "position": shown.position, "is_signed": key is not None}
        )
        return
    said = "" if shown.content is None else ", and says what the proof discloses"
    write(f"record {shown.position} is one of the first {kept.position} of stream {kept.stream!a}{said}")
