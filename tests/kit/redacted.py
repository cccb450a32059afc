"""Lives in which finished requests are redacted at random instants, each journaled as its engine would have."""

from refold.engine.history.redaction import RedactionPlan
from refold.journal.codec import encode
from refold.journal.record import seal
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.projections.requests import FINISHED
from refold.scheduler.commands import RecordDigest
from tests.kit.player import Reopen
from tests.kit.simulation import Simulation


class RedactedLife(Simulation):
    """A simulated life whose journal is kept in a store beside it. `redacted` are the ids that were redacted."""

    def __init__(self, seed: int, rate: float = 0.03) -> None:
        super().__init__(seed)
        self.rate = rate
        self.journal = MemoryJournal()
        self.store = MemoryStore(self.journal)
        self.head = self.store.open_stream()
        self.redacted: list[str] = []
        obey = self.drive.obey
        # A redaction that is on disk is never lost: here nothing is.
        self.drive.obey = lambda order: obey(Reopen(changes=order.changes) if isinstance(order, Reopen) else order)

    def _turn(self) -> None:
        super()._turn()
        if self.random.random() < self.rate:
            self.redact_somebody()

    def save(self) -> None:
        """Append what has happened since."""
        for events in self.drive.records[self.head.position :]:
            record = seal(self.head, 0, *encode(events, salt=f"{self.head.position:08}"))
            self.head = self.store.append("main", [record])

    def redact_somebody(self) -> None:
        """Redact a request that is over, if there is one."""
        table = self.drive.state.requests
        over = [name for name in table.finished_ids if table.handle_by_id[name] not in table.by_handle]
        over = [name for name in over if name not in self.redacted]
        if over:
            self.redact(self.random.choice(over))

    def redact(self, request_id: str) -> None:
        """Redact a request, as a live engine would, and record a digest."""
        self.save()
        plan = RedactionPlan(request_id)
        plan.follow(self.store.read())
        events = self.drive.do(plan.command("simulated"))
        assert len(self.drive.records) == self.head.position + 1
        record = seal(self.head, 0, *encode(events))
        self.head = self.store.erase_content("main", [record], plan.contents).head
        self.redacted.append(request_id)
        self.drive.do(RecordDigest())
        self.save()


def is_over(life: RedactedLife, request_id: str) -> bool:
    """Whether a request has ended and drained."""
    request = life.drive.state.requests.by_handle.get(life.drive.state.requests.handle_by_id[request_id])
    return request is None or (request.status is FINISHED and not request.num_in_flight_tokens)
