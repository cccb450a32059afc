"""The Merkle tree: the roots and paths of RFC 6962, whatever the size."""

import hashlib

import pytest

from refold.journal.merkle import EMPTY_ROOT, Tree, leaf, node, root_by_path, root_of

HASHES = [hashlib.sha256(bytes([n])).digest() for n in range(70)]


def root_by_the_book(hashes):
    """RFC 6962, section 2.1, word for word."""
    if not hashes:
        return hashlib.sha256(b"").digest()
    if len(hashes) == 1:
        return hashlib.sha256(b"\x00" + hashes[0]).digest()
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    return hashlib.sha256(b"\x01" + root_by_the_book(hashes[:split]) + root_by_the_book(hashes[split:])).digest()


def path_by_the_book(index, hashes):
    if len(hashes) == 1:
        return []
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    if index < split:
        return [*path_by_the_book(index, hashes[:split]), root_by_the_book(hashes[split:])]
    return [*path_by_the_book(index - split, hashes[split:]), root_by_the_book(hashes[:split])]


@pytest.mark.parametrize("size", range(len(HASHES)))
def test_roots_and_paths_are_those_of_the_book(size):
    hashes = HASHES[:size]
    assert root_of(hashes) == root_by_the_book(hashes)
    for index in range(size):
        tree = Tree(index)
        for one in hashes:
            tree.add(one)
        root, path = tree.close()
        assert root == root_by_the_book(hashes)
        assert path == path_by_the_book(index, hashes)
        assert root_by_path(hashes[index], index, size, path) == root


def test_the_roots_of_the_rfcs_test_vectors():
    """From the reference implementation of Certificate Transparency: leaves b"", b"\\x00", b"\\x10"."""
    assert EMPTY_ROOT.hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert leaf(b"").hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    assert root_of([b"", b"\x00"]).hex() == "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"
    assert root_of([b"", b"\x00", b"\x10"]).hex() == "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"


def test_a_path_that_was_tampered_with_leads_elsewhere():
    size, index = 45, 17
    tree = Tree(index)
    for one in HASHES[:size]:
        tree.add(one)
    root, path = tree.close()
    for place in range(len(path)):
        other = [*path[:place], HASHES[60], *path[place + 1 :]]
        assert root_by_path(HASHES[index], index, size, other) != root
        assert root_by_path(HASHES[index], index, size, path[:place] + path[place + 1 :]) != root
    assert root_by_path(HASHES[index + 1], index, size, path) != root
    assert root_by_path(HASHES[index], index + 1, size, path) != root
    assert root_by_path(HASHES[index], index, size, [*path, HASHES[0]]) is None
    assert root_by_path(HASHES[index], index, size * 4, path) is None
    for bad in (-1, size, size + 1):
        assert root_by_path(HASHES[index], bad, size, path) is None


def test_a_node_is_no_leaf():
    inner = node(leaf(HASHES[0]), leaf(HASHES[1]))
    assert root_of([inner]) != root_of(HASHES[:2])
