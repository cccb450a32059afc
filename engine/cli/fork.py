"""`refold fork`: what if the engine had been another one from here on?"""

import re
import sys
from typing import Any

import click
import msgspec

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, verb
from refold.engine.cli.failures import USAGE, Complaint
from refold.engine.cli.output import duration, rich_console, write, write_json
from refold.engine.cli.places import PLACE, Place, position_of
from refold.engine.cli.progress import bar
from refold.engine.history.figures import Figures
from refold.engine.history.fork import Fork, fork
from refold.engine.history.plain import is_unicode, safe
from refold.engine.history.rerun import LinearTiming
from refold.engine.history.timeline import Timeline

EXAMPLES = """Examples:
  refold fork --set policy=priority run.db
  refold fork --at 812 --set num_blocks=512 --set max_num_seqs=32
  refold fork --set max_in_flight_steps=1 --step-time 12ms --token-time 8us

The recorded column is the journal's own; the other two are played again with the same model of the worker."""

_UNITS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


@verb("fork", EXAMPLES)
@click.option(
    "--at", type=PLACE, default="0", metavar="PLACE", help="Where the history forks; the first record without."
)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="A field of the engine's configuration.")
@click.option("--step-time", metavar="TIME", help="What a step takes, e.g. 12ms; with --token-time. Else as recorded.")
@click.option("--token-time", metavar="TIME", help="What each token in it takes, e.g. 8us.")
@stream_option
@json_option
@journal_argument
def command(
    at: Place,
    changes: tuple[str, ...],
    step_time: str | None,
    token_time: str | None,
    stream: str,
    as_json: bool,
    journal: str,
) -> None:
    """Play what was asked for again, from a place on, under another configuration; compare latency, preemptions, throughput.

    The engine is opened again at that place. Arrivals come when they came, the model says what it said. How long steps take is
    fitted to the recorded steps, or given. Crashes behind the fork aren't played again.
    """
    wanted = dict(_change(text) for text in changes)
    timing = None
    if step_time is not None or token_time is not None:
        timing = LinearTiming(_time(step_time or "0ns"), _time(token_time or "0ns"))
    with reading(journal, stream) as reader, bar("playing again", reader.head(stream).position, "records") as progress:
        position = position_of(Timeline(reader, stream), at, journal)
        found = fork(reader, position, wanted, timing, stream, on_record=progress.advance)
    if as_json:
        write_json({"schema": "refold.fork/1", **_as_json(found, wanted)})
    else:
        _draw(found, wanted)


def _change(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not is_unicode(text):
        raise Complaint(f"--set {safe(text[:60])} has bytes in it that are no UTF-8", "leave them out", USAGE)
    if not sign:
        raise Complaint(f"--set {text[:60]!r} has no value", "give NAME=VALUE, e.g. policy=priority", USAGE)
    return name.strip(), value.strip()


def _time(text: str) -> int:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ns|us|µs|ms|s)", text.strip())
    if match is None:
        raise Complaint(f"{text[:40]!r} is no duration", "give a number and ns, us, ms or s, e.g. 12ms", USAGE)
    return round(float(match[1]) * _UNITS[match[2]])


def _as_json(found: Fork, wanted: dict[str, str]) -> dict[str, Any]:
    return {
        "position": found.position,
        "changes": wanted,
        "step_ns": found.timing.base_ns,
        "token_ns": found.timing.token_ns,
        "is_recorded_timing": found.is_recorded_timing,
        "recorded": msgspec.to_builtins(found.recorded),
        "same": msgspec.to_builtins(found.same),
        "fork": msgspec.to_builtins(found.fork),
        "num_refused": found.num_refused,
        "num_unfinished": found.num_unfinished,
    }


def _draw(found: Fork, wanted: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "recorded", "same again", "forked", "change"):
        table.add_column(title, justify="left" if not title else "right")
    for name, values in _rows(found):
        table.add_row(name, *values)
    console = rich_console(sys.stdout)
    console.print(table)
    write("")
    what = ", ".join(f"{name}={value}" for name, value in wanted.items()) or "nothing changed"
    source = "as the recorded steps did" if found.is_recorded_timing else "as given"
    write(
        f"forked at {found.position}: {what}; a step takes {duration(found.timing.base_ns)} and "
        f"{found.timing.token_ns / 1000:.1f} µs a token, {source}"
    )
    if found.num_refused or found.num_unfinished:
        write(f"{found.num_refused:,} orders were refused, {found.num_unfinished:,} requests didn't end in the fork")


def _rows(found: Fork) -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, list[str]]] = []
    all_three = (found.recorded, found.same, found.fork)
    for name, field in (
        ("requests finished", "num_finished"),
        ("steps", "num_steps"),
        ("tokens out", "num_tokens"),
        ("tokens computed", "num_scheduled_tokens"),
        ("preemptions", "num_preemptions"),
        ("tokens to compute again", "num_recomputed_tokens"),
        ("tokens from the cache", "num_cached_tokens"),
    ):
        numbers = [getattr(each, field) for each in all_three]
        rows.append((name, [*(f"{number:,}" for number in numbers), _change_of(numbers[1], numbers[2])]))
    rates = [each.tokens_per_s if each.duration_ns else None for each in all_three]
    rows.append(
        ("tokens a second", [*("-" if r is None else f"{r:,.1f}" for r in rates), _change_of(rates[1], rates[2])])
    )
    for name, field in (
        ("queued", "queued"),
        ("first token", "first_token"),
        ("inter-token", "inter_token"),
        ("total", "total"),
    ):
        rows += _spreads(name, field, all_three)
    return rows


def _spreads(name: str, field: str, all_three: tuple[Figures, ...]) -> list[tuple[str, list[str]]]:
    rows = []
    for percent in ("p50", "p99"):
        spreads = [getattr(each, field) for each in all_three]
        spans = [getattr(each, f"{percent}_ns") if each.count else None for each in spreads]
        told = ["-" if span is None else duration(span) for span in spans]
        rows.append((f"{name} {percent}", [*told, _change_of(spans[1], spans[2])]))
    return rows


def _change_of(before: float | None, after: float | None) -> str:
    """Where one of them has nothing to measure, there's no change to tell."""
    if before is None or after is None:
        return "-"
    if before == after:
        return "="
    return f"{(after - before) / before:+.1%}" if before else "new"
