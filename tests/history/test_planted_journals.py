"""A journal with one fault: verify names its first bad position and its class, and diff where it parts from the true one."""

import os
import time

import pytest

from refold.engine.history.compare import compare
from refold.engine.history.replay import Contradiction
from refold.engine.history.verify import verify_journal
from refold.journal.errors import JournalCorrupt
from tests.history.planted_journals import PLANTED, parts_at, sealed
from tests.history.readers import ListReader
from tests.kit.long_history import long_history, num_request_events

NUM_REQUEST_EVENTS = int(os.environ.get("REFOLD_PLANTED_EVENTS", "20000"))
MAX_S = 10.0


@pytest.fixture(scope="module")
def facts():
    return list(long_history(NUM_REQUEST_EVENTS, 32))


def test_the_table_is_long_enough(facts):
    assert len(PLANTED) >= 30
    assert sum(num_request_events(fact.events) for fact in facts) >= NUM_REQUEST_EVENTS


def test_the_true_history_is_clean(facts):
    verdict = verify_journal(ListReader(sealed(facts)), redecide=True)
    assert verdict.num_decided == len(facts)
    assert verdict.num_forgotten == 0


@pytest.mark.parametrize("name", PLANTED)
def test_the_first_bad_position_and_its_class_are_named(facts, name):
    planted = PLANTED[name](facts)
    began_s = time.process_time()
    with pytest.raises((JournalCorrupt, Contradiction)) as caught:
        verify_journal(ListReader(planted.records), expect=planted.expect, redecide=True)
    spent_s = time.process_time() - began_s
    error = caught.value
    cause = error.cause.kind if isinstance(error, Contradiction) else error.kind
    assert (error.position, cause) == (planted.position, planted.cause), str(error)
    assert spent_s < MAX_S
    expected = parts_at(name, planted)
    if expected is not None:
        found = compare(ListReader(sealed(facts)), ListReader(planted.records))
        assert found.parting is not None
        assert found.parting.position == expected[0]
        assert found.parting.cause in expected[1]


def test_diff_finds_copies_by_their_hashes(facts):
    records = sealed(facts)
    found = compare(ListReader(records), ListReader(records[:-1]))
    assert (found.parting.kind, found.parting.position) == ("length", len(records) - 1)
    assert found.num_copied == len(records) - 1


def test_a_record_that_was_edited_under_its_hash_is_no_copy(facts):
    """The hash that it has kept is that of what it was: nobody may take the hash's word for it."""
    records = sealed(facts)
    edited = [*records[:40], records[40]._replace(body=records[40].body.replace(b"1", b"2", 1)), *records[41:]]
    for left, right, side in ((records, edited, "right"), (edited, records, "left")):
        parting = compare(ListReader(left), ListReader(right)).parting
        assert (parting.kind, parting.position, parting.cause) == ("bytes", 40, "edited")
        assert parting.words.startswith(f"of the {side} journal, record 40")
        assert parting.differences, "what it says now and what it said are both there"
