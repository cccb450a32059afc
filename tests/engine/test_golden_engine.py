"""The engine's greedy float32 output is the independent implementation's, whatever the schedule does.

The golden tokens were made once with Hugging Face transformers from the same file (tests/golden/make_golden_tokens.py).
By default a few prompts run under the hardest schedules; `make golden` (marker `golden`) runs all 20 x 48 tokens under
every schedule.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the model worker needs torch")

from refold import Engine, SamplingParams
from refold.engine.history.verify import verify_journal
from refold.journal.codec import decode
from refold.journal.events import OutputDelivered, RequestPreempted, StaleOutputConsumed, StepScheduled
from refold.journal.stores import open_reader

CASES = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text(encoding="utf-8"))[
    "cases"
]
ROOMY = {"num_blocks": 1024, "block_size": 16, "max_num_seqs": 20, "max_num_batched_tokens": 2048}
TIGHT = {"num_blocks": 80, "block_size": 8, "max_num_seqs": 20, "max_num_batched_tokens": 48}
SCHEDULES = {
    "alone, window 1": ROOMY | {"max_num_seqs": 1, "max_in_flight_steps": 1},
    "alone, window 3": ROOMY | {"max_num_seqs": 1, "max_in_flight_steps": 3},
    "batched, window 1": ROOMY | {"max_in_flight_steps": 1},
    "batched, window 3": ROOMY | {"max_in_flight_steps": 3},
    "chunked and preempted, window 1": TIGHT | {"max_in_flight_steps": 1},
    "chunked and preempted, window 3": TIGHT | {"max_in_flight_steps": 3},
    "drafts of the scheduler, window 1": ROOMY | {"speculation": "ngram", "max_in_flight_steps": 1},
    "drafts of the worker, window 3": ROOMY | {"speculation": "worker", "max_in_flight_steps": 3},
    "drafts, chunked and preempted": TIGHT | {"speculation": "worker", "num_speculative_tokens": 5},
}


def generate(tmp_path, schedule, cases):
    """Generate under a schedule; returns what differs from the golden tokens, and what the schedule did."""
    journal = f"sqlite:///{tmp_path / 'golden.db'}"
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with Engine(model="smollm2", journal=journal, **schedule) as engine:
        completions = engine.run([case["prompt_token_ids"] for case in cases], params)
    wrong = [
        case["prompt"][:40]
        for case, completion in zip(cases, completions, strict=True)
        if list(completion.token_ids) != case["output_token_ids"]
    ]
    seen = Counter()
    reader = open_reader(journal)
    for record in reader.read():
        for event in decode(record):
            match event:
                case StepScheduled():
                    seen["chunks"] += len(event.chunk_entries)
                    seen["hits"] += sum(bool(admission.hit_block_ids) for admission in event.admissions)
                    seen["largest batch"] = max(seen["largest batch"], len(event.handles))
                case OutputDelivered():
                    seen["accepted drafts"] += sum(event.accepted_drafts)
                case RequestPreempted():
                    seen["preemptions"] += 1
                case StaleOutputConsumed():
                    seen["stale"] += sum(event.delivered)
    assert verify_journal(reader)
    reader.close()
    return wrong, seen


def test_chunks_hits_and_preemptions_change_no_token(tmp_path):
    schedule = SCHEDULES["chunked and preempted, window 3"] | {"num_blocks": 28}
    wrong, seen = generate(tmp_path, schedule, CASES[10:13])
    assert wrong == []
    assert min(seen["chunks"], seen["hits"], seen["preemptions"]) > 0


def test_drafts_change_no_token(tmp_path):
    """A prompt in chunks, and one that repeats itself."""
    wrong, seen = generate(tmp_path, SCHEDULES["drafts, chunked and preempted"], [CASES[10], CASES[19]])
    assert wrong == []
    assert seen["chunks"] > 0
    assert seen["accepted drafts"] > 40


@pytest.mark.golden
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_golden_tokens(tmp_path, name):
    wrong, seen = generate(tmp_path, SCHEDULES[name], CASES)
    print(f"{name}: {len(CASES)} prompts x 48 tokens, {len(wrong)} differ; {dict(seen)}")
    assert wrong == []
    if "alone" in name:
        assert seen["largest batch"] == 1
    if "drafts" in name:
        assert seen["accepted drafts"] > 0
    if "preempted" in name:
        assert min(seen["chunks"], seen["hits"], seen["preemptions"]) > 0
