"""Engines killed with SIGKILL: no request is lost, no token is lost, repeated or seen before it is durable."""

import os
import random

import pytest

from tests.engine.crash_campaign import campaign


def test_twenty_engines_killed_at_random_instants_lose_and_repeat_nothing() -> None:
    tally = campaign(kills=20, seed=20)
    assert tally.kills == 20
    assert tally.recovered > 0, "a campaign that recovers nothing proves nothing"


def test_engines_on_segment_files_lose_and_repeat_nothing_either() -> None:
    tally = campaign(kills=10, seed=21, journal_name="journal/")
    assert tally.kills == 10
    assert tally.recovered > 0


@pytest.mark.crash
def test_a_long_campaign_of_kills_loses_and_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    kills, seed = int(os.environ.get("REFOLD_KILLS", "200")), random.SystemRandom().randrange(1 << 32)
    with capsys.disabled():
        print(f"\nseed {seed}", flush=True)
        print(campaign(kills, seed).summary(), flush=True)
