"""`refold show`: the state of the engine at a position."""

import sys
from typing import Any

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, tell_if_cut, verb
from refold.engine.cli.failures import NOT_SO, UNREADABLE, Complaint, damage_hint, damaged
from refold.engine.cli.output import clock, rich_console, write, write_json
from refold.engine.cli.places import PLACE, Place, position_of
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.plain import count, listed, safe
from refold.engine.history.portrait import portrait
from refold.engine.history.replay import Contradiction, Replayed, state_at
from refold.engine.history.timeline import Timeline
from refold.journal.errors import JournalCorrupt, NotFound

EXAMPLES = """Examples:
  refold show                     the state after the last record of ./refold.db
  refold show --at 812            the state after record 812
  refold show --at step:40        when step 40 was planned
  refold show --at 812 --against 800
  refold show --at 812 --json | jq '.requests[] | select(.num_stale_output_tokens > 0)'"""

# Column title -> key in the portrait of a request, in the order shown. Which blocks they are is in the JSON.
_COLUMNS = {
    "status": "status",
    "epoch": "epoch",
    "prompt": "num_prompt_tokens",
    "output": "num_output_tokens",
    "computed": "num_computed_tokens",
    "in flight": "num_in_flight_tokens",
    "stale": "num_stale_output_tokens",
    "to deliver": "num_deliverable_stale_tokens",
    "placeholders": "num_output_placeholders",
    "preempted": "num_preemptions",
    "blocks": "num_blocks",
}


_TABLE_WIDTH = 112


@verb("show", EXAMPLES)
@click.option(
    "--at", type=PLACE, metavar="PLACE", help="A position, step:N, or time:YYYY-MM-DDTHH:MM:SSZ; the end without."
)
@click.option("--against", type=PLACE, metavar="PLACE", help="Show what differs from the state there.")
@stream_option
@json_option
@journal_argument
def command(at: Place | None, against: Place | None, stream: str, as_json: bool, journal: str) -> None:
    """Fold the journal up to and including a position, and show the engine's state there.

    Each live request is shown with all its counters, in tokens; the pool in blocks; the digest is what any other replay
    of the same journal has at that position.
    """
    broken = None
    with reading(journal, stream) as reader:
        timeline = Timeline(reader, stream)
        try:
            if against is not None:
                _compare(
                    timeline,
                    position_of(timeline, against, journal),
                    position_of(timeline, at, journal),
                    as_json=as_json,
                )
                return
            replayed = state_at(reader, None if at is None else position_of(timeline, at, journal), stream)
        except NotFound as error:
            last = typed("log", journal, options=(*of_stream(stream), "-n", 1))
            raise Complaint(str(error), f"`{last}` shows the last record", NOT_SO) from error
        except (JournalCorrupt, Contradiction) as error:
            if at is not None or error.position == 0:
                raise damaged(error, journal, stream) from error
            broken, replayed = error, state_at(reader, error.position - 1, stream)
    _show(replayed, as_json)
    if broken is not None:
        line = f"the state above is that after record {broken.position - 1}, the last that is sound: {broken}"
        raise Complaint(line, damage_hint(broken, journal, stream), UNREADABLE) from broken
    if replayed is not None and at is None:
        tell_if_cut(journal, replayed.record.position, stream, is_open=replayed.state.is_open)


def _compare(timeline: Timeline, before: int, after: int, *, as_json: bool) -> None:
    """What differs between two states."""
    found = timeline.diff(before, after)
    if as_json:
        rows = [difference.plain() for difference in found]
        write_json({"schema": "refold.show/1", "position": after, "against": before, "differences": rows})
        return
    write(f"from record {before} to record {after}")
    for difference in found:
        write(f"  {difference.words()}")


def _show(replayed: Replayed | None, as_json: bool) -> None:
    if as_json:
        write_json(_as_json(replayed))
    elif replayed is None:
        rich_console(sys.stdout).print("empty: no engine has written to this journal yet")
    else:
        _draw(replayed, portrait(replayed.state))


def _as_json(replayed: Replayed | None) -> dict[str, Any]:
    if replayed is None:
        return {"schema": "refold.show/1", "position": None}
    place = {"position": replayed.record.position, "time_ns": replayed.record.time_ns}
    return {"schema": "refold.show/1", **place, **portrait(replayed.state)}


def _draw(replayed: Replayed, p: dict[str, Any]) -> None:
    from rich.table import Table

    console = rich_console(sys.stdout)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold")
    lines.add_column()
    lines.add_row("position", f"{replayed.record.position}, {clock(replayed.record.time_ns)}")
    lines.add_row("engine", _engine(p["engine"]))
    lines.add_row("window", _window(p))
    lines.add_row("running", f"{len(p['running'])}: {_ids(p['running'])}" if p["running"] else "nobody")
    lines.add_row("waiting", f"{len(p['waiting'])}: {_ids(p['waiting'])}" if p["waiting"] else "nobody")
    lines.add_row("pool", _pool_in_words(p["pool"]))
    lines.add_row("digest", p["digest"])
    console.print(lines)
    if p["requests"]:
        console.print()
        console.width = max(console.width, _TABLE_WIDTH)
        console.print(_requests(p["requests"]))


def _engine(engine: dict[str, Any]) -> str:
    if engine["config"] is None:
        return "never opened"
    life = "open" if engine["is_open"] else "closed in good order"
    life += f" and paused ({engine['paused']})" if engine["paused"] else ""
    if engine["is_open"]:
        life += f", worker {engine['worker_generation']} alive" if engine["worker_alive"] else ", no worker at work"
    return f"epoch {engine['engine_epoch']}, {life}, model {safe(engine['config']['model'])}"


def _window(p: dict[str, Any]) -> str:
    depth = p["engine"]["config"]["max_in_flight_steps"] if p["engine"]["config"] else 0
    if not p["window"]:
        return f"0 of {depth} steps in flight"
    steps = [f"step {s['step']} ({count(sum(s['num_tokens']), 'token')}, {len(s['stale'])} stale)" for s in p["window"]]
    return f"{len(steps)} of {depth} steps in flight: {', '.join(steps)}"


def _ids(request_ids: list[str]) -> str:
    return listed([safe(request_id) for request_id in request_ids], 8)


def _pool_in_words(pool: dict[str, int]) -> str:
    return (
        f"{count(pool['num_blocks'], 'block')} of {count(pool['block_size'], 'token')}: "
        f"{pool['num_owned_blocks']} owned ({pool['num_shared_blocks']} shared), {pool['num_blank_blocks']} free, "
        f"{pool['num_cached_blocks']} free and cached, {pool['num_fenced_blocks']} fenced"
    )


def _requests(requests: list[dict[str, Any]]) -> Any:
    """One line per request, all counters in tokens. A narrow terminal wraps the lines; no number is left out."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("request", style="bold", overflow="fold")
    for title in _COLUMNS:
        longest = max(map(len, title.split()))
        table.add_column(title, justify="left" if title == "status" else "right", min_width=longest, no_wrap=False)
    for request in requests:
        table.add_row(safe(request["request_id"]), *(str(request[key]) for key in _COLUMNS.values()))
    return table
