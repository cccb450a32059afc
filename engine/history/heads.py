"""Heads in files: what proves later that a journal's end wasn't cut off, and that it wasn't written anew.

Nobody can see from inside a journal that its tail is gone, head and all. So a head is exported to a file that is kept elsewhere:
position and hash of the end, and the root of the Merkle tree over all records (`refold.journal.merkle`), for proofs of single
records. A head is small and tells nothing of what was said.

Unsigned, a head is worth as much as the place where it's kept. Signed, it may lie anywhere, beside the journal too. The signature
is Ed25519: whoever checks it needs the public key only, and so can't forge one. With a shared secret (an HMAC, which the
standard library has), every auditor could. It needs the package `cryptography`, which is optional: `pip install
"refold[signing]"`.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from refold.engine.history.whole_file import whole_file
from refold.journal.errors import JournalCorrupt, JournalError, Rejected
from refold.journal.merkle import root_of
from refold.journal.record import Head
from refold.journal.store import JournalReader

_MAX_FILE_BYTES = 1 << 16


class ExportedHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A head. Hashes, the public key and the signature are hexadecimal; `root` is empty where nobody computed it."""

    schema: Literal["refold.head/1"] = "refold.head/1"
    stream: str
    position: int
    hash: str
    engine_epoch: int
    time_ns: int
    root: str = ""
    public_key: str = ""
    signature: str = ""

    @property
    def head(self) -> Head:
        """The head as the journal has it.

        Raises:
            Rejected: it has a hash that is none.
        """
        return Head(self.position, digest_in("hash", self.hash), self.engine_epoch)


def export(stream: str, head: Head, time_ns: int, *, root: bytes = b"", key: Path | None = None) -> ExportedHead:
    """A head to keep, signed if there's a key.

    Raises:
        Rejected: the key can't be used.
    """
    exported = ExportedHead(
        stream=stream,
        position=head.position,
        hash=head.hash.hex(),
        engine_epoch=head.engine_epoch,
        time_ns=time_ns,
        root=root.hex(),
    )
    if key is None:
        return exported
    private = _private_key(key)
    exported = msgspec.structs.replace(exported, public_key=_raw_public(private.public_key()))
    return msgspec.structs.replace(exported, signature=private.sign(_signed_bytes(exported)).hex())


def write_head(path: Path, exported: ExportedHead) -> None:
    """Put a head into a file, whole or not at all, and on disk when this returns.

    Raises:
        JournalError: it can't be written.
    """
    try:
        with whole_file(path) as file:
            file.write(encoded(exported) + b"\n")
    except OSError as error:
        raise JournalError(f"cannot write the head to {path}: {error.strerror}; give another file") from error


def read_head(path: Path, key: Path | None = None) -> ExportedHead:
    """A head from a file, its signature checked if there's a key.

    Raises:
        Rejected: the file holds no head, or one that the key's owner didn't sign.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES)
        exported = msgspec.json.decode(text, type=ExportedHead)
    except OSError as error:
        raise Rejected(
            f"cannot read the head in {path}: {error.strerror}; name a file that `refold head` wrote"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"{path} holds no head: {error}; name a file that `refold head` wrote") from error
    digest_in("hash", exported.hash)
    if exported.root:
        digest_in("root", exported.root)
    if exported.position < 0:
        raise Rejected(f"{path} holds a head at position {exported.position}: name a file that `refold head` wrote")
    if key is not None:
        check_signature(exported, key)
    return exported


def check_signature(exported: ExportedHead, key: Path) -> None:
    """The head was signed with this key, and nothing in it was changed since.

    Raises:
        Rejected: it wasn't, or the key can't be used.
    """
    public = _public_key(key)
    if not exported.signature:
        raise Rejected(f"the head at {exported.position} is not signed: leave out the key, or don't trust it")
    if _raw_public(public) != exported.public_key:
        raise Rejected(
            f"the head at {exported.position} was signed with another key than the one in {key}: don't trust it"
        )
    try:
        public.verify(bytes.fromhex(exported.signature), _signed_bytes(exported))
    except Exception as error:
        raise Rejected(
            f"the signature of the head at {exported.position} is wrong: it was changed; don't trust it"
        ) from error


def check_root(reader: JournalReader, exported: ExportedHead) -> None:
    """The tree over the journal's first records has the root that the head names. They were verified before.

    Raises:
        JournalCorrupt: it has another.
    """
    found = root_of(record.hash for record in reader.read(exported.stream, 0, exported.position))
    if found.hex() != exported.root:
        raise JournalCorrupt(
            f"the records before {exported.position} have the root {found.hex()[:16]}, the head says {exported.root[:16]}: the "
            "head is not of this journal",
            position=max(exported.position - 1, 0),
            kind="edited",
        )


def encoded(exported: ExportedHead) -> bytes:
    """The head as JSON."""
    return msgspec.json.encode(exported)


def digest_in(name: str, text: str) -> bytes:
    """32 bytes from their hexadecimal digits.

    Raises:
        Rejected: they aren't.
    """
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32 or text != value.hex():
        raise Rejected(f"{name} {text[:80]!a} is no SHA-256 in 64 lower-case hexadecimal digits")
    return value


def _signed_bytes(exported: ExportedHead) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(exported, signature=""))


def _raw_public(public: Any) -> str:
    serialization = _cryptography().serialization
    raw: bytes = public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return raw.hex()


def _private_key(path: Path) -> Any:
    key = _load(path)
    if not isinstance(key, _cryptography().ed25519.Ed25519PrivateKey):
        raise Rejected(
            f"{path} holds no Ed25519 private key: `openssl genpkey -algorithm ed25519 -out {path}` makes one"
        )
    return key


def _public_key(path: Path) -> Any:
    key, ed25519 = _load(path), _cryptography().ed25519
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.public_key()
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise Rejected(f"{path} holds no Ed25519 key: give the public key of whoever signs")
    return key


def _load(path: Path) -> Any:
    serialization = _cryptography().serialization
    try:
        text = path.read_bytes()
        if b"PRIVATE KEY" in text:
            return serialization.load_pem_private_key(text, None)
        return serialization.load_pem_public_key(text)
    except OSError as error:
        raise Rejected(f"cannot read the key in {path}: {error.strerror}") from error
    except Exception as error:
        raise Rejected(f"{path} holds no key in PEM without a password: {error}") from error


class _Cryptography:
    def __init__(self) -> None:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - optional
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

        self.serialization: Any = serialization
        self.ed25519: Any = ed25519


def _cryptography() -> _Cryptography:
    try:
        return _Cryptography()
    except ImportError as error:
        raise Rejected('signatures need the package cryptography: pip install "refold[signing]"') from error
