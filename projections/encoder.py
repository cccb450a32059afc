"""The encoder cache: outputs of the encoder by the digest of their input, counted in embeddings.

An entry is needed by requests that still have places of it to compute; it is evictable when none does, the longest unused
first. What an in-flight step computes may be used by entries of the same or a later step, like a block that is being
written. An entry needed by nobody stays until its place is wanted: the same picture again costs nothing.
"""

from collections import OrderedDict


class EncoderCache:
    """`sizes` of the entries held, `users` (handles) of each, and `evictable` digests in order of disuse."""

    __slots__ = ("capacity", "evictable", "sizes", "used", "users")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.sizes: dict[str, int] = {}
        self.users: dict[str, set[int]] = {}
        self.evictable: OrderedDict[str, None] = OrderedDict()


def add(cache: EncoderCache, digest: str, size: int) -> None:
    """A step will compute this entry."""
    assert digest not in cache.sizes, digest
    cache.sizes[digest] = size
    cache.users[digest] = set()
    cache.evictable[digest] = None
    cache.used += size
    assert cache.used <= cache.capacity, (cache.used, cache.capacity)


def use(cache: EncoderCache, digest: str, handle: int) -> None:
    """A request needs this entry."""
    cache.users[digest].add(handle)
    cache.evictable.pop(digest, None)


def stop_using(cache: EncoderCache, digest: str, handle: int) -> None:
    """A request needs this entry no more. Unknown after a reset: nothing happens."""
    users = cache.users.get(digest)
    if users is None or handle not in users:
        return
    users.remove(handle)
    if not users:
        cache.evictable[digest] = None


def evict(cache: EncoderCache, digest: str) -> None:
    """Drop an entry that nobody needs."""
    del cache.evictable[digest]
    del cache.users[digest]
    cache.used -= cache.sizes.pop(digest)
