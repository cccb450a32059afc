"""A standing quarantine: one line a content, told where one looks, lifted by any of its requests."""

import json
import shutil
from pathlib import Path

import pytest

from refold import Engine, Rejected, SamplingParams
from refold.engine.quarantine import lift_at_rest
from refold.gpu.batch import StepOutput, WorkOrder
from refold.gpu.simulated import SimulatedWorker
from tests.cli.command import assert_one_line_and_a_hint, refold, rows

MODEL, POISON = "simulated?eos=-1", [666, 1, 2]


class Poisoned(SimulatedWorker):
    """Dies of a prompt that begins with 666."""

    def execute(self, order: WorkOrder) -> StepOutput:
        output = super().execute(order)
        if any(self._slots[handle].tokens[0] == 666 for handle in order.scheduled.handles):
            raise RuntimeError("segmentation fault")
        return output


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three completions of one prompt killed their workers; a fourth request was served."""
    path = tmp_path_factory.mktemp("quarantine") / "run.db"
    with Engine(MODEL, path, make_worker=Poisoned) as engine:
        bad = engine.enqueue(POISON, SamplingParams(n=3, max_tokens=4), request_id="bad")
        engine.enqueue([1, 2], SamplingParams(max_tokens=40), request_id="good")
        assert {each.finish_reason for each in engine.wait([bad])[0].choices or engine.wait([bad])} == {"error"}
        engine.wait(["good"])
        assert engine.quarantined() == ["bad#0", "bad#1", "bad#2"]
    return path


@pytest.fixture
def journal(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "run.db"))


def test_one_content_is_one_line_with_all_that_were_found_out(journal: Path) -> None:
    assert refold("quarantine", journal).stdout == "bad#0, bad#1, bad#2\n"
    (row,) = rows(refold("quarantine", "--json", journal).stdout)
    assert row["request_ids"] == ["bad#0", "bad#1", "bad#2"]


@pytest.mark.parametrize("request_id", ["bad#0", "bad#1", "bad#2"])
def test_any_of_them_lifts_it_at_rest(journal: Path, request_id: str) -> None:
    assert refold("quarantine", "--lift", request_id, journal).exit_code == 0
    assert refold("quarantine", journal).stdout == "nothing is quarantined\n"
    assert refold("verify", journal).exit_code == 0


def test_a_lift_says_that_the_journals_mark_is_damaged(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = journal.with_name(journal.name + ".mark")
    mark.write_bytes(bytes(64))
    lift_at_rest(str(journal), "bad#1")
    logged = json.loads(capsys.readouterr().err)
    assert (logged["event"], logged["journal"]) == ("mark_ignored", str(journal))
    assert logged["reason"].startswith(f"{mark} holds no mark")


def test_any_of_them_lifts_it_in_a_live_engine(journal: Path) -> None:
    with Engine(MODEL, journal) as engine:
        with pytest.raises(Rejected, match="'good' asked for is quarantined, and 1 other content is"):
            engine.lift_quarantine("good")
        engine.lift_quarantine("bad#1")
        assert engine.quarantined() == []
        assert engine.run([POISON], SamplingParams(max_tokens=2))[0].finish_reason == "length"


def test_a_standing_quarantine_is_told_where_one_looks(journal: Path) -> None:
    for verb in ("stat", "verify"):
        done = refold(verb, journal)
        assert done.exit_code == 0, "it is no violation"
        assert "1 content is quarantined, for killing workers: `refold quarantine " in done.stdout
        assert rows(refold(verb, "--json", journal).stdout)[0]["num_quarantined"] == 1
    assert rows(refold("stat", "--events", "--json", journal).stdout)[0]["num_quarantined"] == 1
    lines = "\n".join(json.dumps({"prompt": prompt, "sampling": {"max_tokens": 2}}) for prompt in (POISON, [7]))
    done = refold("run", "--model", MODEL, "--journal", journal, "-", stdin=lines)
    assert done.exit_code == 2
    assert "quarantined: what bad#0, bad#1, bad#2 asked for, which killed workers" in done.stderr
    assert "stdin line 1: " in done.stderr
    refold("quarantine", "--lift", "bad#0", journal)
    for verb in ("stat", "verify"):
        assert "quarantined" not in refold(verb, journal).stdout


def test_lifting_what_is_not_quarantined_is_refused_without_a_word_of_starting(journal: Path) -> None:
    done = refold("quarantine", "--lift", "good", journal)
    assert done.exit_code == 2
    assert_one_line_and_a_hint(done.stderr)
    assert "started" not in done.stderr
    assert done.stderr.splitlines()[1] == "  hint: quarantined is what 'bad#0', 'bad#1', 'bad#2' asked for"


def test_lifting_for_a_request_that_is_not_there_is_not_found_and_names_those_that_are_kept_out(journal: Path) -> None:
    done = refold("quarantine", "--lift", "bed#0", journal)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        "refold: no request 'bed#0' in this journal",
        "  hint: it has 'bad#0', 'bad#1', 'bad#2'",
    ]
    refold("quarantine", "--lift", "bad#0", journal)
    assert "it has 'good'" in refold("quarantine", "--lift", "god", journal).stderr
