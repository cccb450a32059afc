"""What tests of the engine share: the outcome that a simulated request must have, journals read back, streams collected."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from refold.engine import submissions
from refold.engine.config import EngineArgs
from refold.engine.engine import Delta
from refold.engine.models import find_model
from refold.engine.sampling_params import SamplingParams
from refold.gpu.simulated import simulated_token
from refold.journal.codec import decode
from refold.journal.events import Event
from refold.journal.store import JournalReader
from refold.journal.verify import read_verified
from refold.projections.outbox import Outbox
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State

MODEL = "simulated?vocab=1000&eos=-1"


def must_produce(prompt: list[int], sampling: SamplingParams, model: str = MODEL) -> list[int]:
    """The tokens of a simulated request: a function of its seed and positions, whatever the schedule."""
    assert sampling.seed is not None, "without a seed nobody can know"
    config = EngineArgs(model=model).resolve(find_model(model))
    resolved = sampling.resolve(0, config.vocab_size)
    stops = {*resolved.stop_token_ids, *(() if resolved.ignore_eos else config.eos_token_ids)}
    tokens: list[int] = []
    for position in range(len(prompt), min(len(prompt) + sampling.max_tokens, config.max_model_len)):
        tokens.append(simulated_token(resolved, position, len(prompt), config))
        if tokens[-1] in stops and len(tokens) > sampling.min_tokens:
            break
    return tokens


def lawful_events(reader: JournalReader, stream: str = "main") -> list[Event]:
    """All events of a journal, its chain verified and every law checked after each."""
    state, book, events = State(), LawBook(), []
    for record in read_verified(reader, stream):
        for event in decode(record):
            fold(state, event)
            book.observe(state, event)
            events.append(event)
    return events


def durable_outputs(reader: JournalReader, stream: str = "main") -> Outbox:
    """What clients may have, by the journal."""
    outbox = Outbox()
    for record in read_verified(reader, stream):
        outbox.observe_all(decode(record))
    return outbox


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    """A stream to its end."""
    return [delta async for delta in deltas]


def joined(deltas: list[Delta], first: int = 0) -> list[int]:
    """The tokens of deltas that follow each other without gap or repeat from index `first` on."""
    tokens: list[int] = []
    for delta in deltas:
        assert delta.index == first + len(tokens), (delta.index, first, len(tokens))
        tokens += delta.token_ids
    return tokens


def eventually(holds: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)


async def becomes(holds: Callable[[], Any]) -> None:
    """`eventually`, in an event loop."""
    await asyncio.to_thread(eventually, holds)


@contextmanager
def older_rules_for_ids(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile engines take any id, as they did when a client could give one that looks like a completion's."""
    with monkeypatch.context() as patch:
        patch.setattr(submissions, "check_new_id", submissions.check_request_id)
        patch.setattr(submissions, "all_or_none", lambda asks, *_: list(asks))
        yield
