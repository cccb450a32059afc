"""What is redacted in a journal is erased from its copies with the next copying, and a copy that isn't made anew verifies all the same."""

import contextlib
import json
import signal
import threading
from pathlib import Path

import pytest

from refold.engine.engine import Engine
from refold.engine.redacting import redact_at_rest
from refold.engine.sampling_params import SamplingParams
from refold.journal import copying
from refold.journal.copying import copy_on, copy_stream, verify_copy
from refold.journal.errors import RefoldError, Rejected
from refold.journal.record import head_after
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.memory import MemoryStore
from refold.migrations import ensure
from tests.cli.command import process, refold
from tests.cli.test_cli_keeping import eventually

KINDS = ("sqlite", "segments", "postgresql")
WORD = 12_345_678


@pytest.fixture
def original(tmp_path):
    """Two requests; the first was told a word that nobody else knows."""
    url = str(tmp_path / "original.db")
    with Engine("simulated?vocab=16000000", url, snapshot_every_records=16).open() as engine:
        engine.run([[WORD] * 40, [3] * 5], SamplingParams(max_tokens=20, seed=4), request_ids=["gone", "kept"])
    return url


@pytest.fixture(params=KINDS)
def target(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_server").empty()
    return f"{tmp_path}/copy{'.db' if request.param == 'sqlite' else '/'}"


def records(url):
    with contextlib.closing(open_reader(url)) as reader:
        return list(reader.read())


def test_a_copy_forgets_what_the_original_has_redacted_since(original, target):
    assert refold("copy", original, target).exit_code == 0
    assert refold("audit", "requests", target).exit_code == 0
    for request_id in ("gone", "kept"):
        redact_at_rest(original, request_id)
        told = refold("copy", original, target)
        assert told.exit_code == 0, told.stderr
        assert "erased here too: what 1 redaction erased there since it was copied" in told.stdout
        assert ("VACUUM FULL" in told.stdout) == target.startswith("postgresql")
        assert records(target) == records(original)
        assert refold("verify", target).exit_code == 0
        (said,) = json.loads(f"[{refold('sql', '--json', target, _TOLD.format(request_id)).stdout.strip()}]")
        assert said == {"kept": 0}
    with Engine("simulated?vocab=16000000", target).open() as engine:
        engine.run(["three"])


_TOLD = "SELECT COUNT(token_id) AS kept FROM tokens WHERE request_id = '{}'"


def test_nothing_of_a_redacted_word_is_left_in_the_files_of_a_copy(original, tmp_path):
    for target in (str(tmp_path / "copy.db"), f"{tmp_path}/copy/"):
        assert refold("copy", original, target).exit_code == 0
    redact_at_rest(original, "gone")
    for target in (str(tmp_path / "copy.db"), f"{tmp_path}/copy/"):
        assert refold("copy", original, target).exit_code == 0
    said = str(WORD).encode()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or said not in path.read_bytes(), path


def test_a_redaction_on_its_way_with_the_records_that_it_is_about_is_kept(original, target, monkeypatch):
    """They were read before it, and are in one batch with it."""
    ensure(target)
    before = records(original)
    redact_at_rest(original, "gone")
    after = records(original)
    told = before + after[len(before) :]

    class Raced:
        """The original, read by somebody who was overtaken by the redaction; later reads see it."""

        is_first = True

        def __init__(self, reader):
            self.reader, self.place = reader, original

        def head(self, stream="main"):
            return self.reader.head(stream)

        def read(self, stream="main", start=0, stop=None):
            found, Raced.is_first = (
                (told if Raced.is_first and stop != start + 1 else after),
                Raced.is_first and stop == start + 1,
            )
            yield from found[start:stop]

    with contextlib.closing(open_store(target)) as store, contextlib.closing(open_reader(original)) as reader:
        erased = []
        copied = copy_stream(Raced(reader), store, "main", on_erased=erased.append)
        assert len(erased) == 1
        verify_copy(store, "main", copied.head)
        assert list(store.read()) == after


def test_a_redaction_that_the_original_is_not_through_with_is_waited_for(original, target):
    assert refold("copy", original, target).exit_code == 0
    before = records(original)
    redact_at_rest(original, "gone")

    class Late:
        """The original, which shows the redaction, and for three more looks what it is about to erase."""

        num_looks = 0

        def __init__(self, reader):
            self.reader, self.place = reader, original

        def head(self, stream="main"):
            return self.reader.head(stream)

        def read(self, stream="main", start=0, stop=None):
            if stop == start + 1 and 0 < start < len(before) - 1:
                self.num_looks += 1
                if self.num_looks <= 3:
                    return iter(before[start:stop])
            return self.reader.read(stream, start, stop)

    with contextlib.closing(open_store(target)) as store, contextlib.closing(open_reader(original)) as reader:
        copied = copy_stream(Late(reader), store, "main")
        verify_copy(store, "main", copied.head)
    assert records(target) == records(original)


def test_a_copy_that_has_the_redaction_already_is_left_as_it_is(original, target):
    redact_at_rest(original, "gone")
    for _ in range(2):
        told = refold("copy", "--json", original, target)
        assert told.exit_code == 0, told.stderr
        row = json.loads(told.stdout)
        assert (row["num_redactions"], row["erased_left"]) == (0, "")
    assert records(target) == records(original)


@pytest.mark.parametrize("stop", [1, 20, -1])
def test_a_copy_that_was_interrupted_anywhere_forgets_too(original, target, stop, monkeypatch):
    monkeypatch.setattr(copying, "BATCH_RECORDS", 7)
    ensure(target)
    some = records(original)[:stop]
    with contextlib.closing(open_store(target)) as store, contextlib.closing(open_reader(original)) as reader:
        copy_on(reader, store, "main", store.open_replica(), head_after(some[-1]))
    redact_at_rest(original, "gone")
    redact_at_rest(original, "kept")
    assert refold("copy", original, target).exit_code == 0
    assert records(target) == records(original)


def test_a_store_that_can_not_erase_is_told_so_before_it_has_the_redaction(original):
    class Keeper(MemoryStore):
        erase_content = None

    keeper = Keeper()
    with contextlib.closing(open_reader(original)) as reader:
        copy_stream(reader, keeper, "main")
    num_records = keeper.head().position
    redact_at_rest(original, "gone")
    with contextlib.closing(open_reader(original)) as reader, pytest.raises(Rejected, match="copy to a new journal"):
        copy_stream(reader, keeper, "main")
    assert keeper.head().position == num_records


def test_whoever_follows_is_told_and_the_follower_killed_at_any_moment_goes_on(tmp_path):
    source, target = str(tmp_path / "live.db"), str(tmp_path / "copy.db")
    with Engine("simulated?vocab=16000000", source).open() as engine:
        engine.run([[WORD] * 40], SamplingParams(max_tokens=5), request_ids=["gone"])
        child = process("copy", "--follow", source, target)
        eventually(lambda: Path(target).exists() and _position(target) == _position(source), 30)
        assert engine.redact("gone").left == ""
        too_late = threading.Timer(30, child.kill)
        too_late.start()
        assert any(b"erased here too: what 1 redaction erased there" in line for line in child.stderr)
        too_late.cancel()
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=30) == 0
        assert records(target) == records(source)
        engine.run(["more"])
        child = process("copy", "--follow", source, target)
        child.kill()
        child.wait()
    assert refold("copy", source, target).exit_code == 0
    assert records(target) == records(source)


def _position(url):
    try:
        with contextlib.closing(open_reader(url)) as reader:
            return reader.head().position
    except RefoldError:  # it is being made
        return -1
