"""A long history for tests and benchmarks: a busy service in virtual time, written through a real store.

    python -m tests.kit.long_history FILE [--request-events 1000000] [--width 128]

A request-event is one request's part in one event: a step of 128 requests is 128 of them. Requests arrive at random and share
some prefixes; the pool is short enough that some are preempted, with output in flight. The seed fixes every byte.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from refold import migrations
from refold.engine.history.rerun import Arrival, Fact, LinearTiming, Rerun
from refold.gpu.simulated import simulated_token
from refold.journal.codec import encode
from refold.journal.events import EngineConfig, Event, Sampling
from refold.journal.record import Head, head_after, seal
from refold.journal.stores import open_store
from refold.projections.requests import Request
from refold.scheduler.commands import AbortRequest, CloseEngine, RecordDigest, SubmitRequest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State
from tests.kit.drive import config

START_NS = 1_790_000_000_000_000_000
DIGEST_EVERY = 256
RECORDS_PER_APPEND = 512


class SeededOracle:
    """Tokens that follow from each request's seed and the position: the simulated worker's."""

    def __init__(self, token: Callable[[Request, int], int]) -> None:
        self._token = token

    def token(self, request: Request, position: int) -> int:
        """See `Oracle`."""
        return self._token(request, position)

    def num_accepted(self, request: Request, position: int, drafts: list[int] | None, num_drafts: int) -> int:
        """Own drafts are right two times in three; given ones are compared."""
        if drafts is None:
            return num_drafts * 2 // 3
        right = 0
        with suppress(IndexError):
            while drafts[right] == self._token(request, position + right):
                right += 1
        return right


def service_config(width: int, **changes: object) -> EngineConfig:
    """A service that runs `width` requests at once, a little short of blocks."""
    usual: dict[str, object] = {
        "vocab_size": 50_000,
        "eos_token_ids": (2,),
        "max_model_len": 2048,
        "block_size": 16,
        "num_blocks": width * 6,
        "max_num_seqs": width,
        "max_num_batched_tokens": max(512, 2 * width),
        "max_in_flight_steps": 2,
    }
    return config(**(usual | changes))


def arrivals(width: int, seed: int, gap_ns: int) -> Iterator[Arrival]:
    """Requests without end, at random moments; one in fifty is aborted a little later."""
    rng, now_ns, number = random.Random(seed), START_NS, 0
    shared = [[rng.randrange(3, 50_000) for _ in range(48)] for _ in range(8)]
    while True:
        now_ns += int(rng.expovariate(1 / gap_ns)) + 1
        prompt = list(rng.choice(shared)) if rng.random() < 0.3 else []
        prompt += [rng.randrange(3, 50_000) for _ in range(rng.randrange(8, 60))]
        sampling = Sampling(seed=number, max_tokens=rng.randrange(24, 160), ignore_eos=True)
        yield Arrival(
            now_ns,
            SubmitRequest(
                request_id=f"req-{number}",
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_ns=now_ns,
                priority=rng.randrange(3),
                tenant=rng.choice("abc"),
            ),
        )
        if rng.random() < 0.02:
            now_ns += gap_ns
            yield Arrival(now_ns, AbortRequest(request_id=f"req-{number}"))
        number += 1


def num_request_events(events: list[Event]) -> int:
    """How many requests' parts there are in these events; an event that names none counts as one."""
    return sum(len(getattr(event, "handles", ())) or 1 for event in events)


def long_history(
    request_events: int, width: int = 128, seed: int = 1, load: float = 0.98, **changes: object
) -> Iterator[Fact]:
    """The records of a service with at least `request_events` of them, to the end of what came in by then."""
    cfg = service_config(width, **changes)
    step_ns, token_ns = 15_000_000, 10_000
    run = Rerun(
        State(),
        START_NS,
        LinearTiming(step_ns, token_ns),
        SeededOracle(lambda r, position: simulated_token(r.sampling, position, r.num_prompt_tokens, cfg)),
    )
    gap_ns = int((step_ns + token_ns * width) * 92 / width / load)
    told, since_digest = 0, 0

    def while_wanted() -> Iterator[Arrival]:
        for arrival in arrivals(width, seed, gap_ns):
            if told >= request_events:
                return
            yield arrival

    for facts in (run.open(cfg), run.facts(while_wanted())):
        for fact in facts:
            told += num_request_events(fact.events)
            yield fact
            since_digest += 1
            if since_digest >= DIGEST_EVERY:
                since_digest = 0
                yield _obeyed(run, RecordDigest())
    yield _obeyed(run, RecordDigest())
    yield _obeyed(run, CloseEngine(reason="closed"))


def _obeyed(run: Rerun, command: RecordDigest | CloseEngine) -> Fact:
    events = decide(run.state, command)
    fold_all(run.state, events)
    return Fact(run.now_ns, command, events)


def write_long_history(url: str, request_events: int, width: int = 128, **options: object) -> Head:
    """Write such a history as one life of an engine."""
    migrations.ensure(url)
    store = open_store(url)
    head = store.open_stream()
    waiting = []
    for fact in long_history(request_events, width, **options):  # type: ignore[arg-type]
        waiting.append(seal(head, fact.time_ns, *encode(fact.events)))
        head = head_after(waiting[-1])
        if len(waiting) >= RECORDS_PER_APPEND:
            store.append("main", waiting)
            waiting = []
    head = store.append("main", waiting) if waiting else head
    store.close()
    return head


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal")
    parser.add_argument("--request-events", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    head = write_long_history(options.journal, options.request_events, options.width)
    sys.stdout.write(f"{head.position:,} records in {options.journal}\n")


if __name__ == "__main__":
    main()
