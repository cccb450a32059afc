"""Conduct of trials: who is suspected, and what a verdict rests on. With an account of its own."""

from collections import Counter
from itertools import repeat

from refold.journal.events import (
    Event,
    OutputDelivered,
    RequestFinished,
    RequestQuarantined,
    StaleOutputConsumed,
    WorkerLost,
)
from refold.projections.requests import FINISHED
from refold.scheduler.state import State
from tests.kit.misconduct import Misconduct, must


class Suspects:
    """How many workers died with each request since its last token."""

    def __init__(self) -> None:
        self.losses: dict[int, int] = {}
        self.alone: Counter[int] = Counter()
        self.last: list[int] = []  # who was in the last worker's last step, live or not

    def before(self, state: State, event: Event) -> None:
        """Judge a loss and a verdict by the state before them."""
        if type(event) is WorkerLost and event.suspects:
            oldest = state.window.in_flight[0].requests
            live = [request.handle for request in oldest if request.status is not FINISHED]
            must(event.suspects == live, "trial", event.suspects, "are suspected, in the step were", live)
            self.last = [request.handle for request in oldest]
        elif type(event) is RequestQuarantined:
            alone = self.last == [event.handle] and self.losses[event.handle] >= 3 and self.alone[event.handle] >= 2
            must(alone, "trial", event.handle, "is found out after", self.losses, self.alone, "at last with", self.last)

    def after(self, state: State, event: Event) -> None:
        """Keep the account, and compare it with the state's."""
        if type(event) is WorkerLost:
            for handle in event.suspects:
                self.losses[handle] = self.losses.get(handle, 0) + 1
                self.alone[handle] += len(self.last) == 1
        elif not self.losses:
            pass
        elif isinstance(event, OutputDelivered):
            self._clear(zip(event.handles, event.counts or repeat(1), strict=False))
        elif isinstance(event, StaleOutputConsumed):
            self._clear(zip(event.handles, map(min, event.counts, event.delivered), strict=True))
        elif isinstance(event, RequestFinished):
            self._forget(event.handle)
        if self.losses != state.suspicion.num_losses:
            raise Misconduct(f"trial: {self.losses} died, {state.suspicion.num_losses} kept")

    def _clear(self, tokens: "zip[tuple[int, int]]") -> None:
        for handle, count in tokens:
            if count:
                self._forget(handle)

    def _forget(self, handle: int) -> None:
        self.losses.pop(handle, None)
        self.alone.pop(handle, None)
