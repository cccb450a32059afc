"""Waiting with a bound: a little longer each time, never in step with others who wait for the same thing."""

import random
import time

_FIRST_S = 0.02
_LONGEST_S = 2.0


class Patience:
    """Waits that add up to no more than a bound."""

    __slots__ = ("_began_s", "_next_s", "total_s")

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self._began_s = time.monotonic()
        self._next_s = _FIRST_S

    def wait(self) -> bool:
        """Sleep for a moment; False, without sleeping, once the bound is reached."""
        left_s = self._began_s + self.total_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, self._next_s * random.uniform(0.5, 1.0)))  # noqa: S311 - jitter is no secret
        self._next_s = min(_LONGEST_S, 2 * self._next_s)
        return True
