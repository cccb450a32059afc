"""More words for tests of the core: sessions, drafts, media and pauses, and a judge of what everybody was given."""

from collections.abc import Callable, Iterator, Sequence

from refold.gpu.simulated import SimulatedWorker, _Slot
from refold.journal.events import EngineConfig, Event, Media, PauseMode, Sampling, StepScheduled
from refold.scheduler.commands import (
    CloseSession,
    ExpireSessions,
    ExtendSession,
    FailRequest,
    LoseWorker,
    PauseEngine,
    ProposeDrafts,
    ReadyGrammar,
    ResumeEngine,
    StartWorker,
)
from tests.kit.drive import Drive
from tests.kit.sentences import EmittingWorker, all_of, fill, name_of, opened
from tests.kit.transcript import Transcript

# -- orders -----------------------------------------------------------------------------------------------------------


def extend(drive: Drive, name: str, token_ids: Sequence[int], max_tokens: int = 4, **sampling: object) -> list[Event]:
    """The next chunk of a session's input."""
    chosen = Sampling(**({"seed": 7, "max_tokens": max_tokens} | sampling))  # type: ignore[arg-type]
    return drive.do(ExtendSession(request_id=name, token_ids=list(token_ids), sampling=chosen))


def close(drive: Drive, name: str) -> list[Event]:
    """A session's input has ended."""
    return drive.do(CloseSession(request_id=name))


def expire(drive: Drive, idle_before_ns: int) -> list[Event]:
    """Close what has been idle for too long."""
    return drive.do(ExpireSessions(idle_before_ns=idle_before_ns))


def propose(drive: Drive, name: str, token_ids: Sequence[int]) -> list[Event]:
    """Drafts from outside."""
    return drive.do(ProposeDrafts(request_id=name, token_ids=list(token_ids)))


def ready(drive: Drive, name: str) -> list[Event]:
    """A request's grammar is compiled."""
    return drive.do(ReadyGrammar(request_id=name))


def fail(drive: Drive, name: str, message: str) -> list[Event]:
    """End one request with an error."""
    return drive.do(FailRequest(request_id=name, message=message))


def pause(drive: Drive, mode: PauseMode) -> list[Event]:
    """Hold scheduling back."""
    return drive.do(PauseEngine(mode=mode))


def resume(drive: Drive) -> list[Event]:
    """Let it go on."""
    return drive.do(ResumeEngine())


def lose_worker(drive: Drive) -> list[Event]:
    """The worker dies, and another starts."""
    lost = drive.do(LoseWorker(reason="test"))
    return [*lost, *drive.do(StartWorker(kind="simulated", environment={}))]


def complete_at(drive: Drive, time_ns: int) -> list[Event]:
    """The oldest step comes back at a time."""
    return drive.deliver(drive.run_worker(), time_ns=time_ns)


def settle(drive: Drive) -> list[Event]:
    """Fill and drain until nothing is left to do but wait for somebody outside."""
    events: list[Event] = []
    for _ in range(2_000):
        events += fill(drive)
        if not drive.orders:
            return events
        events += drive.complete()
    raise AssertionError("no end")


def picture(digest: str, start: int, num_tokens: int) -> Media:
    """A media input, by what it is and where it stands."""
    return Media(digest=digest, start=start, num_tokens=num_tokens)


# -- what happened ----------------------------------------------------------------------------------------------------


def steps(drive: Drive) -> list[StepScheduled]:
    """Every step, in order."""
    return all_of(StepScheduled, drive.records)


def sampling_steps(drive: Drive, name: str) -> list[int]:
    """The steps in which a request sampled."""
    found = []
    for step in steps(drive):
        names = [name_of(drive, handle) for handle in step.handles]
        if name in names and names.index(name) not in step.chunk_entries:
            found.append(step.step)
    return found


def drafts_of(drive: Drive, events: Sequence[Event]) -> dict[str, int]:
    """Request -> drafts in the step that these events schedule."""
    step = next(event for event in events if isinstance(event, StepScheduled))
    counts = step.num_drafts or [0] * len(step.handles)
    return {name_of(drive, handle): count for handle, count in zip(step.handles, counts, strict=True)}


def judged(drive: Drive) -> Transcript:
    """Everybody was given the tokens of his seed, in order, and ended (a turn, or for good) where they say."""
    transcript = Transcript()
    for events in drive.records:
        for event in events:
            transcript.observe(event)
    return transcript


# -- a worker whose drafts are as good as the test says ---------------------------------------------------------------


class DraftingWorker(SimulatedWorker):
    """Of each entry's drafts the first `script(position)` are right; position is that of the first draft."""

    def __init__(self, engine_config: EngineConfig, script: Callable[[int], int]) -> None:
        super().__init__(engine_config)
        self._script = script
        self.drafted: list[tuple[int, int, int]] = []

    def _propose(self, slot: _Slot, count: int) -> list[int]:
        if count == 0:
            return []
        start = len(slot.tokens)
        right = [self._token(slot, position) for position in range(start, start + count)]
        num_right = min(self._script(start), count)
        self.drafted.append((start, count, num_right))
        wrong = [(token + 1) % self._config.vocab_size for token in right[num_right:]]
        return right[:num_right] + wrong


def drafting(k: int, script: Callable[[int], int] | int, **changes: object) -> tuple[Drive, DraftingWorker]:
    """An engine whose worker proposes `k` drafts, of which as many are right as the script says."""
    drive = opened(**({"speculation": "worker", "num_speculative_tokens": k, "num_blocks": 64} | changes))
    worker = DraftingWorker(drive.config, script if callable(script) else lambda _: script)
    drive.worker = worker
    return drive, worker


class EmittingDrafter(EmittingWorker):
    """No two of its samples are alike, and of an entry's drafts the first `script(order of the draft run)` are right."""

    def __init__(self, engine_config: EngineConfig, script: Callable[[int], int]) -> None:
        super().__init__(engine_config)
        self._script = script
        self._runs = 0
        self._planned: dict[tuple[int, int], int] = {}

    def _propose(self, slot: _Slot, count: int) -> list[int]:
        if count == 0:
            return []
        num_right = self._script(self._runs) % (count + 1)
        self._runs += 1
        drafts = list(range(self._next_token + 1, self._next_token + 1 + count))
        self._next_token += count
        for offset, token in enumerate(drafts[:num_right]):
            self._planned[id(slot), len(slot.tokens) + offset] = token
        return drafts

    def _token(self, slot: _Slot, position: int) -> int:
        planned = self._planned.pop((id(slot), position), None)
        if planned is None:
            return super()._token(slot, position)
        self.emitted.setdefault(self._handle_of[id(slot)], []).append((position, planned))
        return planned


def turns(drive: Drive) -> Iterator[list[Event]]:
    """What happens turn by turn, if a step is scheduled whenever there is room and the oldest comes back when there isn't."""
    for _ in range(10_000):
        events = drive.schedule()
        if not events:
            if not drive.orders:
                return
            events = drive.complete()
        yield events
    raise AssertionError("no end")
