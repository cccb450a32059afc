"""`refold stat`: a journal in numbers."""

import sys
from typing import Any

import click

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, streams_of, verb
from refold.engine.cli.output import clock, duration, painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.quarantine import quarantine_line
from refold.engine.history.plain import count, safe
from refold.engine.history.statistics import Statistics, statistics
from refold.journal.stores.sizes import Sizes, sizes_of

EXAMPLES = """Examples:
  refold stat                      sizes, rates and growth of ./refold.db
  refold stat --events run.db      also: how many events of each kind, and the bytes that each takes
  refold stat --json | jq .bytes_per_generated_token"""


@verb("stat", EXAMPLES)
@click.option("--events", "by_kind", is_flag=True, help="Count events by kind. Reads every record.")
@stream_option
@json_option
@journal_argument
def command(by_kind: bool, stream: str, as_json: bool, journal: str) -> None:
    """Show how large a journal is, what is in it and how fast it grows.

    Reads the newest snapshot and the records behind it, and little else. Bytes are those of the whole store: the file with its
    WAL, the folder, or the tables. How much a day brings is told once the records span an hour.
    """
    with reading(journal, stream) as reader:
        streams_of(reader)  # one that is lost is noticed here: the sizes are the whole store's
        with bar("counting", reader.head(stream).position, "records") as progress:
            found = statistics(reader, stream, by_kind=by_kind, on_record=progress.advance)
    report = as_report(found, sizes_of(journal), stream)
    if as_json:
        write_json(report)
    elif found is None:
        write(f"empty: no engine has written to stream {safe(stream)} of this journal yet")
    else:
        _print(report, journal, stream)


def as_report(found: Statistics | None, sizes: Sizes, stream: str) -> dict[str, Any]:
    """The numbers as JSON shows them."""
    from refold.engine.history.verify import format_head

    report: dict[str, Any] = {"schema": "refold.stat/1", "stream": stream}
    report["bytes"] = {"live": sizes.live, "sealed": sizes.sealed, "archived": 0, "snapshots": 0}
    if found is None:
        return report | {"num_records": 0}
    archived = sum(archive.num_bytes for archive in found.archives)
    report["bytes"] |= {"archived": archived, "snapshots": sum(s.num_bytes for s in found.snapshots)}
    totals, tokens = found.totals, found.totals.tokens
    of_records = sizes.all + archived - report["bytes"]["snapshots"]
    return report | {
        "num_records": found.head.position,
        "num_archived_records": found.border.position,
        "engine_epoch": found.head.engine_epoch,
        "head": format_head(found.head),
        "oldest_ns": found.all.first_ns,
        "newest_ns": found.all.last_ns,
        "totals": totals.counts(),
        "num_quarantined": found.num_quarantined,
        "bytes_per_generated_token": round(of_records / tokens, 2) if tokens else None,
        "tokens_per_s": _rounded(found.tokens_per_s),
        "records_per_s": _rounded(found.records_per_s),
        "growth_bytes_per_day": found.all.per_day(sizes.all),
        "growth_records_per_day": found.all.per_day(found.all.num_records),
        "snapshots": [snapshot._asdict() for snapshot in found.snapshots],
        "archives": [
            {"start": a.start, "stop": a.stop, "path": a.path, "num_bytes": a.num_bytes} for a in found.archives
        ],
        "events": {name: kind._asdict() for name, kind in found.kinds.items()},
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _print(report: dict[str, Any], journal: str, stream: str) -> None:
    paint = painter(sys.stdout)
    write(paint(safe(journal), bold=True) + f": {count(report['num_records'], 'record')}")
    for name, words in [*_lines(report), *quarantine_line(report["num_quarantined"], journal, stream)]:
        write(f"  {name:<10}{words}")
    for name, kind in report["events"].items():
        per = kind["num_bytes"] / kind["num_events"]
        write(f"    {name:<22}{kind['num_events']:>12,}  {in_bytes(kind['num_bytes']):>10}  {per:>10,.0f} each")


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    totals, sizes = report["totals"], report["bytes"]
    finished = sum(totals["finished"].values())
    lines = [
        ("head", report["head"]),
        (
            "time",
            f"{clock(report['oldest_ns'])} to {clock(report['newest_ns'])}, {_lives_in_words(report)}",
        ),
        (
            "requests",
            f"{totals['requests']:,}, {finished:,} finished; {count(totals['tokens'], 'token')} in {count(totals['steps'], 'step')}",
        ),
        ("bytes", _bytes_in_words(sizes, report["bytes_per_generated_token"])),
        (
            "rate",
            f"{_or_dash(report['tokens_per_s'])} tokens/s over all, {_or_dash(report['records_per_s'])} records/s at the end",
        ),
    ]
    lines.append(("growth", _growth_in_words(report)))
    positions = [f"{snapshot['position']:,}" for snapshot in report["snapshots"]]
    lines.append(("snapshots", f"at {', '.join(positions)}" if positions else "none"))
    lines += [
        ("archive", f"records {a['start']:,} to {a['stop'] - 1:,} in {safe(a['path'])}, {in_bytes(a['num_bytes'])}")
        for a in report["archives"]
    ]
    return lines


def _growth_in_words(report: dict[str, Any]) -> str:
    """An afternoon tells something of a day, a moment nothing."""
    if report["growth_bytes_per_day"] is None:
        spans = duration(max(0, report["newest_ns"] - report["oldest_ns"]))
        return f"too early to tell: the records span {spans}, and a day's growth is told from an hour of them"
    per_day = in_bytes(report["growth_bytes_per_day"])
    return f"{per_day} and {count(report['growth_records_per_day'], 'record')} a day, if it goes on as it did"


def _lives_in_words(report: dict[str, Any]) -> str:
    """Verbs that write open a journal as well as engines do: which it was, only the events tell."""
    if not report["events"]:
        return f"opened for writing {count(report['engine_epoch'], 'time')}"
    return count(report["events"].get("EngineOpened", {"num_events": 0})["num_events"], "life", "lives")


def _bytes_in_words(sizes: dict[str, int], per_token: float | None) -> str:
    words = [f"{in_bytes(sizes['live'])} live"]
    words += [f"{in_bytes(sizes[name])} {name}" for name in ("sealed", "archived") if sizes[name]]
    words += [f"{in_bytes(sizes['snapshots'])} of it snapshots"] if sizes["snapshots"] else []
    return ", ".join(words) + (f"; {per_token:g} per generated token" if per_token is not None else "")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def in_bytes(number: int) -> str:
    """`812 B`, `12.3 kB`, `4.56 MB`, in powers of 1000."""
    if number < 1000:
        return f"{number} B"
    for unit in ("kB", "MB", "GB", "TB"):
        number_of = number / 1000.0 ** (("kB", "MB", "GB", "TB").index(unit) + 1)
        if number_of < 1000 or unit == "TB":
            break
    return f"{number_of:.3g} {unit}"
