"""Redaction: what one request said is gone, everything else is there, checked and provable."""

import json

import pytest

from refold.engine.history.redaction import RedactionPlan, erased_of
from refold.engine.history.replay import Contradiction
from refold.engine.history.verify import verify_journal
from refold.journal.codec import columns_of, decode, encode
from refold.journal.errors import JournalCorrupt, NotFound, Rejected
from refold.journal.events import ContentRedacted, RequestSubmitted, StateDigest, StepScheduled
from refold.journal.record import EMPTY_HEAD, content_digest, has_whole_content, head_after, seal
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.verify import verified, verify_stream
from refold.scheduler.commands import CloseSession, RecordDigest, RedactContent
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import State, digest
from tests.history.journals import eventful_lives, sealed
from tests.kit.drive import Drive, config
from tests.kit.redacted import RedactedLife
from tests.kit.simulation import SHARED_PROMPT

SEEDS = range(16)


def stored(lives):
    journal, records = MemoryJournal(), sealed(lives)
    journal.records["main"] = list(records)
    journal.heads["main"] = head_after(records[-1])
    return MemoryStore(journal)


def redact(store, request_id, reason="asked"):
    plan = RedactionPlan(request_id)
    plan.follow(store.read())
    command = plan.command(reason)
    head = store.open_stream()
    record = seal(head, 5, *encode(decide(plan.state, command)))
    store.erase_content("main", [record], plan.contents)
    return plan


@pytest.fixture
def lives():
    return eventful_lives()[0]


@pytest.fixture
def store(lives):
    return stored(lives)


def handle_of(store, request_id):
    events = [event for record in store.read() for event in decode(record)]
    return next(e.handle for e in events if isinstance(e, RequestSubmitted) and e.request_id == request_id)


# -- what goes and what stays -----------------------------------------------------------------------------------------


def test_every_token_of_the_request_is_gone_and_no_other(store):
    before = [decode(record) for record in store.read()]
    handle = handle_of(store, "req-2")
    redact(store, "req-2")
    *records, said = store.read()
    lost = 0
    for events, record in zip(before, records, strict=True):
        assert erased_of(decode(record)) <= {handle}
        for old, new in zip(events, decode(record), strict=True):
            lost += old != new and not isinstance(old, StateDigest)
            assert type(old) is type(new)
    assert lost >= 10
    (event,) = decode(said)
    assert isinstance(event, ContentRedacted)
    assert (event.handles, event.reason) == ([handle], "asked")
    assert event.positions == [r.position for r in records if not has_whole_content(r)]


def test_a_step_keeps_the_tokens_of_the_others(store):
    before = {record.position: columns_of(record.content) for record in store.read()}
    plan = redact(store, "req-1")
    partial = {p: columns_of(left) for p, left in plan.contents.items() if left is not None}
    assert partial
    for position, columns in partial.items():
        for old, new in zip(before[position], columns, strict=True):
            if isinstance(new, list):
                assert any(token is not None for token in new)
                assert [o for o, n in zip(old, new, strict=True) if n is not None] == [t for t in new if t is not None]


def test_each_content_that_is_left_has_a_salt_of_its_own(store):
    plan = redact(store, "req-1")
    salts = [json.loads(left)[0] for left in plan.contents.values() if left is not None]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 16 for salt in salts)


def test_the_chain_is_as_valid_as_before(store):
    head = store.head()
    redact(store, "req-0")
    assert verify_stream(store, expect=head).position == head.position + 1


def test_everybody_can_be_redacted_one_after_the_other(store):
    ids = [f"req-{i}" for i in range(6)] + ["late"]
    for number, request_id in enumerate(ids, 1):
        redact(store, request_id)
        verdict = verify_journal(store)
        assert verdict.num_redacted_requests == number
    *records, _ = store.read()
    said = [record for record in records if record.content_hash != content_digest(b"")]
    assert all(record.content is None for record in said)


def test_the_verdict_counts_what_can_not_be_checked(store):
    clean = verify_journal(store)
    assert (clean.num_redacted_records, clean.num_erased_digests) == (0, 0)
    plan = redact(store, "req-0")
    verdict = verify_journal(store)
    assert verdict.num_redacted_records == len(plan.contents)
    assert verdict.totals.tokens == clean.totals.tokens
    assert verdict.laws == clean.laws
    assert verdict.num_digests == clean.num_digests


# -- the fold ---------------------------------------------------------------------------------------------------------


def test_whoever_folds_the_redacted_journal_comes_to_the_state_of_the_engine_that_lived():
    """Each life records a digest after each redaction: the engine's own, which knew the tokens."""
    num_redacted = num_checked = 0
    for seed in SEEDS:
        life = RedactedLife(seed, rate=0.3)
        life.play()
        life.save()
        verdict = verify_journal(life.store)
        assert verdict.num_redacted_requests == len(life.redacted), seed
        assert digest(verdict.state) == digest(life.drive.state), seed
        assert not verdict.state.unknown, seed
        num_redacted += len(life.redacted)
        num_checked += verdict.num_digests - verdict.num_erased_digests
    assert num_redacted > 100
    assert num_checked > 20


def test_a_prefix_that_was_shared_with_the_redacted_request_stays_shared():
    """The later request hits blocks that the redacted one computed; of their tokens, the journal has its own copy."""
    drive = Drive(config(num_blocks=24, max_num_seqs=2, max_num_batched_tokens=32, block_size=4))
    drive.open()
    drive.submit("first", SHARED_PROMPT, max_tokens=4)
    drive.run()
    drive.submit("second", SHARED_PROMPT, max_tokens=8)
    drive.schedule()
    hits = [a.hit_block_ids for e in drive.records[-1] for a in e.admissions]
    assert len(hits[0]) >= 4
    store = stored([drive.records])
    redact(store, "first")
    verdict = verify_journal(store)
    running = verdict.state.requests.find_live("second")
    assert list(running.tokens[: len(SHARED_PROMPT)]) == SHARED_PROMPT
    assert running.block_ids[: len(hits[0])] == hits[0]


def redact_live(drive, request_id):
    """Redact in a life that goes on, and record what its engine's state hashes to; returns the store."""
    store = stored([drive.records])
    plan = RedactionPlan(request_id)
    plan.follow(store.read())
    events = drive.do(plan.command(""))
    head = store.open_stream()
    store.erase_content("main", [seal(head, 5, *encode(events))], plan.contents)
    head = store.open_stream()
    store.append("main", [seal(head, 6, *encode(drive.do(RecordDigest())))])
    return store


def test_a_block_that_was_blank_for_being_a_duplicate_is_none_without_its_twin():
    """Two requests compute the same last block. Without the tokens of one, the other's is the first of its kind."""
    drive = Drive(config(num_blocks=24, max_num_seqs=2, max_num_batched_tokens=64, block_size=4))
    drive.open()
    drive.submit("first", SHARED_PROMPT[:16], max_tokens=1)
    drive.submit("twin", SHARED_PROMPT[:16], max_tokens=1)
    drive.run()
    verify_journal(redact_live(drive, "first"))


def test_a_block_that_was_shared_and_that_the_placeholders_know_nothing_of():
    """The twin of an evicted block stays owned: with placeholders it has the hash, and a third one can't, who is hit."""
    drive = Drive(config(num_blocks=12, max_num_seqs=2, max_num_batched_tokens=64, block_size=4, max_in_flight_steps=1))
    drive.open()
    drive.submit("first", SHARED_PROMPT[:16], max_tokens=1)
    drive.submit("twin", SHARED_PROMPT[:16], max_tokens=14, ignore_eos=True)
    for _ in range(2):
        drive.schedule()
        drive.complete()
    drive.submit("evicts", [3] * 25, max_tokens=1)
    while drive.state.requests.find_live("evicts"):
        drive.schedule()
        drive.complete()
    for request_id, length in (("third", 16), ("hits", 20)):
        drive.submit(request_id, SHARED_PROMPT[:length], max_tokens=1)
        drive.schedule()
        admissions = [a for e in drive.records[-1] if isinstance(e, StepScheduled) for a in e.admissions]
        drive.complete()
        while drive.state.requests.find_live(request_id):
            drive.schedule()
            drive.complete()
    assert [len(a.hit_block_ids) for a in admissions] == [4]
    assert drive.state.requests.find_live("twin")
    verify_journal(redact_live(drive, "first"))


def test_after_a_redaction_the_prefix_is_computed_anew():
    drive = Drive(config(num_blocks=24, max_num_seqs=2, max_num_batched_tokens=32, block_size=4))
    drive.open()
    drive.submit("first", SHARED_PROMPT, max_tokens=4)
    drive.run()
    plan = RedactionPlan("first")
    plan.follow(stored([drive.records]).read())
    drive.do(plan.command(""))
    drive.submit("second", SHARED_PROMPT, max_tokens=4)
    drive.schedule()
    assert not any(a.hit_block_ids for e in drive.records[-1] for a in e.admissions)


def test_a_digest_that_the_redacted_journal_has_stays_and_one_that_it_has_not_goes():
    drive = Drive(config())
    drive.open()
    drive.do(RecordDigest())
    drive.submit("a", 20, max_tokens=6)
    drive.schedule()
    drive.do(RecordDigest())
    drive.complete()
    drive.run()
    store = stored([drive.records])
    redact(store, "a")
    digests = [e.digest for record in store.read() for e in decode(record) if isinstance(e, StateDigest)]
    assert [bool(text) for text in digests] == [True, False]


# -- what is refused --------------------------------------------------------------------------------------------------


def plan_of(drive, request_id):
    plan = RedactionPlan(request_id)
    plan.follow(stored([drive.records]).read())
    return plan


def test_a_request_that_is_not_over_is_refused():
    drive = Drive(config())
    drive.open()
    drive.submit("a", 20, max_tokens=6)
    with pytest.raises(Rejected, match="'a' is waiting: abort it or wait"):
        plan_of(drive, "a").command("")
    drive.schedule()
    with pytest.raises(Rejected, match="'a' is running"):
        plan_of(drive, "a").command("")
    drive.abort("a")
    with pytest.raises(Rejected, match="16 of its tokens are in flight"):
        plan_of(drive, "a").command("")
    drive.complete()
    plan_of(drive, "a").command("")


def test_a_session_is_over_when_it_is_closed():
    drive = Drive(config())
    drive.open()
    drive.submit("s", 8, max_tokens=2, resumable=True)
    for _ in range(4):
        drive.schedule()
        if drive.orders:
            drive.complete()
    with pytest.raises(Rejected, match="'s' is idle"):
        plan_of(drive, "s").command("")
    drive.do(CloseSession(request_id="s"))
    plan_of(drive, "s").command("")


def test_nobody_and_nothing_are_refused(store):
    plan = RedactionPlan("nobody")
    plan.follow(store.read())
    with pytest.raises(NotFound, match="no request 'nobody'"):
        plan.command("")
    redact(store, "req-1")
    again = RedactionPlan("req-1")
    again.follow(store.read())
    with pytest.raises(Rejected, match="redacted before"):
        again.command("")


def test_an_engine_that_scheduled_it_meanwhile_refuses():
    drive = Drive(config())
    drive.open()
    drive.submit("a", 20, max_tokens=6)
    with pytest.raises(Rejected, match="'a' is waiting"):
        drive.do(RedactContent(handles=[1], positions=[], content_hashes=[]))
    with pytest.raises(Rejected, match="no request has handle 7"):
        drive.do(RedactContent(handles=[7], positions=[], content_hashes=[]))


def test_a_journal_that_contradicts_itself_is_left_alone():
    drive = Drive(config())
    drive.open()
    drive.submit("a", 20, max_tokens=6)
    drive.run()
    store = stored([[*drive.records, [StateDigest(digest="0" * 64)]]])
    with pytest.raises(Contradiction, match="nothing was redacted"):
        redact(store, "a")
    assert all(has_whole_content(record) for record in store.read())


def test_words_of_schema_1_are_refused(monkeypatch):
    drive = Drive(config())
    drive.open()
    drive.submit("a", 20, max_tokens=6)
    drive.run()
    import msgspec

    from refold.journal.record import Record, chain_hash

    head, records = EMPTY_HEAD._replace(engine_epoch=1), []
    for events in drive.records:
        body = msgspec.json.encode(events)
        hashed = chain_hash(head.hash, head.position, 1, 1, 0, body, b"")
        records.append(Record(head.position, 1, 1, 0, body, b"", b"", hashed))
        head = head_after(records[-1])
    plan = RedactionPlan("a")
    plan.follow(verified(records))
    with pytest.raises(Rejected, match="schema version 1"):
        plan.command("")


# -- what a forger can do ---------------------------------------------------------------------------------------------


def kind_of(store):
    with pytest.raises(JournalCorrupt) as caught:
        verify_journal(store)
    return caught.value.position, caught.value.kind


def swap(store, position, **changes):
    records = store._journal.records["main"]
    records[position] = records[position]._replace(**changes)


def with_content(store):
    return [r.position for r in store.read() if r.content and len(r.content) > 20]


def test_an_erased_content_without_a_record_that_says_so(store):
    position = with_content(store)[3]
    swap(store, position, content=None)
    assert kind_of(store) == (position, "erased")


def test_a_changed_content(store):
    position = with_content(store)[3]
    content = list(store.read())[position].content
    swap(store, position, content=content.replace(b",", b", ", 1))
    assert kind_of(store) == (position, "edited")


def test_two_contents_that_changed_places(store):
    one, other = with_content(store)[2:4]
    records = list(store.read())
    swap(store, one, content=records[other].content)
    swap(store, other, content=records[one].content)
    assert kind_of(store) == (one, "edited")


def test_a_content_with_its_hash(store):
    position = with_content(store)[3]
    swap(store, position, content=b'["",[1]]', content_hash=content_digest(b'["",[1]]'))
    assert kind_of(store) == (position, "edited")


def test_a_content_that_comes_back_after_its_redaction(store):
    before = list(store.read())
    plan = redact(store, "req-1")
    position = min(plan.contents)
    swap(store, position, content=before[position].content)
    assert kind_of(store) == (position, "restored")


def test_more_is_erased_than_was_attested(store):
    plan = redact(store, "req-1")
    position = next(p for p, left in plan.contents.items() if left is not None)
    swap(store, position, content=None)
    assert kind_of(store) == (position, "edited")


def test_an_older_redactions_content_comes_back(store):
    first = redact(store, "req-1")
    second = redact(store, "req-2")
    position = next(p for p in first.contents if p in second.contents and first.contents[p] is not None)
    swap(store, position, content=first.contents[position])
    assert kind_of(store) == (position, "edited")


def append(store, events):
    """A record that is well chained, whatever it says."""
    head = store.open_stream()
    store.append("main", [seal(head, 9, *encode(events))])


def test_an_old_redaction_said_again(store):
    first = redact(store, "req-1")
    (said,) = decode(list(store.read())[-1])
    second = redact(store, "req-2")
    append(store, [said])
    common = [p for p in first.contents if p in second.contents and first.contents[p] != second.contents[p]]
    assert kind_of(store) == (min(common), "edited")


def test_a_redaction_that_erased_nothing(store):
    position = with_content(store)[3]
    append(store, [ContentRedacted(handles=[1], positions=[position], content_hashes=[""])])
    assert kind_of(store) == (position, "restored")


def test_a_redaction_of_one_that_erased_another(store):
    """Well chained and well attested: only whose tokens they were tells."""
    victim, scapegoat = handle_of(store, "req-2"), handle_of(store, "req-3")
    plan = RedactionPlan("req-2")
    plan.follow(store.read())
    command = plan.command("")
    event = ContentRedacted(handles=[scapegoat], positions=command.positions, content_hashes=command.content_hashes)
    head = store.open_stream()
    store.erase_content("main", [seal(head, 9, *encode([event]))], plan.contents)
    assert victim != scapegoat
    assert kind_of(store) == (min(plan.contents), "erased")


def test_a_redaction_of_one_that_is_not_over():
    drive = Drive(config())
    drive.open()
    drive.submit("a", 20, max_tokens=6)
    drive.schedule()
    store = stored([drive.records])
    append(store, [ContentRedacted(handles=[1], positions=[], content_hashes=[])])
    with pytest.raises(Contradiction, match="not over"):
        verify_journal(store)


def test_columns_of_a_redaction_that_do_not_match(store):
    redact(store, "req-1")
    (said,) = decode(list(store.read())[-1])
    append(store, [ContentRedacted(handles=said.handles, positions=said.positions, content_hashes=[])])
    verify_stream(store)


def test_a_state_without_redactions_knows_nothing_of_them(lives):
    state = State()
    for life in lives:
        for events in life:
            fold_all(state, events)
            assert not state.unknown
