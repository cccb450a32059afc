"""Verification: what it counts, and what it catches."""

import sqlite3

import msgspec
import pytest

from refold.engine.history.replay import Contradiction
from refold.engine.history.verify import format_head, parse_head, verify_journal
from refold.journal.errors import JournalCorrupt, Rejected
from refold.journal.events import (
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    StateDigest,
    StepScheduled,
)
from refold.journal.stores import open_reader
from refold.scheduler.commands import RecordDigest
from refold.scheduler.state import digest
from tests.history.journals import eventful_lives, write_journal
from tests.kit.drive import Drive, config


def verify(path, expect=None):
    reader = open_reader(str(path))
    try:
        return verify_journal(reader, expect=expect)
    finally:
        reader.close()


def change(path, *statements):
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def the(lives, kind, nth=0):
    """Where the nth event of a kind is: life, record, index."""
    places = [
        (a, b, c)
        for a, life in enumerate(lives)
        for b, events in enumerate(life)
        for c, event in enumerate(events)
        if type(event) is kind
    ]
    return places[nth]


def test_a_clean_journal_is_counted_from_its_events(tmp_path):
    lives, drive = eventful_lives()
    head = write_journal(tmp_path / "j.db", lives)
    verdict = verify(tmp_path / "j.db")
    events = [event for life in lives for record in life for event in record]
    assert verdict.num_records == sum(map(len, lives)) == head.position
    assert verdict.num_events == len(events)
    assert verdict.num_engines == 2
    assert verdict.num_digests == 1
    assert verdict.totals.requests == 7
    assert sum(verdict.totals.finished.values()) == 7
    assert verdict.totals.tokens == sum(e.num_output_tokens for e in events if type(e) is RequestFinished)
    assert verdict.totals.lost_workers == 1
    assert verdict.totals.stale_tokens_delivered > 0
    assert verdict.head[:2] == head[:2]
    assert digest(verdict.state) == digest(drive.state)


def test_a_head_survives_being_printed():
    lives, _ = eventful_lives()
    head = parse_head("12:" + "ab" * 32)
    assert parse_head(format_head(head)) == head
    assert lives


@pytest.mark.parametrize(
    "text",
    ["", "12", "12:", ":" + "a" * 64, "12:" + "a" * 63, "x:" + "a" * 64, "-1:" + "a" * 64, "9" * 30 + ":" + "a" * 64],
)
def test_a_head_that_is_none_is_rejected(text):
    with pytest.raises(Rejected, match="POSITION:HASH"):
        parse_head(text)


def test_damage_is_found_where_it_is(tmp_path):
    lives, _ = eventful_lives()
    head = write_journal(tmp_path / "whole.db", lives)
    damages = {
        "edited": "UPDATE journal_records SET body = replace(body, 'req-2', 'req-X') WHERE position = 4",
        "deleted": "DELETE FROM journal_records WHERE position = 20",
    }
    for kind, statement in damages.items():
        path = tmp_path / f"{kind}.db"
        path.write_bytes((tmp_path / "whole.db").read_bytes())
        change(path, statement)
        with pytest.raises(JournalCorrupt) as caught:
            verify(path)
        assert caught.value.kind == kind
        assert caught.value.position == (4 if kind == "edited" else 20)
    assert head.position > 20


def test_a_cut_off_tail_is_found_by_whoever_remembers_a_head(tmp_path):
    lives, _ = eventful_lives()
    head = write_journal(tmp_path / "whole.db", lives)
    cut = [lives[0], lives[1][:-6]]
    write_journal(tmp_path / "cut.db", cut)
    assert verify(tmp_path / "cut.db").num_records == head.position - 6
    assert verify(tmp_path / "whole.db", expect=head).head[:2] == head[:2]
    with pytest.raises(JournalCorrupt) as caught:
        verify(tmp_path / "cut.db", expect=head)
    assert caught.value.kind == "truncated"
    assert caught.value.position == head.position - 6


def test_an_older_head_is_passed_through(tmp_path):
    lives, _ = eventful_lives()
    older = write_journal(tmp_path / "cut.db", [lives[0]])
    write_journal(tmp_path / "whole.db", lives)
    assert verify(tmp_path / "whole.db", expect=older).num_engines == 2


def _repeat_output(event):
    return msgspec.structs.replace(event, first_output_indices=[i + 1 for i in event.first_output_indices])


def _wrong_digest(event):
    return msgspec.structs.replace(event, digest="0" * 64)


def _too_many_tokens(event):
    return msgspec.structs.replace(event, num_tokens=[n + 100 for n in event.num_tokens])


def _reused_handle(event):
    return msgspec.structs.replace(event, handle=1)


@pytest.mark.parametrize(
    ("kind", "forge"),
    [
        (OutputDelivered, _repeat_output),
        (StateDigest, _wrong_digest),
        (StepScheduled, _too_many_tokens),
        (RequestSubmitted, _reused_handle),
    ],
)
def test_a_forged_event_under_an_honest_chain_is_a_violation_at_its_place(tmp_path, kind, forge):
    lives, _ = eventful_lives()
    life, record, index = the(lives, kind, -1)
    lives[life][record][index] = forge(lives[life][record][index])
    write_journal(tmp_path / "j.db", lives)
    with pytest.raises(Contradiction) as caught:
        verify(tmp_path / "j.db")
    assert caught.value.position == sum(map(len, lives[:life])) + record
    assert caught.value.index == index
    assert kind.__name__ in str(caught.value)
    if kind is StateDigest:
        assert caught.value.law == "L11"


def test_a_changed_token_under_an_honest_chain_breaks_the_next_digest(tmp_path):
    drive = Drive(config())
    drive.open()
    drive.submit("r", 5, max_tokens=6)
    for _ in range(3):
        drive.schedule()
        drive.complete()
    drive.do(RecordDigest())
    drive.run()
    _, record, index = the([drive.records], OutputDelivered)
    event = drive.records[record][index]
    drive.records[record][index] = msgspec.structs.replace(event, token_ids=[t ^ 1 for t in event.token_ids])
    write_journal(tmp_path / "j.db", [drive.records])
    with pytest.raises(Contradiction) as caught:
        verify(tmp_path / "j.db")
    assert caught.value.law == "L11"
    assert isinstance(drive.records[caught.value.position][0], StateDigest)
