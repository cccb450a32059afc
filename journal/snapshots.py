"""Snapshots beside the journal: what the records before a position fold to, kept to save the folding.

A snapshot is never trusted over the journal. It says after which record it was made (by position and hash), which code made it,
what the state in it hashes to, and what its own bytes hash to; if any of that doesn't fit, it is as if there were none.

A store may keep them (`SnapshotStore`); it need not. It knows nothing of what is in a body. How many are kept is decided here:
`kept` thins them out with their distance from the newest, so that there are few, however long the journal gets.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from refold.journal.record import Head
from refold.journal.store import DEFAULT_STREAM

FORMAT = 2
_NUMBERS = struct.Struct(">IQQ")
_LEVEL = 1


class Snapshot(NamedTuple):
    """What the first `position` records of a stream fold to.

    Attributes:
        position: of the first record that isn't in it.
        engine_epoch: of the last record that is.
        hash: of the last record that is; 32 bytes.
        version: names the code that folded them.
        digest: of the state, in hex.
        body: compressed; see `open_body`.
        checksum: SHA-256 over all of the above; 32 bytes.
    """

    position: int
    engine_epoch: int
    hash: bytes
    version: str
    digest: str
    body: bytes
    checksum: bytes

    @property
    def head(self) -> Head:
        """The head of the journal that it was made of."""
        return Head(self.position, self.hash, self.engine_epoch)


class SnapshotEntry(NamedTuple):
    """A snapshot in a store's list: how many records are in it, and how many bytes it takes."""

    position: int
    num_bytes: int


@runtime_checkable
class SnapshotReader(Protocol):
    """A store or reader that has snapshots."""

    def snapshots(self, stream: str = DEFAULT_STREAM) -> list[SnapshotEntry]:
        """What there is, by position."""
        ...

    def load_snapshot(self, stream: str, position: int) -> Snapshot | None:
        """The snapshot at exactly this position, as it was stored; whether it is sound is for the caller to check.

        None, if there is none, or if what is listed there can't be made out.
        """
        ...


@runtime_checkable
class SnapshotStore(SnapshotReader, Protocol):
    """A store that keeps snapshots, for the one engine that has the stream open."""

    def save_snapshot(self, stream: str, snapshot: Snapshot) -> None:
        """Keep a snapshot, in the place of one at the same position.

        Raises:
            Fenced: the stream was opened by someone else since.
            JournalError: the storage failed; the journal is as it was.
        """
        ...

    def drop_snapshots(self, stream: str, positions: Sequence[int]) -> None:
        """Forget the snapshots at these positions; those that aren't there are no error. Raises as `save_snapshot`."""
        ...


def make_snapshot(head: Head, version: str, digest: str, pieces: Iterable[bytes]) -> Snapshot:
    """A snapshot of what the records before `head` fold to. `pieces` are the body, which is compressed as they come."""
    compressor = zlib.compressobj(_LEVEL)
    body = b"".join([*map(compressor.compress, pieces), compressor.flush()])
    unsealed = Snapshot(head.position, head.engine_epoch, head.hash, version, digest, body, b"")
    return unsealed._replace(checksum=checksum_of(unsealed))


def checksum_of(snapshot: Snapshot) -> bytes:
    """What `checksum` has to be."""
    said = hashlib.sha256(_NUMBERS.pack(FORMAT, snapshot.position, snapshot.engine_epoch))
    for part in (snapshot.hash, snapshot.version.encode(), snapshot.digest.encode(), snapshot.body):
        said.update(struct.pack(">Q", len(part)))
        said.update(part)
    return said.digest()


def open_body(snapshot: Snapshot) -> bytes:
    """The body as it was before it was compressed.

    Raises:
        ValueError: the snapshot isn't what was stored.
    """
    try:
        if checksum_of(snapshot) != snapshot.checksum:
            raise ValueError("its bytes were changed, or cut off")
        return zlib.decompress(snapshot.body)
    except (struct.error, zlib.error, TypeError, AttributeError) as error:
        raise ValueError(f"it can't be read: {error}") from error


def kept(positions: Iterable[int], newest: int = 2) -> list[int]:
    """Which of these to keep: the `newest`, and before them, for each doubling of the distance to the last, the oldest there.

    So a journal of n records keeps about log2(n) of them, and one that grows doesn't lose its old ones.
    """
    ordered = sorted(set(positions), reverse=True)
    oldest_of_octave = {(ordered[0] - position).bit_length(): position for position in ordered[newest:]}
    return sorted({*ordered[:newest], *oldest_of_octave.values()})
