"""The campaign of `determinism_campaign.py` in small: a tiny model under the hardest of its schedules."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from tests.gpu.determinism_campaign import SCHEDULES, campaign, requests_of
from tests.kit import tiny_llama

PROMPTS = [[7, 8, 9] * 8, [7, 8, 9] * 9 + [7], list(range(40, 75)), [*range(40, 75), 3, 3], [5], list(range(150))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_schedule_changes_a_token_or_a_row_of_logits(tmp_path: Path, dtype: str) -> None:
    model = str(tiny_llama.write_folder(tmp_path / "tiny", tiny_llama.tensors(seed=3)))
    names = [name for name in SCHEDULES if name != "SIGKILL"]
    for found, _ in campaign(model, tmp_path, requests_of(PROMPTS, 32), names, dtype):
        assert (found.tokens_differ, found.rows_differ) == (0, 0), found
        assert found.num_tokens == found.num_rows == 6 * 32
        if "preemption" in found.name:
            assert found.did["preemptions"] > 0
        if "drafts" in found.name:
            assert found.did["accepted"] > 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.crash)])
def test_a_kill_in_the_middle_changes_none_either(tmp_path: Path, dtype: str) -> None:
    model = str(tiny_llama.write_folder(tmp_path / "tiny", tiny_llama.tensors(seed=3)))
    found, _ = list(campaign(model, tmp_path, requests_of(PROMPTS, 200), ["SIGKILL"], dtype))[-1]
    assert (found.tokens_differ, found.rows_differ) == (0, 0), found
    assert found.did["lost workers"] == 1
