"""The same random history gives byte-identical records, heads and digests on every store.

A store is added by one line in `STORES`: what opens its writing handle, and what opens its reader.
"""

import random

import pytest

from refold import migrations
from refold.journal.codec import decode, encode
from refold.journal.events import RequestAborted
from refold.journal.record import EMPTY_HEAD, head_after, seal
from refold.journal.stores import open_reader, open_store
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.journal.verify import read_verified
from refold.scheduler.fold import fold
from refold.scheduler.state import State, digest
from tests.kit.simulation import Simulation


def in_memory(_request):
    journal = MemoryJournal()
    return lambda: MemoryStore(journal), lambda: MemoryStore(journal)


def by_url(url):
    migrations.ensure(url)
    return lambda: open_store(url), lambda: open_reader(url)


STORES = {
    "memory": in_memory,
    "sqlite": lambda request: by_url(str(request.getfixturevalue("tmp_path") / "journal.db")),
    "segments": lambda request: by_url(f"{request.getfixturevalue('tmp_path')}/journal/"),
    "postgresql": lambda request: by_url(request.getfixturevalue("postgres_url")),
}


def some_text(chance):
    planes = (range(0x20), range(0x20, 0x7F), range(0x80, 0x800), range(0xE000, 0x10000), range(0x10000, 0x110000))
    return "".join(chr(chance.choice(chance.choice(planes))) for _ in range(chance.randrange(300)))


def history(seed):
    """Bodies and contents of a simulated life, among them records with text that is hard to store."""
    simulation, chance = Simulation(seed), random.Random(seed)
    simulation.play()
    bodies = [encode(events, f"salt {number}") for number, events in enumerate(simulation.drive.records)]
    return bodies, [encode([RequestAborted(handle=0, cause=some_text(chance))]) for _ in range(30)]


def record_it(open_it, stream, bodies, seed):
    """Write the bodies in groups of random size, in lives of random length; the times run in any direction."""
    chance, written, at = random.Random(seed), [], 0
    while at < len(bodies):
        store = open_it()
        head = store.open_stream(stream)
        for _ in range(chance.randrange(1, 8)):
            group = []
            for body in bodies[at : at + chance.choice((1, 1, 2, 5, 40))]:
                group.append(seal(head, chance.randrange(2**62), *body))
                head = head_after(group[-1])
            if group:
                assert store.append(stream, group) == head
                written += group
                at += len(group)
        store.close()
    return written


def test_every_store_tells_the_same_story(request):
    told = {}
    life, texts = history(seed=20)
    for name, prepare in STORES.items():
        open_it, read_it = prepare(request)
        written = record_it(open_it, "life", life, seed=1), record_it(open_it, "texts", texts, seed=2)
        reader = read_it()
        records = tuple(list(read_verified(reader, stream)) for stream in ("life", "texts"))
        assert records == written, name
        state = State()
        for record in records[0]:
            for event in decode(record):
                fold(state, event)
        told[name] = records, reader.head("life"), reader.head("texts"), reader.streams(), digest(state)
        reader.close()
    assert len(told["memory"][0][0]) > 100
    assert told["memory"][1].engine_epoch > 1
    assert told["memory"][1] != EMPTY_HEAD
    for name in STORES:
        assert told[name] == told["memory"], f"{name} tells another story"


@pytest.mark.parametrize("name", STORES)
def test_every_page_border_reads_the_same(name, request):
    open_it, read_it = STORES[name](request)
    store = open_it()
    head, records = store.open_stream(), []
    for _ in range(514):
        records.append(seal(head, 0, *encode([RequestAborted(handle=0, cause="x")])))
        head = head_after(records[-1])
    store.append("main", records)
    store.close()
    reader = read_it()
    for start in (0, 1, 255, 256, 257, 511, 512, 513, 514):
        for stop in (None, start, start + 1, 256, 512, 514):
            assert list(reader.read(start=start, stop=stop)) == records[start:stop]
    reader.close()
