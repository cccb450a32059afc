"""Journals with one fault each, and what has to be said of it: the first bad position, and the class.

Three kinds. The bytes were touched: a row of the store isn't what was written. The facts were touched: somebody made records up
and sealed them, so that the chain holds. The engine was wrong: it ran under another configuration than it wrote down, or with a
planted fault in its scheduler. For these, the first bad position is found here by deciding the true commands again, which
`verify` doesn't have.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from refold.engine.history.rerun import Fact
from refold.journal.codec import encode
from refold.journal.events import (
    EngineConfig,
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StateDigest,
    StepScheduled,
)
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after, seal
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State
from tests.kit.faults import planted
from tests.kit.long_history import long_history

replace = msgspec.structs.replace


class Planted(NamedTuple):
    """A journal with a fault. `expect` is a head that somebody kept, `missing` where a record would be that isn't."""

    records: list[Record]
    position: int
    cause: str
    expect: Head | None = None
    missing: int | None = None


def sealed(facts: Sequence[Fact]) -> list[Record]:
    """The records of one life, chained."""
    head, records = EMPTY_HEAD._replace(engine_epoch=1), list[Record]()
    for fact in facts:
        records.append(seal(head, fact.time_ns, *encode(fact.events, "salt")))
        head = head_after(records[-1])
    return records


# -- the bytes --------------------------------------------------------------------------------------------------------


def row(which: int, **changes: Any) -> Callable[[list[Fact]], Planted]:
    """Fields of one row are something else."""

    def plant(facts: list[Fact]) -> Planted:
        records = sealed(facts)
        at = len(records) * which // 100
        values = {name: value(getattr(records[at], name)) for name, value in changes.items()}
        records[at] = records[at]._replace(**values)
        return Planted(records, at, "edited")

    return plant


def deleted(facts: list[Fact]) -> Planted:
    records = sealed(facts)
    at = len(records) // 3
    del records[at]
    return Planted(records, at, "deleted")


def swapped(facts: list[Fact]) -> Planted:
    records = sealed(facts)
    at = len(records) // 2
    one, other = records[at], records[at + 1]
    records[at], records[at + 1] = other._replace(position=at), one._replace(position=at + 1)
    return Planted(records, at, "reordered")


def doubled_row(facts: list[Fact]) -> Planted:
    records = sealed(facts)
    at = len(records) // 2
    records.insert(at + 1, records[at]._replace(position=at + 1))
    return Planted(records, at + 1, "inserted")


def cut_off(facts: list[Fact]) -> Planted:
    records = sealed(facts)
    head = head_after(records[-1])
    return Planted(records[:-7], len(records) - 7, "truncated", head)


def no_events(facts: list[Fact]) -> Planted:
    """A chain that holds, over something that is no list of events."""
    records = sealed(facts)
    at = len(records) // 2
    head = head_after(records[at - 1])
    records[at] = seal(head, records[at].time_ns, b'[{"type":"NoSuchEvent"}]')
    for i in range(at + 1, len(records)):
        records[i] = seal(head_after(records[i - 1]), records[i].time_ns, records[i].body, records[i].content or b"")
    return Planted(records, at, "undecodable")


# -- the facts --------------------------------------------------------------------------------------------------------


def nth(facts: Sequence[Fact], wanted: Callable[[Event], bool], share: float = 0.5) -> tuple[int, int]:
    """A record, and the place in it, of an event like that, about so far into the journal."""
    found = [(i, k) for i, fact in enumerate(facts) for k, event in enumerate(fact.events) if wanted(event)]
    assert found, "the history has no such event"
    return found[int(len(found) * share)]


def made_up(
    cause: str, wanted: Callable[[Event], bool], change: Callable[[Any], Event | list[Event] | None]
) -> Callable[[list[Fact]], Planted]:
    """One event is another, or isn't there; the chain is made anew."""

    def plant(facts: list[Fact]) -> Planted:
        at, which = nth(facts, wanted)
        events = list(facts[at].events)
        made = change(events[which])
        events[which : which + 1] = made if isinstance(made, list) else [] if made is None else [made]
        changed = [*facts[:at], facts[at]._replace(events=events), *facts[at + 1 :]]
        return Planted(sealed(changed), at, cause)

    return plant


def lost(wanted: Callable[[Event], bool]) -> Callable[[list[Fact]], Planted]:
    """A whole record is lost, and the chain made anew; noticed at the first record that doesn't follow any more."""

    def plant(facts: list[Fact]) -> Planted:
        at, _ = nth(facts, wanted)
        left = [*facts[:at], *facts[at + 1 :]]
        opened = next(e for e in facts[0].events if isinstance(e, EngineOpened))
        return Planted(sealed(left), first_otherwise(left, opened.config), "lost-event", missing=at)

    return plant


def is_(kind: type[Event], condition: Callable[[Any], object] = lambda _: True) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, kind) and bool(condition(event))


def other_block(event: StepScheduled) -> Event:
    """The first block that is allocated is one that somebody has."""
    first = event.allocations[0]
    taken = [first.block_ids[0] ^ 1, *first.block_ids[1:]]
    return replace(event, allocations=[replace(first, block_ids=taken), *event.allocations[1:]])


def another_hit(event: StepScheduled) -> Event:
    """A request that shares a prefix shares less of it."""
    admissions = [replace(a, hit_block_ids=a.hit_block_ids[:-1]) if a.hit_block_ids else a for a in event.admissions]
    return replace(event, admissions=admissions)


def first_column(field: str, change: Callable[[Any], Any]) -> Callable[[Any], Event]:
    """The first place of a column is another."""

    def changed(event: Any) -> Event:
        column = list(getattr(event, field))
        column[0] = change(column[0])
        made: Event = replace(event, **{field: column})
        return made

    return changed


# -- the engine -------------------------------------------------------------------------------------------------------


def first_otherwise(facts: Sequence[Fact], opened: EngineConfig) -> int:
    """The first record that the true command doesn't lead to, under this configuration and with this code."""
    state = State()
    for position, fact in enumerate(facts):
        if position:
            try:
                again = decide(state, fact.command)
            except Exception:  # noqa: BLE001 - refused is otherwise, too
                return position
            if again != fact.events:
                return position
        try:
            fold_all(state, [replace(e, config=opened) if isinstance(e, EngineOpened) else e for e in fact.events])
        except Exception:  # noqa: BLE001 - it doesn't follow
            return position
    raise AssertionError("today's code decides all of it")


def drifted(wrote: dict[str, Any], ran: dict[str, Any]) -> Callable[[list[Fact]], Planted]:
    """The engine wrote one configuration down and ran under another."""

    def plant(_: list[Fact]) -> Planted:
        facts = list(long_history(20_000, 16, **ran))
        event = facts[0].events[0]
        assert isinstance(event, EngineOpened)
        config = replace(event.config, **wrote)
        told = [facts[0]._replace(events=[replace(event, config=config)]), *facts[1:]]
        told = [f._replace(events=[e for e in f.events if not isinstance(e, StateDigest)] or f.events) for f in told]
        told = [f for f in told if not isinstance(f.events[0], StateDigest)]
        return Planted(sealed(told), first_otherwise(told, config), "config-drift")

    return plant


def by_a_faulty_engine(fault: str, cause: str) -> Callable[[list[Fact]], Planted]:
    """The scheduler had a fault when this was recorded."""

    def plant(_: list[Fact]) -> Planted:
        with planted(fault):
            facts = list(long_history(20_000, 16))
        told = [f for f in facts if not isinstance(f.events[0], StateDigest)]
        config = next(e.config for e in facts[0].events if isinstance(e, EngineOpened))
        return Planted(sealed(told), first_otherwise(told, config), cause)

    return plant


def _shorter(event: OutputDelivered) -> Event:
    return replace(event, first_output_indices=[event.first_output_indices[0] + 1, *event.first_output_indices[1:]])


PLANTED: dict[str, Callable[[list[Fact]], Planted]] = {
    # the bytes
    "a digit of a body": row(30, body=lambda body: body.replace(b"1", b"2", 1)),
    "a record's time": row(55, time_ns=lambda time_ns: time_ns + 1),
    "a record's epoch": row(70, engine_epoch=lambda epoch: epoch + 1),
    "a row deleted": deleted,
    "two rows swapped": swapped,
    "a row twice": doubled_row,
    "the tail cut off": cut_off,
    "no events in it": no_events,
    # the facts
    "a step lost": lost(is_(StepScheduled)),
    "an output lost": lost(is_(OutputDelivered)),
    "a submission lost": lost(is_(RequestSubmitted)),
    "an output twice": made_up("output", is_(OutputDelivered), lambda e: [e, e]),
    "a preemption untold": made_up("lost-event", is_(RequestPreempted), lambda _: None),
    "another victim's policy": made_up(
        "stale", is_(RequestPreempted, lambda e: e.num_stale_output_tokens), lambda e: replace(e, stale_policy="drop")
    ),
    "stale tokens miscounted": made_up(
        "stale", is_(RequestPreempted), lambda e: replace(e, num_stale_output_tokens=e.num_stale_output_tokens + 1)
    ),
    "stale output thrown away": made_up(
        "stale", is_(StaleOutputConsumed, lambda e: e.delivered[0]), first_column("delivered", lambda _: False)
    ),
    "a block that is taken": made_up("cache", is_(StepScheduled, lambda e: e.allocations), other_block),
    "a prefix shared in part": made_up(
        "cache", is_(StepScheduled, lambda e: any(a.hit_block_ids for a in e.admissions)), another_hit
    ),
    "a block evicted that wasn't": made_up(
        "cache",
        is_(StepScheduled, lambda e: e.allocations),
        lambda e: replace(e, evicted_block_ids=[*e.evicted_block_ids, 0]),
    ),
    "an entry of another size": made_up("schedule", is_(StepScheduled), first_column("num_tokens", lambda n: n + 1)),
    "a request at another position": made_up(
        "schedule", is_(StepScheduled), first_column("first_positions", lambda p: p + 1)
    ),
    "an output index too far": made_up("lost-event", is_(OutputDelivered, lambda e: e.handles), _shorter),
    "an end that was none": made_up(
        "output", is_(RequestFinished, lambda e: e.reason == "length"), lambda e: replace(e, reason="stop")
    ),
    "an end with fewer outputs": made_up(
        "output",
        is_(RequestFinished, lambda e: e.reason == "length"),
        lambda e: replace(e, num_output_tokens=e.num_output_tokens - 1),
    ),
    "a wrong digest": made_up("digest", is_(StateDigest), lambda _: StateDigest(digest="f" * 64)),
    # the engine
    "another budget": drifted({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 64}),
    "other seats": drifted({"max_num_seqs": 16}, {"max_num_seqs": 12}),
    "another policy": drifted({"policy": "fcfs"}, {"policy": "priority"}),
    "another window": drifted({"max_in_flight_steps": 2}, {"max_in_flight_steps": 4}),
    "another cap on prefill": drifted({"long_prefill_token_threshold": 0}, {"long_prefill_token_threshold": 16}),
    "a watermark": drifted({"watermark_blocks": 0}, {"watermark_blocks": 3}),
    "a scheduler that drops what is valid": by_a_faulty_engine("pressure_drops", "stale"),
    "a scheduler that evicts the most recent": by_a_faulty_engine("most_recent_first", "cache"),
    "a scheduler that lets in while it preempts": by_a_faulty_engine("admission_after_preemption", "schedule"),
}


def parts_at(name: str, planted: Planted) -> tuple[int, set[str]] | None:
    """Where `diff` has to say that the true journal and this one part, and as which class; None if there's no true one.

    It sees the place itself, where `verify` may see only what comes of it; and what differs there, where `verify` may see what
    isn't told.
    """
    plant = PLANTED[name]
    if plant.__qualname__.startswith(("drifted", "by_a_faulty")):
        return None
    if plant.__qualname__.startswith("lost"):
        assert planted.missing is not None
        return planted.missing, {"lost-event"}
    classes = {"an output index too far": {"output"}, "no events in it": {"undecodable", "edited"}}
    return planted.position, classes.get(name, {planted.cause})
