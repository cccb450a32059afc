"""Options that take predicates, for the verbs that ask one."""

from collections.abc import Callable
from typing import Any

import click

from refold.engine.cli.failures import USAGE, Complaint
from refold.engine.history.predicates import Named, law_predicate, python_predicate, sql_predicate


def predicate_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--sql`, `--python` and `--law`, each any number of times."""
    for name, metavar, words in (
        ("--law", "LAW", "A law of the state is broken, e.g. L2."),
        (
            "--python",
            "EXPR",
            "A Python expression over state, requests, running, waiting, pool, window; or FILE.py:NAME.",
        ),
        ("--sql", "SELECT", "A query over requests, window, pool, engine: true if its first value is."),
    ):
        function = click.option(name, multiple=True, metavar=metavar, help=words)(function)
    return function


def predicates(sql: tuple[str, ...], python: tuple[str, ...], law: tuple[str, ...] = ()) -> list[Named]:
    """The predicates that were given.

    Raises:
        Complaint: none was.
        Rejected: one can't be one.
    """
    found = [*map(sql_predicate, sql), *map(python_predicate, python), *map(law_predicate, law)]
    if not found:
        raise Complaint("no predicate to ask", 'give one, e.g. --sql "select num_blank_blocks = 0 from pool"', USAGE)
    return found
