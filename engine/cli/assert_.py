"""`refold assert`: predicates that must hold all along a journal, for CI."""

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.cli.output import write, write_json
from refold.engine.cli.predicates_in import predicate_options, predicates
from refold.engine.cli.progress import bar
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.plain import count
from refold.engine.history.predicates import all_true
from refold.engine.history.timeline import Timeline

EXAMPLES = """Examples:
  refold assert --sql "select count(*) <= 8 from requests where status = 'running'" run.db
  refold assert --python "all(r.num_preemptions < 3 for r in requests)" run.db
  refold assert --python checks.py:pool_is_never_empty run.db

Exit status: 0 they hold after every record, 1 one doesn't."""


@verb("assert", EXAMPLES)
@predicate_options
@click.option(
    "--every", type=click.IntRange(1, 1 << 30), default=1, metavar="N", help="Ask after every Nth record only."
)
@stream_option
@json_option
@journal_argument
def command(
    sql: tuple[str, ...],
    python: tuple[str, ...],
    law: tuple[str, ...],
    every: int,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """Check that predicates of the state hold after every record; the first that doesn't is named with its position.

    A --law here must never be broken. Values that a predicate gives are true or false as Python has it.
    """
    asked = predicates(sql, python, law)
    laws, others = asked[len(sql) + len(python) :], asked[: len(sql) + len(python)]
    failed, position, asked_at = None, -1, 0
    with reading(journal, stream) as reader, bar("asking", reader.head(stream).position, "records") as progress:
        for place in Timeline(reader, stream):
            progress.advance()
            position = place.record.position
            if position % every:
                continue
            asked_at += 1
            failed = all_true(others, place.state) or next((each for each in laws if each.holds(place.state)), None)
            if failed is not None:
                break
    if as_json:
        text = failed.text if failed else None
        write_json(
            {
                "schema": "refold.assert/1",
                "ok": failed is None,
                "position": position if failed else None,
                "predicate": text,
            }
        )
    if failed is not None:
        state, log = (
            typed(v, journal, options=(*of_stream(stream), o, position))
            for v, o in (("show", "--at"), ("log", "--since"))
        )
        hint = f"`{state}` shows the state, `{log}` what came then"
        raise Complaint(f"does not hold after record {position}: {failed.text[:200]}", hint, NOT_SO)
    if not as_json:
        write(f"{count(len(asked), 'predicate')} held after {count(asked_at, 'record')}")
