"""`refold sql`: ask a journal anything."""

import sys

import click

from refold.engine.cli.answers import answer_options, asking, show
from refold.engine.cli.console import remembered, verb
from refold.engine.cli.failures import Complaint
from refold.engine.cli.typed import typed
from refold.journal.errors import Rejected

EXAMPLES = """Examples:
  refold sql run.db "SELECT request_id, total_ns FROM requests ORDER BY total_ns DESC LIMIT 5"
  refold sql run.db "SELECT * FROM preemptions" --json
  refold sql run.db - --csv < question.sql

`refold audit list` shows the views; docs/reference/audit.md explains them, column by column."""


@verb("sql", EXAMPLES)
@answer_options
@click.argument("journal", callback=remembered)
@click.argument("statement")
def command(journal: str, statement: str, as_json: bool, as_csv: bool, as_is: bool) -> None:
    """Ask a journal one SELECT, after projecting what was appended since the last time. - reads it from stdin.

    The connection can't write: whatever isn't a SELECT (WITH, VALUES, EXPLAIN) is refused.
    """
    from refold.engine.audit.ask import check_reads, is_reading

    sql = sys.stdin.read() if statement == "-" else statement
    try:
        check_reads(sql)
    except Rejected as error:
        if not is_reading(journal):
            raise
        in_order = f"the journal comes first, then the statement: `{typed('sql', statement, journal)}`"
        raise Complaint(str(error), in_order) from error
    with asking(journal, as_is=as_is) as asked:
        show(asked.ask(sql), as_json=as_json, as_csv=as_csv)
