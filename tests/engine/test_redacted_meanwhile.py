"""Whoever reads a journal while requests of it are redacted sees some records from before and some from after, and no damage in that."""

import threading
import time

import pytest

from refold.engine.engine import Engine
from refold.engine.history.verify import verify_journal
from refold.engine.sampling_params import SamplingParams
from refold.journal.stores import open_reader
from tests.cli.command import refold

REQUESTS = [f"r{number}" for number in range(36)]


@pytest.mark.parametrize("kind", ["sqlite", "segments", "postgresql"])
def test_no_reader_takes_a_redaction_under_way_for_damage(kind, tmp_path, request):
    url = {"sqlite": str(tmp_path / "j.db"), "segments": f"{tmp_path}/j/"}.get(kind)
    url = url or request.getfixturevalue("postgres_server").empty()
    failures = []
    with Engine("simulated", url, num_blocks=400, block_size=4).open() as engine:
        engine.run([f"prompt {name}" for name in REQUESTS], SamplingParams(max_tokens=12, seed=1), request_ids=REQUESTS)

        def redact():
            for name in reversed(REQUESTS):
                time.sleep(0.05)
                try:
                    engine.redact(name)
                except Exception as error:  # noqa: BLE001 - to be told by the test
                    failures.append(repr(error))

        thread = threading.Thread(target=redact)
        thread.start()
        num_readings = 0
        while thread.is_alive():
            reader = open_reader(url)
            try:
                verify_journal(reader, redecide=bool(num_readings % 2))
            finally:
                reader.close()
            for verb in (("log",), ("request", "r1"), ("show",)):
                told = refold(*verb, url)
                assert told.exit_code == 0, (verb, told.stderr)
            num_readings += 1
        thread.join()
    assert not failures
    assert num_readings
    assert refold("verify", "--redecide", url).exit_code == 0


@pytest.mark.parametrize("redacted", [["r35"], REQUESTS[::2], REQUESTS[5:30]])
def test_a_step_that_shared_an_erased_prefix_can_not_be_decided_again_and_is_no_divergence(redacted, tmp_path):
    url = str(tmp_path / "j.db")
    with Engine("simulated", url, num_blocks=400, block_size=4).open() as engine:
        engine.run([f"prompt {name}" for name in REQUESTS], SamplingParams(max_tokens=12, seed=1), request_ids=REQUESTS)
        for name in redacted:
            engine.redact(name)
    reader = open_reader(url)
    verdict = verify_journal(reader, redecide=True)
    reader.close()
    assert verdict.num_forgotten > 0
    assert verdict.num_decided > verdict.num_forgotten
