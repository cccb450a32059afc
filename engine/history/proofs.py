"""Proofs: one record is in a journal, shown to somebody who has nothing but the journal's head.

A proof holds the record without its content, and the audit path from its hash to the root in the head. Whoever checks it
computes the record's hash from its fields, and the root from the hash and the path. The content can be disclosed with it:
then what was said is proved too. It needn't be, and once it was redacted it can't be; the proof of the rest holds.
"""

from typing import Literal

import msgspec

from refold.engine.history.heads import ExportedHead, digest_in
from refold.journal.errors import NotFound, RefoldError, Rejected
from refold.journal.merkle import Tree, root_by_path
from refold.journal.record import GENESIS_HASH, NO_CONTENT_HASH, Record, chain_hash, content_digest
from refold.journal.store import JournalReader
from refold.journal.verify import verified_part


class Disproved(RefoldError):
    """A proof doesn't prove what it says."""


class Proof(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A record's place in a journal of `tree_size` records. Hashes are hexadecimal; `content` None is undisclosed."""

    schema: Literal["refold.proof/1"] = "refold.proof/1"
    stream: str
    position: int
    tree_size: int
    engine_epoch: int
    schema_version: int
    time_ns: int
    body: str
    content_hash: str
    previous_hash: str
    hash: str
    audit_path: list[str]
    content: str | None = None


def prove(
    reader: JournalReader, stream: str, position: int, tree_size: int | None = None, *, discloses: bool = False
) -> Proof:
    """The proof for the record at `position`, in the journal's first `tree_size` records; all of them if None.

    Raises:
        NotFound: there is no such record among them.
        Rejected: its content was to be disclosed and isn't there any more.
        JournalCorrupt: the journal isn't what was written.
    """
    size = reader.head(stream).position if tree_size is None else tree_size
    if not 0 <= position < size:
        raise NotFound(f"no record {position} among the first {size}: give a position below it")
    tree, before, found = Tree(position), GENESIS_HASH, None
    for record in verified_part(reader, stream, stop=size):
        tree.add(record.hash)
        if record.position == position:
            found = record
        elif record.position == position - 1:
            before = record.hash
    if found is None or tree.size != size:
        raise NotFound(f"the journal has {tree.size} records, not {size}: it is not the one that the head was made of")
    return _proof(stream, found, before, tree, discloses=discloses)


def _proof(stream: str, record: Record, before: bytes, tree: Tree, *, discloses: bool) -> Proof:
    content = record.content if discloses else None
    if discloses and (content is None or (record.content_hash and content_digest(content) != record.content_hash)):
        raise Rejected(f"what record {record.position} said was redacted: prove it without its content")
    _, path = tree.close()
    return Proof(
        stream=stream,
        position=record.position,
        tree_size=tree.size,
        engine_epoch=record.engine_epoch,
        schema_version=record.schema_version,
        time_ns=record.time_ns,
        body=record.body.decode(),
        content_hash=record.content_hash.hex(),
        previous_hash=before.hex(),
        hash=record.hash.hex(),
        audit_path=[sibling.hex() for sibling in path],
        content=None if content is None else content.decode(),
    )


def check_proof(proof: Proof, head: ExportedHead) -> None:
    """The record that the proof shows is in the journal that the head was made of, at this place.

    Raises:
        Disproved: it isn't, or something in the proof was changed.
        Rejected: proof or head aren't ones that can be checked.
    """
    if not head.root:
        raise Rejected("the head has no root to prove anything by: use one that `refold head` wrote")
    if proof.stream != head.stream or proof.tree_size != head.position:
        raise Disproved(
            f"the proof is about {proof.tree_size} records of stream {proof.stream!a}, the head about {head.position} of "
            f"{head.stream!a}: make the proof again with this head"
        )
    content_hash = digest_in("content_hash", proof.content_hash) if proof.content_hash else b""
    if proof.content is not None and content_digest(proof.content.encode()) != (content_hash or NO_CONTENT_HASH):
        raise Disproved(
            f"the content that the proof of record {proof.position} discloses is not the one that was written"
        )
    fields = (proof.position, proof.engine_epoch, proof.schema_version, proof.time_ns, proof.body.encode())
    try:
        found = chain_hash(digest_in("previous_hash", proof.previous_hash), *fields, content_hash)
    except Exception as error:
        raise Disproved(f"the proof of record {proof.position} shows no record: {error}") from error
    path = [digest_in("audit_path", sibling) for sibling in proof.audit_path]
    root = root_by_path(found, proof.position, proof.tree_size, path)
    if found.hex() != proof.hash or root is None or root.hex() != head.root:
        raise Disproved(
            f"record {proof.position} as the proof shows it is not in the journal that the head was made of: it was changed, or "
            "belongs to another"
        )


def decode_proof(text: bytes) -> Proof:
    """A proof from its JSON.

    Raises:
        Rejected: it isn't one.
    """
    try:
        return msgspec.json.decode(text, type=Proof)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Rejected(f"that is no proof: {error}; `refold prove` makes one") from error
