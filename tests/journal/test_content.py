"""Content: taken out of the events, put back as it was, or with placeholders where it was erased."""

import json
import typing

import msgspec
import pytest

from refold.journal import events as vocabulary
from refold.journal.codec import columns_of, decode, encode, encode_content
from refold.journal.content import TAKEN, is_placeholder, placeholder
from refold.journal.errors import JournalCorrupt
from refold.journal.events import (
    EVENT_TYPES,
    SCHEMA_VERSION,
    Drafts,
    DraftsProposed,
    OutputDelivered,
    RequestAborted,
    RequestSubmitted,
    Sampling,
    StateDigest,
    StepScheduled,
)
from refold.journal.record import EMPTY_HEAD, Record, content_digest, seal
from tests.kit.simulation import Simulation

SAMPLING = Sampling(seed=1, max_tokens=4)
STEP = StepScheduled(
    step=3,
    handles=[4, 5, 6],
    num_tokens=[3, 1, 2],
    first_positions=[9, 9, 9],
    num_drafts=[2, 0, 1],
    drafts=[Drafts(entry=0, token_ids=[71, 72]), Drafts(entry=2, token_ids=[73])],
)
SAID = [
    RequestSubmitted(handle=4, request_id="a", prompt_token_ids=[11, 12], sampling=SAMPLING, arrival_ns=1),
    RequestAborted(handle=4, cause="no content"),
    STEP,
    OutputDelivered(step=3, handles=[4, 5], token_ids=[21, 22, 23], first_output_indices=[0, 0], counts=[2, 1]),
    DraftsProposed(handle=4, token_ids=[]),
    StateDigest(digest="ab" * 32),
]


def record(position=7, body=b"[]", content=b""):
    return seal(EMPTY_HEAD, 0, body, content)._replace(position=position)


def sealed(events, position=7, **changes):
    return record(position, *encode(events, salt="s"))._replace(**changes)


def test_what_was_said_is_in_the_content_and_its_length_in_the_body():
    encoded = encode(SAID, salt="s")
    body = json.loads(encoded.body)
    assert json.loads(encoded.content) == ["s", [11, 12], [71, 72, 73], [21, 22, 23], "ab" * 32]
    assert body[0]["prompt_token_ids"] == 2
    assert body[2]["drafts"] == [{"entry": 0, "token_ids": 2}, {"entry": 2, "token_ids": 1}]
    assert body[3]["token_ids"] == 3
    assert body[4]["token_ids"] == 0
    assert body[5]["digest"] == 64


def test_it_comes_back():
    assert decode(sealed(SAID)) == SAID


def test_events_that_say_nothing_have_no_content():
    assert encode([RequestAborted(handle=1, cause="x")], salt="s").content == b""


@pytest.mark.parametrize("seed", range(6))
def test_every_record_of_a_life_comes_back(seed):
    simulation = Simulation(seed)
    simulation.play()
    for position, events in enumerate(simulation.drive.records):
        assert decode(sealed(events, position)) == events


def test_no_token_stays_in_a_body():
    """Whoever adds a field of tokens to an event has to say whether it is content."""
    said = {"token_ids", "prompt_token_ids", "surprisals", "digests", "content_digest"}
    for event_type in EVENT_TYPES:
        kinds = typing.get_type_hints(event_type)
        nested = {name for name, kind in kinds.items() if Drafts in typing.get_args(kind)}
        assert {name for name in kinds if name in said or name in nested or name == "digest"} <= {TAKEN.get(event_type)}
    structs = [
        kind for kind in vars(vocabulary).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    ]
    with_tokens = {kind for kind in structs if said & set(kind.__struct_fields__)}
    assert with_tokens <= {*TAKEN, Drafts}


def test_a_content_that_is_gone_reads_as_placeholders():
    submitted, aborted, step, delivered, _, digested = decode(sealed(SAID, content=None))
    assert submitted.prompt_token_ids == [placeholder(7, 0), placeholder(7, 1)]
    assert aborted == SAID[1]
    assert [d.token_ids for d in step.drafts] == [[placeholder(7, 2), placeholder(7, 3)], [placeholder(7, 4)]]
    assert delivered.token_ids == [placeholder(7, n) for n in (5, 6, 7)]
    assert digested.digest == ""


def test_an_erased_token_is_a_placeholder_among_the_others():
    left = encode_content("t", [[11, 12], None, [21, None, 23], None])
    submitted, _, step, delivered, _, digested = decode(sealed(SAID, content=left))
    assert submitted.prompt_token_ids == [11, 12]
    assert step.drafts[1].token_ids == [placeholder(7, 4)]
    assert delivered.token_ids == [21, placeholder(7, 6), 23]
    assert digested.digest == ""


def test_placeholders_are_negative_unique_and_fit_into_64_bits():
    places = [placeholder(position, offset) for position in (0, 1, 2**40 - 1) for offset in (0, 1, 2**23 - 1)]
    assert len(set(places)) == len(places)
    assert all(is_placeholder(place) and place >= -(2**63) for place in places)
    assert not is_placeholder(0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'["s"]',
        b"[[11,12]]",
        b'["s",[11,12],[71,72,73],[21,22,23]]',
        b'["s",[11],[71,72,73],[21,22,23],"' + b"ab" * 32 + b'"]',
        b'["s",[11,12],[71,72,73],[21,22,23],"ab"]',
        b'["s",[11,12],[71,72,73],[21,22,23],[1],[2]]',
        b'["s","xy",[71,72,73],[21,22,23],"' + b"ab" * 32 + b'"]',
        b'["s",[11,true],[71,72,73],[21,22,23],"' + b"ab" * 32 + b'"]',
        b'["s",[11,1.5],[71,72,73],[21,22,23],"' + b"ab" * 32 + b'"]',
        b'["s",[11,12],[71,72,73],[21,22,23],"' + b"ab" * 32 + b'",[1]]',
        b"\xff",
        b"{}",
    ],
)
def test_a_content_that_does_not_fit_is_refused(content):
    with pytest.raises(JournalCorrupt, match="record 7 holds no list of events") as caught:
        decode(sealed(SAID, content=content))
    assert caught.value.kind == "undecodable"


@pytest.mark.parametrize("count", [b"-1", b"9999999999", b'"2"', b"[11,12]", b"null"])
def test_a_length_that_can_not_be_is_refused(count):
    body, content = encode(SAID[:1], salt="s")
    with pytest.raises(JournalCorrupt):
        decode(record(7, body.replace(b'"prompt_token_ids":2', b'"prompt_token_ids":' + count), content))


def test_an_erased_content_of_a_length_that_can_not_be_is_refused():
    body, _ = encode(SAID[:1], salt="s")
    huge = record(7, body.replace(b'"prompt_token_ids":2', b'"prompt_token_ids":9999999999'))
    with pytest.raises(JournalCorrupt):
        decode(huge._replace(content=None))


def test_two_salts_make_two_digests_of_one_content():
    one, other = encode(SAID, salt="s"), encode(SAID, salt="t")
    assert one.body == other.body
    assert content_digest(one.content) != content_digest(other.content)


def test_the_columns_of_a_content():
    assert columns_of(None) is None
    assert columns_of(b"") == []
    assert columns_of(b'["s",[1,null],null,"x"]') == [[1, None], None, "x"]


def old(body):
    return Record(7, 1, 1, 0, body, b"", b"", b"")


def test_a_record_of_schema_1_reads_as_it_was_but_for_its_digests():
    whole = msgspec.json.encode(SAID[:-1])
    assert decode(old(whole)) == SAID[:-1]
    assert SCHEMA_VERSION == 3


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b'[{"type":[]}]',
        b'[{"type":"StepScheduled","drafts":5}]',
        b'[{"type":"StepScheduled","drafts":[{"entry":0}]}]',
        b'[{"type":"StepScheduled","drafts":["x"]}]',
        b'[{"type":"RequestSubmitted"}]',
        b'[{"type":"DraftsProposed","handle":1,"token_ids":3}]',
        b'[{"type":"DraftsProposed","handle":1,"token_ids":{}}]',
        b'[{"type":"DraftsProposed","handle":1,"token_ids":[1,"x"]}]',
        b"nonsense",
    ],
)
def test_a_record_of_schema_1_that_is_nonsense_is_refused(body):
    with pytest.raises(JournalCorrupt):
        decode(old(body))
