"""A PostgreSQL server that stops in the middle: see `drivers`."""

from tests.reliability.drivers import Driver
from tests.reliability.judge import Tally


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    return None
