"""The history that every campaign writes: a lawful one, the same in every process, with the state's digest after each record.

A journal of a campaign holds a beginning of this history and nothing else. So whoever knows how many records it has knows
what each of them must say and what they must fold to, without asking any store.
"""

import random
from functools import cache

from refold.journal.codec import decode, encode
from refold.journal.events import Event
from refold.journal.record import Head, Record, head_after, seal
from refold.journal.store import JournalReader
from refold.journal.verify import read_verified
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State, digest
from tests.kit.drive import Drive, config

NUM_RECORDS = 360
_LONG_PROMPT_TOKENS = 1200  # a record of several pages of a SQLite file


def _driven(num_records: int) -> list[list[Event]]:
    rng = random.Random(4)
    pool = {"block_size": 16, "num_blocks": 96, "max_num_batched_tokens": 256, "max_model_len": 1500}
    drive = Drive(config(**pool), laws=False)
    drive.open()
    while len(drive.records) < num_records:
        number = len(drive.records)
        prompt = _LONG_PROMPT_TOKENS if number % 90 == 40 else rng.randint(1, 60)
        drive.submit(f"request-{number}-é€🙂", prompt, max_tokens=rng.randint(1, 12))
        for _ in range(rng.randint(1, 6)):
            drive.schedule()
            if drive.orders and rng.random() < 0.8:
                drive.complete()
        if rng.random() < 0.1 and (live := drive.state.requests.live()):
            drive.abort(rng.choice(live).request_id)
    return drive.records[:num_records]


@cache
def history() -> list[list[Event]]:
    """The events of record 0, 1, 2, ..."""
    return _driven(NUM_RECORDS)


@cache
def digests() -> list[str]:
    """`digests()[n]`: the digest of the state after the first n records, folded from memory."""
    state = State()
    found = [digest(state)]
    for events in history():
        fold_all(state, events)
        found.append(digest(state))
    return found


def next_records(head: Head, count: int, time_ns: int = 0) -> list[Record]:
    """The next `count` records of the history, at most to its end, chained to `head`."""
    records: list[Record] = []
    for events in history()[head.position : head.position + count]:
        records.append(sealed(head, time_ns, events))
        head = head_after(records[-1])
    return records


def sealed(head: Head, time_ns: int, events: list[Event]) -> Record:
    """The record of `events` at `head`, as the journal's writer makes it."""
    return seal(head, time_ns, *encode(events, salt=str(head.position)))


def check_says_the_history(reader: JournalReader, stream: str, remembered: Head) -> Head:
    """The stream is whole, passes through `remembered`, says the history and folds to its digest; returns its head.

    Raises:
        JournalError: it isn't whole, and the store or the verifier says so.
        WrongState: it passes for whole and isn't what was written.
    """
    state, head = State(), Head(0, bytes(32), 0)
    for record in read_verified(reader, stream, expect=remembered):
        events = decode(record)
        if record.position != head.position or events != history()[record.position]:
            raise WrongState(
                f"record {record.position} at place {head.position} passes for whole and says something else"
            )
        fold_all(state, events)
        head = head_after(record)
    if digest(state) != digests()[head.position]:
        raise WrongState(f"{head.position} records fold to another state than their events do in memory")
    return head


class WrongState(Exception):
    """What no fault may lead to: something passes for whole that isn't."""
