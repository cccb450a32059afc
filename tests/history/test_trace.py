"""The trace, checked by its schema and its nesting: the trace processor itself isn't part of the tests."""

import io
from collections import defaultdict
from itertools import pairwise
from typing import Literal

import msgspec
import pytest

from refold.engine.history.replay import replay
from refold.engine.history.trace import COUNTERS, REQUESTS, WORKER, write_trace
from refold.journal.codec import decode
from refold.journal.events import OutputDelivered, RequestPreempted, RequestSubmitted, StaleOutputConsumed
from tests.history.journals import eventful_lives, sealed
from tests.history.planted_journals import sealed as sealed_facts
from tests.history.readers import ListReader
from tests.kit.long_history import long_history
from tests.kit.simulation import Simulation


class Row(msgspec.Struct, forbid_unknown_fields=True):
    """An event of Chrome's trace format, as far as we write it."""

    ph: Literal["M", "X", "i", "C", "s", "f"]
    name: str
    pid: int
    tid: int
    ts: float | None = None
    dur: float | None = None
    args: dict[str, object] | None = None
    cat: str | None = None
    id: int | None = None
    s: Literal["t", "p", "g"] | None = None
    bp: Literal["e"] | None = None


class Trace(msgspec.Struct, forbid_unknown_fields=True):
    """The file."""

    displayTimeUnit: Literal["ms", "ns"]  # noqa: N815 - the format's name
    traceEvents: list[Row]  # noqa: N815


def traced(records) -> list[Row]:
    target = io.StringIO()
    count = write_trace(replay(ListReader(records)), target)
    rows = msgspec.json.decode(target.getvalue(), type=Trace).traceEvents
    assert len(rows) == count
    return rows


def a_journal(name):
    """An eventful one, a busy one, or a simulated life of this seed."""
    if name == "eventful":
        return sealed(eventful_lives()[0])
    if name == "busy":
        return sealed_facts(list(long_history(10_000, 8)))
    simulation = Simulation(int(name.removeprefix("seed ")))
    simulation.play()
    return sealed([simulation.drive.records])


@pytest.mark.parametrize("name", ["eventful", "busy", *(f"seed {seed}" for seed in range(6))])
def test_slices_of_a_track_never_overlap(name):
    tracks = defaultdict(list)
    for row in traced(a_journal(name)):
        assert row.ph == "M" or row.ts is not None
        if row.ph == "X":
            assert row.dur is not None
            assert row.dur >= 0
            tracks[row.pid, row.tid].append((row.ts, row.ts + row.dur, row.name))
    assert tracks
    for track, slices in tracks.items():
        slices.sort(key=lambda s: (s[0], s[1]))
        for one, other in pairwise(slices):
            assert one[1] <= other[0] + 1e-6, (track, one, other)


@pytest.fixture(scope="module")
def records():
    lives, _ = eventful_lives()
    return sealed(lives)


def test_every_request_has_a_track_with_its_name(records):
    asked = {e.handle: e.request_id for r in records for e in decode(r) if isinstance(e, RequestSubmitted)}
    named = {row.tid: row.args["name"] for row in traced(records) if row.name == "thread_name" and row.pid == REQUESTS}
    assert named == asked


def test_every_step_that_came_back_is_a_slice_of_the_worker(records):
    steps = {e.step for r in records for e in decode(r) if isinstance(e, OutputDelivered | StaleOutputConsumed)}
    slices = {int(row.name.split()[1]) for row in traced(records) if row.pid == WORKER and row.name.startswith("step ")}
    assert slices == steps


def test_each_preemption_flows_to_where_the_request_came_in_again(records):
    rows = traced(records)
    begun = {row.id: row for row in rows if row.ph == "s"}
    ended = {row.id: row for row in rows if row.ph == "f"}
    preempted = [e for r in records for e in decode(r) if isinstance(e, RequestPreempted)]
    assert len(begun) == len(preempted)
    assert ended.keys() <= begun.keys()
    assert ended
    slices = [row for row in rows if row.ph == "X" and row.pid == REQUESTS]
    for number, end in ended.items():
        begin = begun[number]
        assert (begin.tid, begin.cat) == (end.tid, end.cat)
        assert begin.ts <= end.ts
        for point, name in ((begin, "preempted"), (end, "running")):
            assert any(s.name == name and s.tid == point.tid and s.ts <= point.ts <= s.ts + s.dur for s in slices), (
                "a flow binds to a slice"
            )


def test_counters_are_those_of_the_fold(records):
    last = {}
    for row in traced(records):
        if row.ph == "C":
            assert row.pid == COUNTERS
            last[row.name] = row.args
    assert last["KV blocks"] == {"owned": 0, "fenced": 0, "cached": last["KV blocks"]["cached"]}
    assert last["requests"] == {"running": 0, "waiting": 0}
    assert last["tokens in flight"] == {"current": 0, "stale": 0}


def test_times_go_forward_whatever_the_clock_did(records):
    back = [record._replace(time_ns=record.time_ns - 10**9 * (i % 3)) for i, record in enumerate(records)]
    lives = [[decode(record) for record in back]]
    rows = traced(sealed(lives, tick_ns=-1000))
    assert all(row.dur >= 0 for row in rows if row.ph == "X")
