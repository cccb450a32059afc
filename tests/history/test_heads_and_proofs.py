"""Heads that are kept and proofs of single records: what they find, and what forgers can't do."""

import os

import msgspec
import pytest

from refold.engine.history import heads
from refold.engine.history.heads import ExportedHead, check_root, encoded, export, read_head, write_head
from refold.engine.history.proofs import Disproved, check_proof, decode_proof, prove
from refold.journal.codec import encode
from refold.journal.errors import JournalCorrupt, JournalError, NotFound, Rejected
from refold.journal.events import DraftsProposed
from refold.journal.merkle import root_of
from refold.journal.record import head_after, seal
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from tests.journal.test_erasure import redaction


@pytest.fixture
def journal():
    return MemoryJournal()


@pytest.fixture
def store(journal):
    store = MemoryStore(journal)
    grow(store, store.open_stream(), 21)
    return store


def grow(store, head, count):
    for _ in range(count):
        event = DraftsProposed(handle=1, token_ids=[head.position, 7])
        head = store.append("main", [seal(head, head.position, *encode([event], f"{head.position}"))])
    return head


@pytest.fixture
def exported(store):
    return export("main", store.head(), 5, root=root_of(r.hash for r in store.read()))


@pytest.fixture
def keys(tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    paths = []
    for name in ("ours", "theirs"):
        key = Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub.pem"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        public.write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        paths += [private, public]
    return paths


# -- heads ------------------------------------------------------------------------------------------------------------


def test_a_head_comes_back_from_its_file(tmp_path, exported):
    path = tmp_path / "x.head"
    write_head(path, exported)
    assert read_head(path) == exported
    assert [file.name for file in tmp_path.iterdir()] == ["x.head"]
    write_head(path, exported)


def test_a_head_that_can_not_be_written(tmp_path, exported):
    with pytest.raises(JournalError, match="cannot write the head"):
        write_head(tmp_path / "none" / "x.head", exported)
    (tmp_path / "folder").mkdir()
    with pytest.raises(JournalError, match="cannot write the head"):
        write_head(tmp_path / "folder", exported)
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_signed_head_is_believed_with_its_key_alone(tmp_path, store, keys):
    private, public, _, their_public = keys
    signed = export("main", store.head(), 5, root=b"\1" * 32, key=private)
    path = tmp_path / "x.head"
    write_head(path, signed)
    assert read_head(path, public) == read_head(path, private) == read_head(path) == signed
    with pytest.raises(Rejected, match="another key"):
        read_head(path, their_public)


@pytest.mark.parametrize(
    "change",
    [
        {"position": 20},
        {"hash": "00" * 32},
        {"root": "00" * 32},
        {"root": ""},
        {"engine_epoch": 9},
        {"time_ns": 6},
        {"stream": "other"},
        {"signature": "00" * 64},
        {"signature": "zz"},
        {"signature": ""},
    ],
    ids=repr,
)
def test_whatever_is_changed_in_a_signed_head_is_found(tmp_path, store, keys, change):
    private, public, *_ = keys
    signed = export("main", store.head(), 5, root=b"\1" * 32, key=private)
    write_head(tmp_path / "x.head", msgspec.structs.replace(signed, **change))
    with pytest.raises(Rejected, match="don't trust it"):
        read_head(tmp_path / "x.head", public)


def test_a_head_that_someone_else_signed_in_our_name_is_found(tmp_path, store, keys):
    _, public, theirs, _ = keys
    forged = export("main", store.head(), 5, key=theirs)
    ours = export("main", store.head(), 5, key=keys[0]).public_key
    write_head(tmp_path / "x.head", msgspec.structs.replace(forged, public_key=ours))
    with pytest.raises(Rejected, match="signature"):
        read_head(tmp_path / "x.head", public)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b"812:00", b'{"schema":"refold.head/2"}', b"x" * 100_000])
def test_a_file_that_is_no_head(tmp_path, text):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(Rejected, match="holds no head"):
        read_head(tmp_path / "x")


def test_a_file_with_a_hash_that_is_none(tmp_path, exported):
    for change in ({"hash": "00"}, {"hash": "ZZ" * 32}, {"root": "A0" * 32}, {"position": -1}):
        (tmp_path / "x").write_bytes(encoded(msgspec.structs.replace(exported, **change)))
        with pytest.raises(Rejected):
            read_head(tmp_path / "x")


def test_keys_that_are_none(tmp_path, store, keys):
    (tmp_path / "k").write_text("-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n")
    for key in (tmp_path / "k", tmp_path / "none", keys[1]):
        with pytest.raises(Rejected):
            export("main", store.head(), 5, key=key)


def test_without_the_package_a_signature_is_refused_in_one_line(store, keys, monkeypatch):
    def absent():
        raise ImportError("cryptography")

    monkeypatch.setattr(heads, "_Cryptography", absent)
    with pytest.raises(Rejected, match=r'pip install "refold\[signing\]"'):
        export("main", store.head(), 5, key=keys[0])
    assert export("main", store.head(), 5).signature == ""


def test_a_root_of_another_journal_is_found(store, exported):
    check_root(store, exported)
    with pytest.raises(JournalCorrupt, match="not of this journal"):
        check_root(store, msgspec.structs.replace(exported, root="00" * 32))


# -- proofs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(21))
def test_every_record_can_be_proved(store, exported, position):
    proof = decode_proof(msgspec.json.encode(prove(store, "main", position)))
    check_proof(proof, exported)
    assert len(proof.audit_path) <= 5
    assert proof.content is None


def test_a_record_is_proved_by_an_older_head_too(store, exported):
    grow(store, store.head(), 30)
    check_proof(prove(store, "main", 3, exported.position), exported)
    with pytest.raises(Disproved, match="make the proof again with this head"):
        check_proof(prove(store, "main", 3), exported)


def test_a_disclosed_content_is_proved_too(store, exported):
    proof = prove(store, "main", 4, discloses=True)
    assert "[4,7]" in proof.content
    check_proof(proof, exported)
    with pytest.raises(Disproved, match="discloses"):
        check_proof(msgspec.structs.replace(proof, content='["4",[5,7]]'), exported)


def test_a_redacted_record_is_proved_without_what_it_said(store, exported):
    store.erase_content("main", [redaction(store.head(), {4: None})], {4: None})
    check_proof(prove(store, "main", 4, exported.position), exported)
    with pytest.raises(Rejected, match="was redacted"):
        prove(store, "main", 4, exported.position, discloses=True)


CHANGES = [
    {"position": 5},
    {"engine_epoch": 2},
    {"schema_version": 1},
    {"time_ns": 5},
    {"body": "[]"},
    {"content_hash": "00" * 32},
    {"content_hash": ""},
    {"previous_hash": "00" * 32},
    {"hash": "00" * 32},
    {"audit_path": []},
    {"tree_size": 20},
    {"stream": "other"},
    {"time_ns": 2**70},
    {"position": -1},
]


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_whatever_is_changed_in_a_proof_is_found(store, exported, change):
    proof = prove(store, "main", 4)
    check_proof(proof, exported)
    with pytest.raises(Disproved):
        check_proof(msgspec.structs.replace(proof, **change), exported)


def test_a_sibling_that_was_changed_is_found(store, exported):
    proof = prove(store, "main", 4)
    for place in range(len(proof.audit_path)):
        path = list(proof.audit_path)
        path[place] = "00" * 32
        with pytest.raises(Disproved):
            check_proof(msgspec.structs.replace(proof, audit_path=path), exported)
    with pytest.raises(Rejected):
        check_proof(msgspec.structs.replace(proof, audit_path=["x"]), exported)


def test_a_proof_by_the_head_of_another_journal_is_refused(store, exported):
    other = MemoryStore()
    head = other.open_stream()
    for n in range(21):
        other.append("main", [seal(head, n + 1, *encode([DraftsProposed(handle=2, token_ids=[n])]))])
        head = other.head()
    with pytest.raises(Disproved):
        check_proof(prove(other, "main", 4), exported)


def test_what_can_not_be_proved(store, exported):
    for position in (-1, 21):
        with pytest.raises(NotFound):
            prove(store, "main", position)
    with pytest.raises(NotFound, match="not the one that the head was made of"):
        prove(store, "main", 4, 22)
    with pytest.raises(Rejected, match="no root"):
        check_proof(prove(store, "main", 4), msgspec.structs.replace(exported, root=""))
    for text in (b"", b"{}", b"[1]", b"\xff"):
        with pytest.raises(Rejected, match="no proof"):
            decode_proof(text)


def test_a_damaged_journal_proves_nothing(store, journal):
    record = journal.records["main"][9]
    journal.records["main"][9] = record._replace(time_ns=record.time_ns + 1)
    with pytest.raises(JournalCorrupt):
        prove(store, "main", 4)


def test_a_head_is_a_head(store, exported):
    assert exported.head == store.head()
    assert isinstance(exported, ExportedHead)
    assert head_after(list(store.read())[-1]).hash.hex() == exported.hash


def test_a_head_goes_where_a_link_points_and_the_link_stays(tmp_path, exported):
    elsewhere, link = tmp_path / "elsewhere" / "x.head", tmp_path / "latest.head"
    elsewhere.parent.mkdir()
    link.symlink_to(elsewhere)
    write_head(link, exported)
    assert link.is_symlink()
    assert encoded(read_head(elsewhere)) == encoded(exported)


def test_a_head_goes_into_a_pipe_and_the_pipe_stays_one(tmp_path, exported):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_head(pipe, exported)
    assert os.read(reader, 1 << 16) == encoded(exported) + b"\n"
    assert pipe.is_fifo()
    os.close(reader)
