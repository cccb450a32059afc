"""A journal of several streams, from a shell: `--stream NAME` says which one a verb is about."""

import json
import shutil

import pytest

from refold.engine.cli.typed import quoted
from refold.engine.engine import Engine
from refold.engine.sampling_params import SamplingParams
from refold.journal.events import StepScheduled
from refold.journal.stores import open_reader
from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.history.journals import change, eventful_lives, long_life, write_journal

OF = ("--stream", "engine-7")
READING = (
    ("verify",),
    ("verify", "--redecide"),
    ("log",),
    ("request", "late"),
    ("head",),
    ("show",),
    ("why", "late"),
    ("blame", "late"),
    ("stalls",),
    ("bisect", "--law", "L2"),
    ("bisect", "--wrong"),
    ("assert", "--python", "True"),
    ("replay",),
    ("fork",),
    ("shrink",),
    ("trace",),
    ("report",),
    ("quarantine",),
    ("stat",),
)
"""Verbs that take the journal as their last argument, and a stream."""


def write_two(place):
    """`main` has 12 requests in one life, `engine-7` seven in two, with a crash between them."""
    write_journal(place, long_life(12))
    write_journal(place, eventful_lives()[0], stream="engine-7")
    return str(place)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_two(tmp_path_factory.mktemp("streams") / "two.db")


@pytest.fixture
def journal(original, tmp_path):
    return shutil.copy(original, tmp_path / "two.db")


@pytest.fixture(params=["sqlite", "segments"])
def two(request, tmp_path):
    return write_two(str(tmp_path / "two.db" if request.param == "sqlite" else f"{tmp_path}/two/"))


def end_of(journal, stream):
    reader = open_reader(str(journal))
    try:
        return reader.head(stream)
    finally:
        reader.close()


def only(result):
    assert result.exit_code == 0, result.stderr
    (row,) = rows(result.stdout)
    return row


def test_each_of_the_four_verbs_is_about_the_stream_that_it_is_told(two):
    main, other = end_of(two, "main"), end_of(two, "engine-7")
    for options, stream, head, beside in (((), "main", main, other), (OF, "engine-7", other, main)):
        verdict = only(refold("verify", "--redecide", "--json", *options, two))
        assert (verdict["stream"], verdict["num_records"]) == (stream, head.position)
        assert list(verdict["other_streams"].values()) == [beside.position]
        assert verdict["num_redecided"] > 10, "the decisions of this stream are taken again"
        kept = only(refold("head", *options, two))
        assert (kept["stream"], kept["position"], kept["hash"]) == (stream, head.position, head.hash.hex())
        listed = rows(refold("log", "--json", *options, two).stdout)
        assert listed[-1]["position"] == head.position - 1
    assert only(refold("request", *OF, "late", "--json", two))["num_prompt_tokens"] == 5
    assert refold("request", "late", two).exit_code == 1, "main has no such request"


def test_verify_names_the_stream_and_the_command_that_keeps_its_head(journal):
    other = end_of(journal, "engine-7")
    told = refold("verify", *OF, journal).stdout
    assert told.startswith(f"verified: stream engine-7 of {journal} is whole, and every law was kept\n")
    assert f"main: {end_of(journal, 'main').position} records, chain whole" in told
    assert f"`refold verify --stream engine-7 --head {other.position}:{other.hash.hex()} {journal}`" in told
    assert refold("verify", *OF, "--head", f"{other.position}:{other.hash.hex()}", journal).exit_code == 0


def test_verify_of_a_journal_without_the_main_stream_claims_no_more_than_chains(tmp_path):
    journal = tmp_path / "engine-7.db"
    write_journal(journal, eventful_lives()[0], stream="engine-7")
    told = refold("verify", journal).stdout
    assert told.startswith(f"verified: the chain of 1 stream of {journal}; main is empty\n")
    assert "kept" not in told
    assert f"`refold verify --stream engine-7 {journal}` checks those of one" in told


def test_verify_of_one_of_several_streams_speaks_of_that_one(journal):
    assert refold("verify", journal).stdout.startswith(f"verified: stream main of {journal} is whole, ")


def test_the_main_stream_may_be_named_too(journal):
    assert refold("verify", "--stream", "main", journal).stdout == refold("verify", journal).stdout


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_stream_that_is_not_there_is_refused_and_those_that_are_are_named(journal, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = journal.read_bytes()
    result = refold(*arguments, "--stream", "engine-8", journal)
    assert result.exit_code == 2, result.stderr
    assert_one_line_and_a_hint(result.stderr)
    assert result.stderr == "refold: no stream 'engine-8' in that journal\n  hint: it has engine-7, main\n"
    assert journal.read_bytes() == before
    assert not result.stdout


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[31mred", "x" * 300, "../main"], ids=ascii)
def test_a_name_that_no_stream_can_have_is_refused_alike_and_no_terminal_obeys_it(journal, name):
    result = refold("log", "--stream", name, journal)
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)
    assert "it has engine-7, main" in result.stderr
    assert "\x1b" not in result.stderr


def test_an_empty_journal_has_no_other_stream(tmp_path):
    assert refold("migrate", tmp_path / "new.db").exit_code == 0
    assert refold("verify", tmp_path / "new.db").exit_code == 0
    result = refold("verify", *OF, tmp_path / "new.db")
    assert (result.exit_code, "it has none" in result.stderr) == (2, True)


def test_other_verbs_read_the_stream_that_they_are_told(journal, tmp_path):
    head, page = end_of(journal, "engine-7"), tmp_path / "page.html"
    assert only(refold("show", *OF, "--json", journal))["position"] == head.position - 1
    assert f"{head.position} records folded" in refold("replay", *OF, journal).stdout
    assert only(refold("stat", *OF, "--json", journal))["num_records"] == head.position
    assert f"held after {head.position} records" in refold("assert", *OF, "--python", "True", journal).stdout
    assert f"{head.position} records on" in refold("report", *OF, "-o", page, journal).stdout
    assert only(refold("fork", *OF, "--json", journal))["recorded"]["num_finished"] == 7
    for arguments in (("why", "late"), ("blame", "late"), ("request", "late")):
        assert refold(*arguments, *OF, journal).exit_code == 0, arguments
        assert refold(*arguments, journal).exit_code == 1, arguments
    assert "req-5" in refold("trace", *OF, journal).stdout


def test_a_law_broken_in_one_stream_is_found_there_and_the_hints_stay_in_it(tmp_path):
    journal = tmp_path / "broken.db"
    (first, _), _ = eventful_lives()
    place = next(i for i, events in enumerate(first) if any(isinstance(e, StepScheduled) for e in events))
    write_journal(journal, long_life(3))
    write_journal(journal, [first[:place] + first[place + 1 :]], stream="engine-7")
    assert refold("verify", journal).exit_code == 0, "its chain is whole, which is all that is asked of another stream"
    result = refold("verify", *OF, journal)
    assert result.exit_code == 1
    assert_one_line_and_a_hint(result.stderr)
    assert "`refold log --stream engine-7 --until " in result.stderr
    assert "`refold show --stream engine-7 --at " in result.stderr
    (failure,) = rows(refold("verify", *OF, "--json", journal).stdout)
    assert (failure["stream"], failure["ok"]) == ("engine-7", False)
    (wrong,) = rows(refold("bisect", "--wrong", *OF, "--json", journal).stdout)
    assert wrong["position"] == failure["position"]
    shown = refold("show", *OF, journal).stderr
    assert "`refold verify --stream engine-7 " in shown
    assert refold("show", journal).exit_code == 0


def damage(journal, stream):
    """Record 20 of a stream says that it was made a moment later."""
    which = f"stream_id = (SELECT stream_id FROM journal_streams WHERE name = '{stream}')"
    change(journal, f"UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 20 AND {which}")


@pytest.mark.parametrize("verb", [("verify",), ("log",), ("head",), ("request", "req-0"), ("why", "req-0"), ("show",)])
def test_the_hints_about_damage_name_the_stream(journal, verb):
    damage(journal, "engine-7")
    result = refold(*verb, *OF, journal)
    assert result.exit_code == 3, result.stderr
    assert f"`refold log --stream engine-7 --until 19 {quoted(str(journal))}`" in result.stderr
    if verb != ("verify",):
        assert refold(*verb, journal).exit_code == 0, "nothing is wrong with main"


def test_verify_of_one_stream_tells_of_damage_to_the_main_one(journal):
    damage(journal, "main")
    result = refold("verify", *OF, journal)
    assert result.exit_code == 3
    assert "at record 20 of stream 'main'" in result.stderr
    assert "stream 'engine-7' is whole" in result.stderr
    (failure,) = rows(refold("verify", *OF, "--json", journal).stdout)
    assert failure["stream"] == "main"


def test_a_head_of_another_stream_is_kept_and_compared_with_that_one_only(journal, tmp_path):
    head, cut = tmp_path / "7.head", tmp_path / "cut.db"
    assert refold("head", *OF, "--out", head, journal).exit_code == 0
    assert json.loads(head.read_text())["stream"] == "engine-7"
    assert refold("verify", *OF, "--head", head, journal).exit_code == 0
    refused = refold("verify", "--head", head, journal)
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"refold: {head} is the head of stream 'engine-7', and verify reads 'main'\n"
        f"  hint: `refold verify --stream engine-7 --head {head} {journal}` verifies that one\n"
    )
    write_journal(cut, long_life(12))
    lives = eventful_lives()[0]
    write_journal(cut, [lives[0], lives[1][:-5]], stream="engine-7")
    assert refold("verify", *OF, "--head", head, cut).exit_code == 3, "the tail of that stream is gone"


def test_a_record_of_another_stream_is_proved_with_or_without_its_head(journal, tmp_path):
    head, proof = tmp_path / "7.head", tmp_path / "proof.json"
    assert refold("head", *OF, "--out", head, journal).exit_code == 0
    for options in (("--head", head), OF, (*OF, "--head", head)):
        proof.write_text(refold("prove", *options, journal, 12).stdout)
        assert refold("check-proof", proof, "--head", head).exit_code == 0, options
    refused = refold("prove", "--stream", "main", "--head", head, journal, 12)
    assert refused.exit_code == 2
    assert_one_line_and_a_hint(refused.stderr)
    beyond = refold("prove", *OF, journal, 10_000)
    assert (beyond.exit_code, "`refold log --stream engine-7 -n 1 " in beyond.stderr) == (1, True)


def test_a_place_that_a_stream_has_not_is_looked_for_in_that_stream(journal):
    result = refold("show", *OF, "--at", 10_000, journal)
    assert (result.exit_code, "`refold log --stream engine-7 -n 1 " in result.stderr) == (1, True)


def test_two_journals_are_compared_by_the_stream_that_is_named(journal, tmp_path):
    write_journal(tmp_path / "b.db", long_life(3))
    write_journal(tmp_path / "b.db", eventful_lives()[0], stream="engine-7")
    assert refold("diff", *OF, journal, tmp_path / "b.db").exit_code == 0
    assert refold("diff", *OF, journal, "--redecide").exit_code == 0
    assert refold("diff", journal, tmp_path / "b.db").exit_code == 1, "their main streams part"


def test_a_capsule_is_made_of_one_stream(journal, tmp_path):
    packed = only(refold("capsule", *OF, "--json", journal, tmp_path / "a.capsule"))
    assert packed["num_records"] == end_of(journal, "engine-7").position
    assert refold("capsule", "--open", tmp_path / "a.capsule", tmp_path / "a.db").exit_code == 0
    assert refold("verify", tmp_path / "a.db").exit_code == 0
    assert refold("capsule", "--open", *OF, tmp_path / "a.capsule", tmp_path / "b.db").exit_code == 2


def test_what_a_request_of_another_stream_said_is_redacted_there_only(journal):
    main = end_of(journal, "main")
    assert refold("redact", *OF, journal, "req-2").exit_code == 0
    assert only(refold("request", *OF, "req-2", "--json", journal))["is_redacted"]
    assert not only(refold("request", "req-2", "--json", journal))["is_redacted"]
    assert end_of(journal, "main") == main
    assert only(refold("verify", *OF, "--json", journal))["num_redacted_requests"] == 1


def served(url, stream, request_id):
    """A life of a real engine that serves one request on a stream."""
    with Engine(model="simulated", journal=url, stream=stream) as engine:
        engine.run([[1, 2, 3]], SamplingParams(max_tokens=4), request_ids=[request_id])


def test_engines_on_two_streams_of_a_database_are_told_apart(postgres_url):
    served(postgres_url, "main", "here")
    served(postgres_url, "engine-7", "there")
    for options, stream, request_id in (((), "main", "here"), (OF, "engine-7", "there")):
        assert only(refold("verify", "--redecide", "--json", *options, postgres_url))["stream"] == stream
        assert only(refold("request", "--json", *options, request_id, postgres_url))["status"] == "finished"
        assert only(refold("head", *options, postgres_url))["stream"] == stream
        assert request_id in refold("log", "--kind", "RequestSubmitted", *options, postgres_url).stdout
    refused = refold("verify", "--stream", "engine-8", postgres_url)
    assert (refused.exit_code, "it has engine-7, main" in refused.stderr) == (2, True)


def test_a_stream_whose_engine_was_cut_off_is_told_while_the_other_ones_engine_lives(postgres_url):
    write_journal(postgres_url, eventful_lives()[0][:1], stream="engine-7")
    with Engine(model="simulated", journal=postgres_url):
        cut = refold("log", *OF, "-n", 1, postgres_url)
        alive = refold("log", "-n", 1, postgres_url)
    assert "the last engine ended without a word" in cut.stderr
    assert "without a word" not in alive.stderr
