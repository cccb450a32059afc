"""Drafts on a model with weights: they change the work, and not one token of it."""

import itertools
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from refold import Engine, SamplingParams
from refold.engine.history.verify import verify_journal
from refold.journal.codec import decode
from refold.journal.events import Event, OutputDelivered, RequestPreempted, StaleOutputConsumed
from refold.journal.stores import open_reader
from tests.kit import tiny_llama

# Two prompts in one rhythm, one without any, one that fills blocks which another shares.
PROMPTS = [[7, 8, 9] * 8, [7, 8, 9] * 9 + [7], list(range(40, 75)), [*range(40, 75), 3, 3]]
ROOMY = {"num_blocks": 256, "block_size": 4, "worker": "thread", "threads": 1}
TIGHT = ROOMY | {"num_blocks": 27, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose next token hangs on few of the last ones: greedy output runs into loops, which can be looked up."""
    return str(tiny_llama.write_folder(tmp_path_factory.mktemp("tiny"), tiny_llama.tensors(seed=3)))


def generate(model: str, journal: Path, sampling: list[SamplingParams], **options: object) -> list[list[int]]:
    with Engine(model, str(journal), **options) as engine:  # type: ignore[arg-type]
        return [list(each.token_ids) for each in engine.run(PROMPTS, sampling)]


def verified_events(journal: Path) -> list[Event]:
    with closing(open_reader(str(journal))) as reader:
        assert verify_journal(reader)
        return [event for record in reader.read() for event in decode(record)]


@pytest.fixture(params=["greedy", "sampled", "penalised"])
def sampling(request: pytest.FixtureRequest) -> list[SamplingParams]:
    """The last kind looks at the tokens before: for a row behind a draft, at the draft too."""
    options = {
        "greedy": {"temperature": 0},
        "sampled": {"temperature": 0.7},
        "penalised": {
            "temperature": 0.3,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.05,
        },
    }[request.param]
    return [SamplingParams(seed=n, max_tokens=48, ignore_eos=True, **options) for n in range(4)]


def test_no_token_depends_on_drafts(tiny: str, tmp_path: Path, sampling: list[SamplingParams]) -> None:
    expected = generate(tiny, tmp_path / "off.db", sampling, **ROOMY)
    accepted = {}
    for kind, depth in itertools.product(("ngram", "worker"), (1, 3)):
        journal = tmp_path / f"{kind}{depth}.db"
        options = {"speculation": kind, "num_speculative_tokens": 4, "max_in_flight_steps": depth}
        assert generate(tiny, journal, sampling, **(ROOMY | options)) == expected, (kind, depth)
        delivered = [event for event in verified_events(journal) if isinstance(event, OutputDelivered)]
        accepted[kind, depth] = sum(sum(event.accepted_drafts) for event in delivered)
    if sampling[0].temperature == 0:
        assert min(accepted.values()) >= 15, accepted


def test_preemption_and_drafts_together_change_no_token_either(
    tiny: str, tmp_path: Path, sampling: list[SamplingParams]
) -> None:
    expected = generate(tiny, tmp_path / "off.db", sampling, **ROOMY)
    options = TIGHT | {"speculation": "worker", "num_speculative_tokens": 3, "max_in_flight_steps": 3}
    assert generate(tiny, tmp_path / "tight.db", sampling, **options) == expected
    kinds = {type(event) for event in verified_events(tmp_path / "tight.db")}
    assert RequestPreempted in kinds
    assert StaleOutputConsumed in kinds
