"""What a model with weights computed is computed again by another process, bit by bit."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from refold import Engine, SamplingParams
from refold.engine.history.reexecution import reexecute
from refold.engine.history.verify import verify_journal
from refold.engine.successors import Successors
from refold.journal.codec import decode
from refold.journal.errors import Rejected
from refold.journal.events import LogitsRecorded, RequestPreempted, StepScheduled, WorkerStarted
from refold.journal.stores import open_reader
from tests.cli.command import finished
from tests.kit import tiny_llama

PROMPTS = [[7, 8, 9] * 8, [7, 8, 9] * 9 + [7], list(range(40, 75)), [*range(40, 75), 3, 3]]
HARD = {
    "num_blocks": 27,
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_in_flight_steps": 3,
    "speculation": "worker",
    "record_logits": True,
    "worker": "thread",
    "threads": 1,
}


def run_hard(model: str, journal: Path, dtype: str) -> None:
    """Two lives: chunks, prefix hits, preemptions, drafts, greedy and sampled requests in one batch."""
    for life in range(2):
        sampling = [SamplingParams(seed=n, temperature=0.8 * (n % 2), max_tokens=40, ignore_eos=True) for n in range(4)]
        with Engine(model, str(journal), dtype=dtype, **HARD) as engine:  # type: ignore[arg-type]
            engine.run(PROMPTS[life:], sampling[life:])


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def journal(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("again")
    model = str(tiny_llama.write_folder(folder / "tiny", tiny_llama.tensors(seed=3)))
    run_hard(model, folder / "run.db", request.param)
    return folder / "run.db"


def worker_of(journal: Path) -> dict[str, str]:
    with closing(open_reader(str(journal))) as reader:
        events = [event for record in reader.read() for event in decode(record)]
    return next(event.environment for event in events if isinstance(event, WorkerStarted))


def test_another_process_computes_the_same_bits(journal: Path) -> None:
    if "bfloat16" in str(worker_of(journal)):
        pytest.skip("the next test computes it again, too")
    status, stdout, stderr = finished("replay", "--execute", "--json", str(journal), timeout=300)
    assert status == 0, stderr
    found = json.loads(stdout)
    assert (found["ok"], found["first"], found["differences"]) == (True, None, {})
    assert (found["num_workers"], found["num_tokens"]) == (2, 7 * 40)
    assert found["num_rows"] >= 7 * 40
    with closing(open_reader(str(journal))) as reader:
        assert verify_journal(reader, redecide=True).num_forgotten == 0
        events = [event for record in reader.read() for event in decode(record)]
    assert any(isinstance(event, RequestPreempted) for event in events)
    steps = [event for event in events if isinstance(event, StepScheduled)]
    assert any(step.chunk_entries for step in steps)
    assert any(admission.hit_block_ids for step in steps for admission in step.admissions)
    assert sum(len(event.digests) for event in events if isinstance(event, LogitsRecorded)) == found["num_rows"]


def test_other_weights_are_not_tried(journal: Path, tmp_path: Path) -> None:
    other = str(tiny_llama.write_folder(tmp_path / "other", tiny_llama.tensors(seed=4)))
    with closing(open_reader(str(journal))) as reader, pytest.raises(Rejected, match="the journal was written with"):
        reexecute(reader, Successors(other).make)


def test_a_changed_number_of_logits_is_found_at_its_place(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose logits differ in one bit, in one step: no token changes, and it is found all the same."""
    from refold.gpu import worker as torch_worker

    calls = 0

    def digests_of_a_broken_row(rows):
        nonlocal calls
        calls += 1
        if calls == 12 and len(rows):
            rows = rows.copy()
            rows.view("uint32")[0, 3] ^= 1
        return digest_rows(rows)

    digest_rows = torch_worker.digest_rows
    monkeypatch.setattr(torch_worker, "digest_rows", digests_of_a_broken_row)

    def in_this_process(config, environment):
        from refold.gpu.factory import create_worker

        return create_worker(config, threads=1, dtype=environment["dtype"])

    with closing(open_reader(str(journal))) as reader:
        found = reexecute(reader, in_this_process)
    assert found.num_rows_different == 1
    assert found.first is not None
    assert (found.first.what, found.num_tokens) == ("logits", 7 * 40)


def test_int8_is_computed_again_in_int8(tmp_path: Path) -> None:
    model = str(tiny_llama.write_folder(tmp_path / "tiny", tiny_llama.tensors(seed=3)))
    options = {**HARD, "dtype": "int8"}
    try:
        with Engine(model, str(tmp_path / "run.db"), **options) as engine:  # type: ignore[arg-type]
            engine.run(PROMPTS[:1], SamplingParams(max_tokens=6, ignore_eos=True))
    except Rejected as error:
        pytest.skip(f"no compiler here: {error}")
    with closing(open_reader(str(tmp_path / "run.db"))) as reader:
        found = reexecute(reader, Successors(None).make)
    assert (found.first, found.differences, found.num_tokens) == (None, {}, 6)


def test_a_journal_without_its_tail_is_not_equal(tmp_path: Path) -> None:
    journal = tmp_path / "run.db"
    with Engine("simulated", str(journal)) as engine:
        engine.run(["one", "two"], SamplingParams(max_tokens=8))
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("DELETE FROM journal_records WHERE position > 12")
    status, stdout, stderr = finished("replay", "--execute", str(journal))
    assert (status, stdout) == (3, "")
    assert "its tail was cut off" in stderr or "records were there" in stderr
