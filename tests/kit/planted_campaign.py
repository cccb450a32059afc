"""The journals of `tests.history.planted_journals`, long, in SQLite files, and what the verbs say of each.

    python -m tests.kit.planted_campaign [--request-events 100000] [--only WORDS]

`verify --redecide` and `bisect --wrong` are asked about the journal alone, `diff` about it and the true one, `diff --redecide` about it and
today's code. Each has to name the first bad position and the class that the table says, in `MAX_S` seconds of the CPU. A fault of
the engine has no true journal to be compared with, and of one that cut the tail off only the true one (or a head that was kept)
can know.
"""

import argparse
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from refold import migrations
from refold.journal.record import Head, Record, head_after
from refold.journal.stores.columns import RECORD_COLUMNS, record_to_row
from tests.cli.command import refold
from tests.history.planted_journals import PLANTED, Planted, parts_at, sealed
from tests.kit.long_history import long_history

MAX_S = 10.0
WIDTH = 32


class Said(NamedTuple):
    """What a verb said: `place` is a position and a class, or None if it found nothing wrong."""

    verb: str
    place: tuple[int, str] | None
    cpu_s: float


def written(path: Path, records: Sequence[Record], head: Head | None = None) -> Path:
    """A journal of these rows, as they are: no store would take some of them."""
    for suffix in ("", "-wal", "-shm", ".mark", ".lock"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    migrations.ensure(str(path))
    end = head or head_after(records[-1])
    places = _places(records)
    rows = [(1, *record_to_row(r._replace(position=p))) for r, p in zip(records, places, strict=True)]
    marks = ", ".join("?" * (len(RECORD_COLUMNS) + 1))
    with sqlite3.connect(path) as db:
        db.execute(
            "INSERT INTO journal_streams (stream_id, name, head_position, head_hash, engine_epoch) VALUES (1, 'main', ?, ?, ?)",
            (places[-1] + 1, end.hash, end.engine_epoch),
        )
        db.executemany(f"INSERT INTO journal_records (stream_id, {', '.join(RECORD_COLUMNS)}) VALUES ({marks})", rows)
    db.close()
    return path


def _places(records: Sequence[Record]) -> list[int]:
    """Where the rows lie. Two can't lie at one place: a row that came twice moves all that follow."""
    places, moved = list[int](), 0
    for record in records:
        moved += bool(places) and record.position + moved == places[-1]
        places.append(record.position + moved)
    return places


def asked(verb: str, *arguments: object) -> Said:
    """One verb's answer, as JSON."""
    began_s = time.process_time()
    done = refold(*verb.split(), *arguments, "--json")
    spent_s = time.process_time() - began_s
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    row = next((line for line in lines if line.get("position") is not None), None)
    if row is not None and not row.get("ok"):
        return Said(verb, (row["position"], row.get("cause") or row.get("kind")), spent_s)
    if row is None and done.exit_code == 0:
        return Said(verb, None, spent_s)
    return Said(verb, None if done.exit_code in (0, 1) else (-1, done.stderr.strip()[:160]), spent_s)


def judged(name: str, planted: Planted, true: Path, folder: Path) -> tuple[list[Said], list[str]]:
    """What the verbs said of one journal, and what of it is wrong."""
    path = written(folder / "planted.db", planted.records)
    wanted, said, wrong = (planted.position, planted.cause), list[Said](), list[str]()
    cut = planted.cause == "truncated"
    expect = () if planted.expect is None else ("--head", f"{planted.expect.position}:{planted.expect.hash.hex()}")
    said.append(asked("verify --redecide", *expect, path))
    if not cut:
        said.append(asked("bisect --wrong", path))
    wrong += [f"{each.verb}: {each.place}" for each in said if each.place != wanted]
    parting = parts_at(name, planted)
    if parting is not None:
        said.append(asked("diff", true, path))
        if said[-1].place is None or said[-1].place[0] != parting[0] or said[-1].place[1] not in parting[1]:
            wrong.append(f"diff: {said[-1].place}, not {parting}")
    wrong += [f"{each.verb} took {each.cpu_s:.1f} s" for each in said if each.cpu_s > MAX_S]
    return said, wrong


def main() -> int:
    """The campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request-events", type=int, default=100_000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    facts, slowest, num_wrong, num_journals = list(long_history(options.request_events, WIDTH)), 0.0, 0, 0
    with tempfile.TemporaryDirectory(prefix="refold-planted-") as temporary:
        folder = Path(temporary)
        true = written(folder / "true.db", sealed(facts))
        for name, plant in PLANTED.items():
            if options.only not in name:
                continue
            planted = plant(facts)
            said, wrong = judged(name, planted, true, folder)
            slowest, num_wrong, num_journals = (
                max(slowest, *(s.cpu_s for s in said)),
                num_wrong + bool(wrong),
                num_journals + 1,
            )
            times = ", ".join(f"{each.verb} {each.cpu_s:.2f} s" for each in said)
            print(
                f"{name:<44}{planted.position:>7} {planted.cause:<13}{times}{' WRONG: ' if wrong else ''}{'; '.join(wrong)}",
                flush=True,
            )
    print(
        f"{num_journals - num_wrong} of {num_journals} named by every verb asked; the slowest took {slowest:.1f} s of the CPU"
    )
    return num_wrong > 0


if __name__ == "__main__":
    sys.exit(main())
