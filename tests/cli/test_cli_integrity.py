"""`refold head`, `prove`, `check-proof`, `redact`, and what `verify` says of them."""

import json
import shutil
import subprocess

import pytest

from tests.cli.command import assert_one_line_and_a_hint, refold, rows
from tests.history.journals import eventful_lives, write_journal


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("integrity") / "refold.db"
    write_journal(path, eventful_lives()[0])
    return path


@pytest.fixture
def journal(original, tmp_path):
    return shutil.copy(original, tmp_path / "refold.db")


@pytest.fixture
def head(journal, tmp_path):
    path = tmp_path / "run.head"
    assert refold("head", "--out", path, journal).exit_code == 0
    return path


def test_a_head_is_written_and_verified(journal, head):
    assert refold("verify", "--head", head, journal).exit_code == 0
    (row,) = rows(refold("head", journal).stdout)
    kept = json.loads(head.read_text())
    assert {key: row[key] for key in ("position", "hash", "root")} == {
        key: kept[key] for key in ("position", "hash", "root")
    }
    (verified,) = rows(refold("verify", "--json", journal).stdout)
    assert verified["head"] == f"{row['position']}:{row['hash']}"


def test_a_shorter_journal_does_not_reach_the_head(tmp_path, head):
    lives, _ = eventful_lives()
    write_journal(tmp_path / "cut.db", [lives[0], lives[1][:-5]])
    result = refold("verify", "--head", head, tmp_path / "cut.db")
    assert result.exit_code == 3
    assert "truncated" in result.stderr


def test_a_head_whose_root_is_another_is_found(journal, head):
    kept = json.loads(head.read_text())
    head.write_text(json.dumps(kept | {"root": "00" * 32}))
    result = refold("verify", "--head", head, journal)
    assert result.exit_code == 3
    assert "not of this journal" in result.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_head_signed_with_a_key_of_openssls_is_believed(journal, tmp_path):
    private, public, head = tmp_path / "k.pem", tmp_path / "k.pub.pem", tmp_path / "s.head"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    assert refold("head", "--key", private, "--out", head, journal).exit_code == 0
    assert refold("verify", "--head", head, "--key", public, journal).exit_code == 0
    head.write_text(head.read_text().replace('"main"', '"mail"'))
    result = refold("verify", "--head", head, "--key", public, journal)
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)


def test_a_key_without_a_head_in_a_file_is_a_misunderstanding(journal):
    result = refold("verify", "--key", "x", "--head", f"1:{'00' * 32}", journal)
    assert result.exit_code == 2
    assert_one_line_and_a_hint(result.stderr)


def test_a_record_is_proved_and_the_proof_checked(journal, head, tmp_path):
    made = refold("prove", journal, 7, "--head", head, "--content")
    assert made.exit_code == 0, made.stderr
    proof = tmp_path / "proof.json"
    proof.write_text(made.stdout)
    checked = refold("check-proof", proof, "--head", head)
    assert checked.exit_code == 0
    assert checked.stdout.startswith("record 7 is one of the first")
    assert "says what the proof discloses" in checked.stdout
    (row,) = rows(refold("check-proof", proof, "--head", head, "--json").stdout)
    assert (row["ok"], row["position"]) == (True, 7)
    proof.write_text(made.stdout.replace('"position":7', '"position":8'))
    refuted = refold("check-proof", proof, "--head", head)
    assert refuted.exit_code == 1
    assert_one_line_and_a_hint(refuted.stderr)


def test_what_can_not_be_proved_or_checked(journal, head, tmp_path):
    for arguments, status in (
        (("prove", journal, 9999), 1),
        (("prove", journal, "x"), 2),
        (("prove", tmp_path / "none.db", 1), 3),
        (("check-proof", tmp_path / "none", "--head", head), 2),
        (("check-proof", head, "--head", head), 2),
        (("check-proof", head, "--head", tmp_path / "none"), 2),
    ):
        result = refold(*arguments)
        assert result.exit_code == status, arguments
        assert_one_line_and_a_hint(result.stderr)


def test_a_request_is_redacted_and_every_verb_says_so(journal, head, tmp_path):
    done = refold("redact", journal, "req-1", "--reason", "asked by mail")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("what req-1 said and was told is erased from")
    verified = refold("verify", "--head", head, journal)
    assert verified.exit_code == 0, verified.stderr
    assert "1 request, from" in verified.stdout
    (row,) = rows(refold("verify", "--json", journal).stdout)
    assert row["num_redacted_requests"] == 1
    assert "asked by mail" in refold("log", "--kind", "ContentRedacted", journal).stdout
    told = refold("request", "req-1", journal)
    assert told.exit_code == 0
    assert "erased" in told.stdout
    (life,) = rows(refold("request", "--json", "req-1", journal).stdout)
    assert life["is_redacted"]
    assert life["output_token_ids"] == []
    assert refold("show", "--at", 20, journal).exit_code == 0
    made = refold("prove", journal, 7, "--head", head)
    (tmp_path / "proof.json").write_text(made.stdout)
    assert refold("check-proof", tmp_path / "proof.json", "--head", head).exit_code == 0


def test_a_journal_closed_in_order_stays_so_when_something_of_it_is_redacted(tmp_path):
    journal = tmp_path / "closed.db"
    assert refold("run", "--model", "simulated", "--journal", journal, "--max-tokens", 4, "one").exit_code == 0
    assert "without a word" not in refold("log", journal).stderr
    assert refold("redact", journal, "run1-1").exit_code == 0
    assert "without a word" not in refold("log", journal).stderr


def test_what_can_not_be_redacted(journal):
    assert refold("redact", journal, "req-1", "--json").exit_code == 0
    for request_id, status in (("req-1", 2), ("nobody", 1), ("", 2)):
        result = refold("redact", journal, request_id)
        assert result.exit_code == status
        assert_one_line_and_a_hint(result.stderr)


def test_a_request_to_redact_that_is_not_there_is_not_found_and_others_are_named(journal):
    result = refold("redact", journal, "req-11")
    assert result.stderr.startswith("refold: no request 'req-11' in this journal\n  hint: it has 'req-1', ")


@pytest.mark.parametrize("gone", ["position >= 1", "position = 6"])
def test_of_a_journal_with_records_gone_nobody_says_which_requests_it_had(journal, gone):
    import sqlite3

    with sqlite3.connect(journal) as connection:
        connection.execute(f"DELETE FROM journal_records WHERE {gone}")
    connection.close()
    result = refold("redact", journal, "nobody")
    assert result.exit_code == 3
    assert "no request" not in result.stderr
    assert_one_line_and_a_hint(result.stderr)


def test_an_erased_record_that_nobody_attests_is_named(journal):
    import sqlite3

    with sqlite3.connect(journal) as connection:
        connection.execute(
            "UPDATE journal_records SET content = NULL, content_hash = ("
            "SELECT content_hash FROM journal_records WHERE position = 4) WHERE position = 4"
        )
    connection.close()
    result = refold("verify", journal)
    assert result.exit_code == 3
    assert "at record 4" in result.stderr


def test_the_head_of_another_stream_is_refused_and_no_record_is_called_edited(journal, head):
    head.write_text(head.read_text().replace('"stream":"main"', '"stream":"engine-7"'))
    told = refold("verify", "--head", head, journal)
    assert told.exit_code == 2
    assert_one_line_and_a_hint(told.stderr)
    assert told.stderr.startswith(f"refold: {head} is the head of stream 'engine-7', and verify reads 'main'\n")
