"""A Merkle tree over record hashes: proves that one record is in a journal, in log2(n) hashes, without the others.

The chain already covers everything, but to prove one record by it takes all that follow. So whoever reads a journal can
hash its record hashes into the tree of RFC 6962 and RFC 9162 (section 2.1): leaves and nodes are told apart by their first
byte, and a tree of n leaves splits at the largest power of two below n. Its root is exported with a head
(`refold head`); an audit path leads from a record to it (`refold prove`). Nothing of it is stored in the journal.

`Tree` takes leaves one by one and keeps one node for each bit of their number.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

EMPTY_ROOT = hashlib.sha256(b"").digest()


class _Subtree(NamedTuple):
    """A perfect subtree: how many leaves, its root, and whether the leaf that is to be proved is in it."""

    size: int
    root: bytes
    is_path: bool


class Tree:
    """A tree that grows. `path` leads from leaf `index`, if one was named, upwards, as far as siblings are known."""

    __slots__ = ("_index", "_path", "_subtrees", "size")

    def __init__(self, index: int | None = None) -> None:
        """Begin; `index` is the leaf that an audit path is wanted for."""
        self.size = 0
        self._index = index
        self._path: list[bytes] = []
        self._subtrees: list[_Subtree] = []

    def add(self, record_hash: bytes) -> None:
        """Append a leaf."""
        subtree = _Subtree(1, leaf(record_hash), self.size == self._index)
        self.size += 1
        while self._subtrees and self._subtrees[-1].size == subtree.size:
            subtree = _joined(self._subtrees.pop(), subtree, self._path)
        self._subtrees.append(subtree)

    def close(self) -> tuple[bytes, list[bytes]]:
        """The root, and the audit path of the leaf that was named. The tree stays as it is."""
        path = list(self._path)
        if not self._subtrees:
            return EMPTY_ROOT, path
        *rest, subtree = self._subtrees
        for left in reversed(rest):
            subtree = _joined(left, subtree, path)
        return subtree.root, path


def leaf(record_hash: bytes) -> bytes:
    """The leaf of a record."""
    return hashlib.sha256(b"\x00" + record_hash).digest()


def node(left: bytes, right: bytes) -> bytes:
    """The parent of two nodes."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def root_of(record_hashes: Iterable[bytes]) -> bytes:
    """The root over all of them."""
    tree = Tree()
    for record_hash in record_hashes:
        tree.add(record_hash)
    return tree.close()[0]


def root_by_path(record_hash: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """The root that an audit path leads to (RFC 9162, 2.1.3.2); None if it can't be one for leaf `index` of `size`."""
    if not 0 <= index < size:
        return None
    place, last, root = index, size - 1, leaf(record_hash)
    for sibling in path:
        if last == 0:
            return None
        if place & 1 or place == last:
            root = node(sibling, root)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            root = node(root, sibling)
        place, last = place >> 1, last >> 1
    return root if last == 0 else None


def _joined(left: _Subtree, right: _Subtree, path: list[bytes]) -> _Subtree:
    if left.is_path:
        path.append(right.root)
    elif right.is_path:
        path.append(left.root)
    return _Subtree(left.size + right.size, node(left.root, right.root), left.is_path or right.is_path)
