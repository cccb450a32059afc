"""The head of each production trace, through the core, with every law after every event."""

import pytest

from benchmarks.traces import DATA, azure, engine_config, mooncake, play


@pytest.mark.skipif(not DATA.is_dir(), reason="the traces are not here")
@pytest.mark.parametrize(("trace", "count"), [(azure, 40), (mooncake, 12)])
def test_the_head_of_a_trace_finishes_under_pressure(trace, count) -> None:
    arrivals = [arrival._replace(at_s=0.0) for arrival in trace()[:count]]
    longest = max(a.num_prompt_tokens + a.max_tokens for a in arrivals)
    run, _ = play(arrivals, engine_config(-(-longest * 5 // 4 // 16), longest), check_every=97)
    assert run.finished == count
    assert run.preemptions if trace is azure else run.hit_tokens
