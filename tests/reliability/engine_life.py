"""A whole engine on a journal under test: what its clients saw, held against the journal and against what must come out."""

import random
from collections.abc import Callable

from refold import Engine, SamplingParams
from refold.engine.engine import Delta
from refold.engine.history.verify import verify_journal
from refold.journal.codec import decode
from refold.journal.errors import JournalError
from refold.journal.stores import open_reader
from refold.projections.outbox import Outbox
from tests.kit.engines import MODEL, must_produce
from tests.reliability.drivers import Place
from tests.reliability.history import WrongState
from tests.reliability.judge import Tally

Seen = dict[str, list[int]]
_PROMPT = [1, 2, 3]
NUM_REQUESTS = 4


def sampling_of(number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=12 + 5 * number)


def live(place: Place, seen: Seen, during: Callable[[Delta], None] = lambda _: None) -> None:
    """Open the engine and see every request through; what is delivered is added to `seen`."""

    def note(delta: Delta) -> None:
        seen[delta.request_id][delta.index : delta.index + len(delta.token_ids)] = delta.token_ids
        during(delta)

    with Engine(MODEL, place.url, stream=place.stream, max_in_flight_steps=2) as engine:
        for number in range(NUM_REQUESTS):
            request_id = f"r{number}"
            seen.setdefault(request_id, [])
            if not _is_known(engine, request_id):
                engine.enqueue(_PROMPT, sampling_of(number), request_id=request_id)
        engine.wait([f"r{number}" for number in range(NUM_REQUESTS)], note)


def _is_known(engine: Engine, request_id: str) -> bool:
    from refold.journal.errors import NotFound

    try:
        engine.output(request_id) if hasattr(engine, "output") else engine._live().output(request_id)
    except NotFound:
        return False
    return True


def judge_engine(tally: Tally, place: Place, seen: Seen, what: str, *, is_over: bool) -> None:
    """Whole, lawful, and it holds whatever any client saw; with `is_over`, all that had to come out."""
    outbox = Outbox()
    try:
        reader = open_reader(place.url)
        try:
            verify_journal(reader, place.stream)
            for record in reader.read(place.stream):
                outbox.observe_all(decode(record))
        finally:
            reader.close()
    except JournalError as error:
        tally.blame("lost", f"{what}: the journal isn't whole any more: {error}")
        return
    except (WrongState, AssertionError) as error:
        tally.blame("wrong_state", f"{what}: {error}")
        return
    for number in range(NUM_REQUESTS):
        _judge_request(tally, outbox, f"r{number}", number, seen, what, is_over=is_over)


def _judge_request(
    tally: Tally, outbox: Outbox, request_id: str, number: int, seen: Seen, what: str, *, is_over: bool
) -> None:
    output = outbox.by_id.get(request_id)
    durable = output.token_ids if output else []
    delivered = seen.get(request_id, [])
    if delivered != durable[: len(delivered)]:
        tally.blame("lost", f"{what}: a client of {request_id} saw {len(delivered)} tokens, {len(durable)} are durable")
    if is_over and durable != must_produce(_PROMPT, sampling_of(number)):
        tally.blame("wrong_state", f"{what}: {request_id} came out otherwise")


def jumps(rng: random.Random) -> int:
    """A jump of the wall clock in ns: mostly back, by anything from a millisecond to a century."""
    size_s = 10 ** rng.uniform(-3, 9.5)
    return int(size_s * 1e9) * (-1 if rng.random() < 0.8 else 1)
