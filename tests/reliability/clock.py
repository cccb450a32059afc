"""A wall clock that jumps, mostly backwards, while an engine runs.

The library's `clock_gettime` is shifted for the whole process, at random deltas and by anything from a millisecond to a century.
Records carry the time as the clock told it; nothing else may depend on it: the engine goes on, every token comes out as it must,
and the journal is whole.
"""

import itertools
import random
import tempfile
from pathlib import Path

from refold.engine.engine import Delta
from refold.journal.stores import open_reader
from tests.kit.disk import Disk
from tests.reliability.drivers import Driver, Place
from tests.reliability.engine_life import Seen, judge_engine, jumps, live
from tests.reliability.judge import Tally
from tests.reliability.scenario import in_a_child

_LIVES = 200


def _one(driver: Driver, folder: Path, tally: Tally, seed: int) -> None:
    place, rng, disk = driver.fresh(folder), random.Random(seed), Disk()

    def jump(_: Delta) -> None:
        if rng.random() < 0.4:
            disk.shift_clock(jumps(rng))

    outcome = in_a_child(lambda: live(place, {}, jump))
    tally.cycles += 1
    if outcome.crash or outcome.message:
        tally.blame("wrong_state", f"seed {seed}: {outcome.crash or outcome.message}")
        return
    judge_engine(tally, place, Seen(), f"clock {seed}", is_over=True)
    tally.seen["records earlier than the one before"] += _steps_back(place)


def _steps_back(place: Place) -> int:
    reader = open_reader(place.url)
    times = [record.time_ns for record in reader.read(place.stream)]
    reader.close()
    return sum(after < before for before, after in itertools.pairwise(times))


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    tally = Tally("clock", driver.name)
    with tempfile.TemporaryDirectory() as name:
        for number in range(max(round(_LIVES * scale), 1)):
            _one(driver, Path(name, str(number)), tally, seed + number)
    return tally
