"""Capsules: the schedule stays, the words go, and one from a stranger does no harm."""

import gzip
import io
import os
import random
from pathlib import Path

import msgspec
import pytest

from refold.engine.history import capsule as module
from refold.engine.history.capsule import read_capsule, redacted, write_capsule
from refold.engine.history.redecide import divergences
from refold.engine.history.replay import Contradiction
from refold.engine.history.sealing import sealed_records
from refold.engine.history.verify import verify_journal
from refold.journal.codec import decode
from refold.journal.errors import JournalError, SchemaTooNew
from refold.journal.events import EngineOpened, RequestSubmitted, StateDigest, StepScheduled
from tests.history.journals import eventful_lives, sealed
from tests.history.readers import ListReader
from tests.kit.capsule_fuzz import Watch, campaign
from tests.kit.simulation import Simulation

FUZZ_S = float(os.environ.get("REFOLD_FUZZ_S", "4"))


def packed(reader) -> bytes:
    target = io.BytesIO()
    write_capsule(reader, target, note="for you")
    return target.getvalue()


def unpacked(path: Path, data: bytes):
    path.write_bytes(data)
    _, records = read_capsule(path)
    return list(sealed_records(records))


@pytest.fixture(scope="module")
def original():
    lives, _ = eventful_lives()
    return sealed(lives)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "bug.capsule"


def life(seed):
    simulation = Simulation(seed)
    simulation.play()
    return sealed([simulation.drive.records])


@pytest.mark.parametrize("seed", range(10))
def test_the_schedule_is_intact_to_the_last_block(seed, file):
    """Sessions, grammars, media, drafts, tenants, crashes: the capsule is lawful and decided again, like the journal."""
    records = life(seed)
    hidden = unpacked(file, packed(ListReader(records)))
    verdict = verify_journal(ListReader(hidden), redecide=True)
    assert verdict.num_decided == len(records)
    assert list(divergences(ListReader(hidden))) == []
    for one, other in zip(records, hidden, strict=True):
        pairs = zip(decode(one), decode(other), strict=True)
        assert all(type(a) is type(b) for a, b in pairs)
        steps = [[e for e in decode(r) if isinstance(e, StepScheduled)] for r in (one, other)]
        for a, b in zip(*steps, strict=True):
            assert (a.handles, a.num_tokens, a.allocations, a.admissions, a.evicted_block_ids) == (
                b.handles,
                b.num_tokens,
                b.allocations,
                b.admissions,
                b.evicted_block_ids,
            )


def test_distances_in_time_stay_and_the_date_goes(original, file):
    hidden = unpacked(file, packed(ListReader(original)))
    assert {b.time_ns - a.time_ns for a, b in zip(original, hidden, strict=True)} == {
        hidden[0].time_ns - original[0].time_ns
    }
    assert hidden[0].time_ns == 946_684_800_000_000_000


def test_equal_tokens_stay_equal_and_others_stay_others(original, file):
    hidden = unpacked(file, packed(ListReader(original)))
    told = {}
    for one, other in zip(original, hidden, strict=True):
        for a, b in zip(decode(one), decode(other), strict=True):
            for field in ("token_ids", "prompt_token_ids"):
                for x, y in zip(getattr(a, field, []), getattr(b, field, []), strict=True):
                    assert told.setdefault(x, y) == y
    assert len(set(told.values())) == len(told)
    assert sum(x != y for x, y in told.items()) > len(told) // 2


def test_no_name_and_no_text_is_left(file):
    secrets = ("client-secret", "salt-secret", "tenant-secret", "adapter-secret", "simulated")
    from tests.kit.drive import Drive, config

    drive = Drive(config(policy="fair_share", tenant_weights={"tenant-secret": 3}))
    drive.open()
    drive.submit("client-secret", 9, cache_salt="salt-secret", tenant="tenant-secret", adapter="adapter-secret")
    drive.run()
    data = packed(ListReader(sealed([drive.records])))
    text = gzip.decompress(data).decode()
    assert not [secret for secret in secrets if secret in text]
    assert "req-1" in text
    hidden = unpacked(file, data)
    opened = next(e for e in decode(hidden[0]) if isinstance(e, EngineOpened))
    submitted = next(e for r in hidden for e in decode(r) if isinstance(e, RequestSubmitted))
    assert opened.config.tenant_weights == {submitted.tenant: 3}


def test_two_capsules_of_one_journal_have_two_permutations(original):
    first, second = (gzip.decompress(packed(ListReader(original))) for _ in range(2))
    assert first != second


def test_a_wrong_digest_stays_wrong(file):
    lives, _ = eventful_lives()
    lives[1][-2] = [StateDigest(digest="f" * 64)]
    hidden = unpacked(file, packed(ListReader(sealed(lives))))
    with pytest.raises(Contradiction) as caught:
        verify_journal(ListReader(hidden))
    assert caught.value.law == "L11"
    assert caught.value.position == len(lives[0]) + len(lives[1]) - 2


def test_a_journal_that_contradicts_itself_is_packed_whole(original):
    records = [*original[:40], *original[41:]]
    lives = [[decode(record) for record in records]]
    assert len(list(redacted(sealed(lives)))) == len(records)


# -- from a stranger --------------------------------------------------------------------------------------------------


def lines(*rows: bytes) -> bytes:
    return gzip.compress(b"\n".join(rows) + b"\n")


HEADER = b'{"refold_capsule":1,"schema_version":%d,"num_records":%d,"note":""}'


def header(count: int = 1, schema: int = module.SCHEMA_VERSION) -> bytes:
    return HEADER % (schema, count)


def opened(**changes: object) -> bytes:
    from tests.kit.drive import config

    event = EngineOpened(engine_epoch=1, refold_version="x", root_seed=0, config=config(**changes))
    return msgspec.json.encode({"epoch": 1, "time_ns": 1, "events": [msgspec.to_builtins(event)]})


STRANGE = {
    "nothing": b"",
    "no gzip": b"hello",
    "a zip": b"PK\x03\x04" + bytes(100),
    "a pickle": b"\x80\x04\x95" + bytes(50),
    "no header": lines(b"{}"),
    "not even JSON": lines(b"{{{"),
    "a deep header": lines(b"[" * 100_000),
    "a header of its own": lines(b'{"refold_capsule":1,"schema_version":2,"num_records":1,"path":"../../etc"}'),
    "too few records": lines(header(3), opened()),
    "too many records": lines(header(1), opened(), opened()),
    "a negative number of them": lines(header(-1)),
    "a huge number of them": lines(header(10**18)),
    "a deep record": lines(header(), b'{"epoch":1,"time_ns":1,"events":' + b"[" * 200_000),
    "a deep event": lines(header(), b'{"epoch":1,"time_ns":1,"events":[{"a":' + b"[" * 200_000),
    "deep where a field is": lines(
        header(), b'{"epoch":1,"time_ns":1,"events":[{"type":"StateDigest","digest":' + b'{"a":' * 90_000
    ),
    "an unknown event": lines(header(), b'{"epoch":1,"time_ns":1,"events":[{"type":"os.system"}]}'),
    "an unknown field": lines(header(), b'{"epoch":1,"time_ns":1,"events":[],"x":1}'),
    "no events": lines(header(), b'{"epoch":1,"time_ns":1,"events":[]}'),
    "a huge pool": lines(header(), opened(num_blocks=10**12)),
    "a block of nothing": lines(header(), opened(block_size=0)),
    "a huge time": lines(header(), b'{"epoch":1,"time_ns":9223372036854775807,"events":[{"type":"EngineResumed"}]}'),
    "a huge epoch": lines(header(), b'{"epoch":18446744073709551615,"time_ns":0,"events":[{"type":"EngineResumed"}]}'),
    "a number of ten thousand digits": lines(header(), b'{"epoch":1,"time_ns":' + b"9" * 10_000 + b',"events":[]}'),
    "an epoch that falls": lines(header(2), opened().replace(b'"epoch":1', b'"epoch":5', 1), opened()),
    "cut off": lines(header(), opened())[:-9],
    "something behind it": lines(header(), opened()) + b"more",
    "two files in one": lines(header(), opened()) * 2,
    "bad text": lines(header(), b'{"epoch":1,"time_ns":1,"events":[{"type":"StateDigest","digest":"\xff\xfe"}]}'),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_file_is_refused_in_one_line(name, file):
    with pytest.raises(JournalError) as caught:
        unpacked(file, STRANGE[name])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert [each.name for each in file.parent.iterdir()] == [file.name], "nothing was written"


def test_a_capsule_of_a_newer_refold_says_so(file):
    with pytest.raises(SchemaTooNew, match="newer refold"):
        unpacked(file, lines(header(schema=99), opened()))


def test_a_bomb_is_stopped_before_it_fills_the_memory(file, monkeypatch):
    """A megabyte that unpacks to a gigabyte: one endless line, then many short ones."""
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(module, "MAX_BYTES", 8 << 20)
    with pytest.raises(JournalError, match="line of more than"):
        unpacked(file, gzip.compress(header() + b"\n" + b" " * (8 << 20)))
    with pytest.raises(JournalError, match=r"unpacks to more than|no record"):
        unpacked(file, gzip.compress(header(10**7) + b"\n" + (b" " * 1000 + b"\n") * 16_000))


def test_a_folder_and_nothing_are_no_capsules(tmp_path):
    for path, said in {tmp_path: f"{tmp_path.name} is a folder", tmp_path / "none": "No such file"}.items():
        with pytest.raises(JournalError, match=said):
            read_capsule(path)


def test_fuzzed_capsules_are_journals_or_are_refused(tmp_path):
    """A short campaign; `make fuzz` runs it for an hour."""
    found = []
    rng, watch = random.Random(os.environ.get("REFOLD_FUZZ_SEED", "1")), Watch()
    ends = campaign(rng, FUZZ_S, tmp_path, watch, lambda text, data: found.append(text), by_users=0)
    assert found == []
    assert ends.total() > 20
    assert any(end.startswith("opened") for end in ends)


def test_the_watch_sees_what_a_capsule_must_not_do(tmp_path):
    watch = Watch()
    with watch.on(tmp_path):
        (tmp_path / "inside").write_text("fine")
        with pytest.raises(FileNotFoundError):
            (tmp_path.parent / "no-such-folder" / "outside").write_text("not fine")
        os.system("true")
    assert [each.split("(")[0] for each in watch.broken[1:]] == ["os.system"]
    assert "outside" in watch.broken[0]


def test_a_message_about_a_huge_record_is_short(file):
    """A stranger may say that a thousand steps were lost: the line that says so isn't as long."""
    from refold.journal.events import WorkerLost

    rows = gzip.decompress(packed(ListReader(life(0)))).splitlines()[1:9]
    lost = WorkerLost(generation=2, steps=[0] * 3000, handles=[], reason="x")
    row = msgspec.json.encode({"epoch": 1, "time_ns": 2, "events": [msgspec.to_builtins(lost)]})
    with pytest.raises(Contradiction) as caught:
        verify_journal(ListReader(unpacked(file, lines(header(len(rows) + 1), *rows, row))), redecide=True)
    assert len(str(caught.value)) < 600
