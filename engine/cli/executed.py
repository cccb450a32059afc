"""What `refold replay --execute` says: how much was compared, and the first thing that isn't what was recorded."""

import sys
from typing import Any

from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.cli.output import named, painter, write
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.plain import count, safe
from refold.engine.history.reexecution import Difference, OtherEnvironment, Reexecuted


def print_executed(executed: Reexecuted, journal: str, stream: str) -> None:
    """The result as lines; raises a complaint if something differs.

    Raises:
        Complaint: it does.
    """
    paint, first = painter(sys.stdout), executed.first
    if first is None:
        what = "executed again, and equal" if executed.num_steps else "nothing to execute again"
        write(paint(what, fg="green" if executed.num_steps else "yellow", bold=True) + f": {named(journal)}")
    else:
        write(paint("executed again, and not equal", fg="red", bold=True) + f": {named(journal)}")
    for name, words in _lines(executed):
        write(f"  {name:<10}{words}")
    if first is not None:
        raise _complaint(first, executed, journal, stream)


def as_json(executed: Reexecuted) -> dict[str, Any]:
    """The result as plain data."""
    found = executed._asdict()
    found["first"] = executed.first._asdict() if executed.first else None
    found["differences"] = {name: list(pair) for name, pair in executed.differences.items()}
    return {"schema": "refold.replay-execute/1", "ok": executed.first is None, **found}


def refusal(error: OtherEnvironment, journal: str, stream: str) -> Complaint:
    """Why nothing was compared."""
    again = typed("replay", journal, options=(*of_stream(stream), "--execute", "--any-environment"))
    return Complaint(str(error), f"`{again}` compares all the same, and says that it was elsewhere", NOT_SO)


def _lines(executed: Reexecuted) -> list[tuple[str, str]]:
    environment = executed.environment
    told = ", ".join(
        environment[name] for name in ("device", "instruction_set", "torch", "dtype") if name in environment
    )
    threads = f", {count(int(environment['threads']), 'thread')}" if "threads" in environment else ""
    lines = [
        ("workers", f"{executed.num_workers:,}, each new: {told}{threads}" if executed.num_workers else "none"),
        ("steps", _steps(executed)),
        ("tokens", f"{executed.num_tokens:,} compared{_equal(executed)}"),
        ("logits", _logits(executed)),
    ]
    if executed.num_tokens_erased:
        lines.append(("erased", f"{count(executed.num_tokens_erased, 'token')} can't be compared"))
    for name, (was, now) in executed.differences.items():
        lines.append(("elsewhere", f"{safe(name)} was {safe(was) or 'not told'}, is {safe(now) or 'not told'}"))
    return lines


def _steps(executed: Reexecuted) -> str:
    words = f"{executed.num_steps:,} executed"
    if executed.num_steps_lost:
        words += f"; {executed.num_steps_lost:,} never came back, and were not"
    if executed.num_steps_left_out:
        words += f"; {executed.num_steps_left_out:,} left out: what they hang on was erased"
    return words


def _equal(executed: Reexecuted) -> str:
    return ", all equal" if executed.num_tokens and (executed.first is None or executed.first.what == "logits") else ""


def _logits(executed: Reexecuted) -> str:
    if not executed.num_rows:
        return "no digests were recorded (record_logits), so rows were not compared"
    different = executed.num_rows_different
    return f"{count(executed.num_rows, 'row')} compared, {f'{different:,} differ' if different else 'all equal'}"


def _complaint(first: Difference, executed: Reexecuted, journal: str, stream: str) -> Complaint:
    what = {
        "token": f"token {first.found} instead of {first.recorded}",
        "count": f"{count(first.found, 'token')} instead of {first.recorded}",
        "logits": f"logits with digest {first.found:016x} instead of {first.recorded & (1 << 64) - 1:016x}",
    }[first.what]
    line = (
        f"step {first.step} (record {first.place}), entry {first.entry}, request {first.request_id!r}, "
        f"position {first.position}: {what}"
    )
    why = (
        "this is another machine or build: no wonder"
        if executed.differences
        else ("the worker is like the recorded one: its arithmetic isn't reproducible, or the journal was forged")
    )
    there = typed("show", journal, options=(*of_stream(stream), "--at", first.place))
    return Complaint(line, f"{why}; `{there}` shows the state there", NOT_SO)
