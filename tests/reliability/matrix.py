"""The fault matrix: each row a campaign, on every store that the row is about.

    python -m tests.reliability.matrix kill [torn flip ...] [--stores sqlite,...] [--scale 1.0] [--seed 0] [--json] [--page FILE]

`--scale` shortens a campaign (the tests run a small part of each). The exit status is 0 if silent wrong state, silent loss
and duplicates are all 0.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tests.kit.disk import is_preloaded, preloaded
from tests.reliability.drivers import DRIVERS, Driver
from tests.reliability.judge import Tally
from tests.reliability.page import write_page

ROWS = ("kill", "torn", "flip", "disk", "lock", "postgres", "clock", "race")
ON_A_FAILING_DISK = {"torn", "disk", "clock"}


def campaign(row: str) -> Callable[[Driver, float, int], Tally | None]:
    return import_module(f"tests.reliability.{row}").campaign


def run(rows: list[str], stores: list[str], scale: float, seed: int) -> list[Tally]:
    tallies = []
    for row in rows:
        for store in stores:
            started_s = time.monotonic()
            tally = campaign(row)(DRIVERS[store], scale, seed)
            if tally is not None:
                tally.seconds = round(time.monotonic() - started_s, 1)
                tallies.append(tally)
                print(_line(tally), file=sys.stderr, flush=True)
    return tallies


def _preload(rows: list[str]) -> None:
    """Start again on the disk that fails on demand, if a row needs it."""
    if not is_preloaded() and ("all" in rows or ON_A_FAILING_DISK.intersection(rows)):
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.reliability.matrix", *sys.argv[1:]], preloaded(os.environ)
        )


def _line(tally: Tally) -> str:
    seen = ", ".join(f"{count} {what}" for what, count in sorted(tally.seen.items()))
    verdict = f"wrong {tally.wrong_state}, lost {tally.lost}, duplicate {tally.duplicates}"
    return f"{tally.row} {tally.store}: {tally.cycles} cycles in {tally.seconds} s: {verdict}; {seen}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rows", nargs="+", choices=[*ROWS, "all"])
    parser.add_argument("--stores", default=",".join(DRIVERS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", help="write what was found into this page's figures")
    arguments = parser.parse_args()
    _preload(arguments.rows)
    rows = list(ROWS) if "all" in arguments.rows else arguments.rows
    tallies = run(rows, arguments.stores.split(","), arguments.scale, arguments.seed)
    for tally in tallies:
        for example in tally.examples:
            print(f"  {tally.row} {tally.store}: {example}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([tally.as_json() for tally in tallies]))
    if arguments.page:
        write_page(Path(arguments.page), tallies)
    sys.exit(0 if all(tally.is_clean for tally in tallies) else 1)


if __name__ == "__main__":
    main()
