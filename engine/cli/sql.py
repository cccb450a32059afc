"""`refold sql`: ask a journal anything."""

import sys

import click

from refold.engine.cli.answers import answer_options, asking, show
from refold.engine.cli.console import verb

EXAMPLES = """Examples:
  refold sql run.db "SELECT request_id, total_ns FROM requests ORDER BY total_ns DESC LIMIT 5"
  refold sql run.db "SELECT * FROM preemptions" --json
  refold sql run.db - --csv < question.sql

`refold audit list` shows the views; docs/reference/audit.md explains them, column by column."""


@verb("sql", EXAMPLES)
@answer_options
@click.argument("journal")
@click.argument("statement")
def command(journal: str, statement: str, as_json: bool, as_csv: bool, as_is: bool) -> None:
    """Ask a journal one SELECT, after projecting what was appended since the last time. - reads it from stdin.

    The connection can't write: whatever isn't a SELECT (WITH, VALUES, EXPLAIN) is refused.
    """
    from refold.engine.audit.ask import check_reads

    sql = sys.stdin.read() if statement == "-" else statement
    check_reads(sql)
    with asking(journal, as_is=as_is) as asked:
        show(asked.ask(sql), as_json=as_json, as_csv=as_csv)
