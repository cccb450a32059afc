"""The history verbs on the command line: on every store, on bad input, as people and as programs read them."""

import json
import shutil
import signal
import sqlite3
import time

import pytest

from refold.journal.events import OutputDelivered
from refold.journal.stores import open_store
from tests.cli.command import assert_one_line_and_a_hint, process, refold, rows
from tests.history.journals import eventful_lives, sealed, write_journal


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "refold.db"
    lives, _ = eventful_lives()
    write_journal(path, lives)
    return path


@pytest.fixture
def journal(original, tmp_path):
    return shutil.copy(original, tmp_path / "refold.db")


READING = {
    "why": ("why", "req-3"),
    "blame": ("blame", "req-3"),
    "blame one": ("blame", "req-3:2"),
    "stalls": ("stalls",),
    "bisect": ("bisect", "--sql", "select 1 from requests where num_preemptions > 0"),
    "assert": ("assert", "--python", "pool.num_free >= 0"),
    "fork": ("fork", "--set", "policy=priority"),
    "replay": ("replay",),
    "trace": ("trace",),
    "verify": ("verify", "--redecide"),
    "show": ("show", "--at", "step:3", "--against", "10"),
    "log": ("log", "--after", "2026-09-21T14:13:20.030Z", "--before", "2026-09-21T14:13:20.033Z"),
}


@pytest.mark.parametrize("name", READING)
def test_each_verb_reads_a_journal_and_leaves_it_alone(journal, name):
    before = journal.read_bytes()
    result = refold(*READING[name], journal)
    assert result.exit_code == 0, result.stderr
    assert result.stdout
    assert "\x1b" not in result.stdout
    assert journal.read_bytes() == before


@pytest.mark.parametrize("name", [name for name in READING if name not in {"replay", "trace"}])
def test_each_verb_speaks_json(journal, name):
    result = refold(READING[name][0], "--json", *READING[name][1:], journal)
    assert result.exit_code == 0, result.stderr
    for row in rows(result.stdout):
        assert row["schema"] == f"refold.{READING[name][0]}/1"


@pytest.mark.parametrize("kind", ["segments", "postgresql"])
def test_each_verb_says_the_same_on_every_store(journal, kind, tmp_path, request):
    is_database = kind == "postgresql"
    url = request.getfixturevalue("postgres_url") if is_database else f"segments:///{tmp_path / 'segments'}"
    copied = refold("copy", journal, url)
    assert copied.exit_code == 0, copied.stderr
    for name, arguments in READING.items():
        here, there = refold(*arguments, journal), refold(*arguments, url)
        assert there.exit_code == 0, (name, there.stderr)
        expected = here.stdout.replace(str(journal), "J").replace("refold.db", "J")
        assert there.stdout.replace(url, "J") == expected or name == "verify", name


@pytest.mark.parametrize("name", READING)
def test_each_verb_on_a_journal_that_is_being_written(tmp_path, name):
    lives, _ = eventful_lives()
    write_journal(tmp_path / "j.db", [lives[0]])
    store = open_store(str(tmp_path / "j.db"))
    try:
        head = store.open_stream()
        store.append("main", sealed(lives)[head.position : head.position + 20])
        result = refold(*READING[name], tmp_path / "j.db")
        assert result.exit_code == 0, result.stderr
    finally:
        store.close()


BAD = {
    "nothing there": (lambda path: path.unlink(), 3),
    "foreign": (lambda path: path.write_bytes(b"\x7fELF" + bytes(5000)), 3),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:9000]), 3),
    "future": (
        lambda path: change(path, "UPDATE journal_records SET schema_version = 99 WHERE position >= 3"),
        (3, 4),
    ),
    "edited": (lambda path: change(path, "UPDATE journal_records SET time_ns = time_ns + 1 WHERE position = 3"), 3),
}


def change(path, statement):
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, "edited") for name in READING if name not in {"log", "show"}),
        *((name, damage) for name in ("why", "fork", "bisect") for damage in BAD if damage != "edited"),
    ],
)
def test_each_verb_on_a_bad_journal_says_so_in_a_line(journal, name, damage):
    spoil, statuses = BAD[damage]
    spoil(journal)
    result = refold(*READING[name], journal)
    assert result.exit_code in (statuses if isinstance(statuses, tuple) else (statuses,)), result.output
    assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize("name", READING)
def test_each_verb_on_an_empty_journal(tmp_path, name):
    refold("migrate", tmp_path / "empty.db")
    result = refold(*READING[name], tmp_path / "empty.db")
    assert result.exit_code in (0, 1), result.stderr
    if result.exit_code:
        assert_one_line_and_a_hint(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("why", "nobody"), 1),
        (("blame", "nobody"), 1),
        (("blame", "req-3:99999"), 1),
        (("blame", "req-3:x"), 2),
        (("bisect",), 2),
        (("bisect", "--sql", "delete from requests"), 2),
        (("bisect", "--sql", "select 0"), 1),
        (("bisect", "--python", "1 +"), 2),
        (("bisect", "--python", "nothing"), 2),
        (("bisect", "--law", "L99"), 2),
        (("bisect", "--law", "L2"), 1),
        (("bisect", "--sql", "select 1", "--python", "1"), 2),
        (("assert",), 2),
        (("assert", "--sql", "select num_waiting < 2 from engine"), 1),
        (("assert", "--python", "checks.py:nothing"), 2),
        (("fork", "--set", "policy"), 2),
        (("fork", "--set", "policy=best"), 2),
        (("fork", "--set", "num_blocks=0"), 2),
        (("fork", "--at", "99999"), 1),
        (("fork", "--at", "step:99999"), 1),
        (("fork", "--step-time", "fast"), 2),
        (("show", "--at", "step:99999"), 1),
        (("show", "--at", "time:yesterday"), 2),
        (("show", "--at", "3", "--against", "99999"), 1),
        (("log", "--after", "yesterday"), 2),
        (("shrink",), 1),
        (("stalls", "-n", "0"), 2),
    ],
)
def test_a_question_that_can_not_be_answered_is_one_line(journal, arguments, status):
    result = refold(*arguments, journal)
    assert result.exit_code == status, result.output
    assert_one_line_and_a_hint(result.stderr)


def test_why_names_the_preemption_with_its_need(journal):
    text = refold("why", "req-3", journal).stdout
    assert "preempted for req-0: needed 1 block, 0 free" in text
    assert "req-0 had 7 tokens known and 2 in flight" in text
    only = refold("why", "req-3", "--only", "stale", journal).stdout
    assert "preemption:" not in only
    assert "stale:" in only


def test_request_says_what_it_waited_for(journal):
    text = refold("request", "req-3", journal).stdout
    assert "waited              23.0 ms for its turn" in text
    (row,) = rows(refold("request", "req-3", "--json", journal).stdout)
    assert row["waited_ns"]["stale_output"] == 10_000_000


def test_diff_of_a_journal_and_another_run_of_it(journal, tmp_path):
    lives, _ = eventful_lives()
    record = next(i for i, r in enumerate(lives[0]) if isinstance(r[0], OutputDelivered))
    other = lives[0][record][0]
    lives[0][record] = [
        type(other)(
            **{f: getattr(other, f) for f in other.__struct_fields__} | {"token_ids": [1] * len(other.token_ids)}
        ),
        *lives[0][record][1:],
    ]
    write_journal(tmp_path / "other.db", lives)
    assert refold("diff", journal, journal).exit_code == 0
    result = refold("diff", journal, tmp_path / "other.db")
    assert result.exit_code == 1
    assert_one_line_and_a_hint(result.stderr)
    assert f"record {record}" in result.stderr
    (row,) = rows(refold("diff", "--json", journal, tmp_path / "other.db").stdout)
    assert (row["position"], row["kind"], row["ok"]) == (record, "events", False)


def test_a_redecision_that_differs_is_named_with_its_class(journal, tmp_path):
    lives, _ = eventful_lives()
    lives[0] = [*lives[0][:8], *lives[0][9:]]
    write_journal(tmp_path / "bad.db", [lives[0]])
    result = refold("verify", "--redecide", "--json", tmp_path / "bad.db")
    assert result.exit_code == 1
    (row,) = rows(result.stdout)
    assert row["cause"] == "lost-event"
    assert refold("diff", tmp_path / "bad.db", "--redecide").exit_code in (1, 3)
    assert refold("diff", journal, "--redecide").exit_code == 0
    for arguments in (("diff", journal), ("diff", journal, journal, "--redecide")):
        assert refold(*arguments).exit_code == 2


def test_bisect_names_the_first_wrong_record_and_its_class(journal, tmp_path):
    assert refold("bisect", "--wrong", journal).exit_code == 1
    assert refold("bisect", "--wrong", "--law", "L2", journal).exit_code == 2
    lives, _ = eventful_lives()
    write_journal(tmp_path / "bad.db", [[*lives[0][:8], *lives[0][9:]]])
    result = refold("bisect", "--wrong", tmp_path / "bad.db")
    assert result.exit_code == 0
    assert result.stdout.startswith("turns wrong at record 8, class lost-event\n")
    with sqlite3.connect(journal) as db:
        db.execute("UPDATE journal_records SET body = replace(body, 'handles', 'handlez') WHERE position = 20")
    (row,) = rows(refold("bisect", "--wrong", "--json", journal).stdout)
    assert (row["position"], row["cause"]) == (20, "edited")


def test_diff_does_not_take_the_hash_of_an_edited_record_for_its_word(journal, tmp_path):
    edited = shutil.copy(journal, tmp_path / "edited.db")
    with sqlite3.connect(edited) as db:
        db.execute("UPDATE journal_records SET body = replace(body, 'handles', 'handlez') WHERE position = 20")
    result = refold("diff", journal, edited)
    assert result.exit_code == 1
    assert_one_line_and_a_hint(result.stderr)
    assert "of the right journal, record 20" in result.stderr
    assert "class edited" in result.stderr


ENDLESS = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"


@pytest.mark.parametrize(
    "arguments", [("bisect", "--sql", ENDLESS), ("assert", "--sql", ENDLESS), ("sql", ENDLESS)], ids=lambda a: a[0]
)
def test_a_query_without_end_can_be_interrupted(arguments, journal):
    *options, statement = arguments
    child = process(*([options[0], str(journal), statement] if options == ["sql"] else [*arguments, str(journal)]))
    time.sleep(2.5)
    assert child.poll() is None, "it doesn't end by itself"
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    assert (child.returncode, stderr) == (130, b"refold: interrupted\n")


def test_a_predicate_can_not_ask_for_a_text_that_fills_the_memory(journal):
    result = refold("bisect", "--sql", "select hex(zeroblob(200000000))", journal)
    assert result.exit_code == 2
    assert "too big" in result.stderr
    assert_one_line_and_a_hint(result.stderr)


def test_a_capsule_there_and_back(journal, tmp_path):
    capsule, back = tmp_path / "bug.capsule", tmp_path / "back.db"
    assert refold("capsule", journal, capsule).exit_code == 0
    assert refold("capsule", "--open", capsule).exit_code == 0
    assert refold("capsule", "--open", capsule, back).exit_code == 0
    assert refold("verify", "--redecide", back).exit_code == 0
    assert refold("why", "req-4", back).exit_code == 0
    for arguments in (("capsule", journal, capsule), ("capsule", "--open", capsule, back), ("capsule", journal)):
        result = refold(*arguments)
        assert result.exit_code == 2
        assert_one_line_and_a_hint(result.stderr)


def test_a_bad_capsule_leaves_nothing_behind(journal, tmp_path):
    capsule = tmp_path / "bug.capsule"
    refold("capsule", journal, capsule)
    capsule.write_bytes(capsule.read_bytes()[:-200])
    result = refold("capsule", "--open", capsule, tmp_path / "back.db")
    assert result.exit_code == 3
    assert_one_line_and_a_hint(result.stderr)
    foreign = refold("capsule", "--open", journal, tmp_path / "back.db")
    assert foreign.exit_code == 3
    assert "`refold capsule JOURNAL FILE` makes one" in foreign.stderr
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("back")]


def test_files_are_written_where_they_were_asked_for(journal, tmp_path):
    assert refold("report", "-o", tmp_path / "r.html", "--title", "<b>", journal).exit_code == 0
    assert "<title>&lt;b&gt;" in (tmp_path / "r.html").read_text()
    assert refold("trace", "-o", tmp_path / "t.json", journal).exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    for verb in ("report", "trace"):
        result = refold(verb, "-o", tmp_path / "no" / "such" / "folder", journal)
        assert result.exit_code == 2
        assert_one_line_and_a_hint(result.stderr)


def test_stepping_reads_commands_from_stdin(journal):
    result = refold("replay", "--step", journal, stdin="g 12\np\nv\nq\nn\n")
    assert result.exit_code == 0
    assert "req-3 preempted for req-0" in result.stdout
    assert "no law is broken" in result.stdout
    assert refold("replay", "--step", "--at", "40", journal, stdin="").stdout.strip().startswith("40")


def test_shrink_writes_a_test_that_fails(tmp_path):
    from tests.history.test_shrink_journal import a_failing_journal_of
    from tests.kit.faults import planted

    with planted("share_uncounted"):
        write_journal(tmp_path / "bad.db", [a_failing_journal_of(3)])
        result = refold("shrink", "-o", tmp_path / "test_bad.py", "--json", tmp_path / "bad.db")
    assert result.exit_code == 0, result.stderr
    (row,) = rows(result.stdout)
    assert row["failure"].startswith("InvariantViolation at L3")
    assert row["num_events"] < row["num_events_before"] / 20
    compile((tmp_path / "test_bad.py").read_text(), "test_bad.py", "exec")
    again = refold("shrink", "-o", tmp_path / "test_bad.py", tmp_path / "bad.db")
    assert again.exit_code == 2
    assert_one_line_and_a_hint(again.stderr)
