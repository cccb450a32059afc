"""Writes that a crash cuts short: the files as they may be found at every instant, built again from a trace.

The scenario runs once while every call is traced, with its data and with a mark at each acknowledgement. From the trace, the
files are built again

- after every call;
- in the middle of every write: at every byte offset of the last records' writes, at some of the others;
- as a power cut leaves them: of what was written since a file's last sync, a random choice of its 512-byte sectors is there
  and the rest isn't. (Creations, truncations and removals are taken to reach the disk in order.)

Each time a reader must find what was acknowledged by then, and the next engine must be able to go on.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.kit.disk import Call, Disk, calls_in
from tests.kit.memory import memory_folder
from tests.reliability.drivers import Driver, Place
from tests.reliability.history import digests
from tests.reliability.judge import Tally, goes_on, judge
from tests.reliability.scenario import in_a_child, two_lives

_SECTOR_BYTES = 512
_EVERY_BYTE_OF_LAST_CALLS = 12
_OTHER_CUTS_PER_WRITE = 8
_POWER_CUTS_PER_CALL = 12


class Files:
    """File contents by name, as calls leave them."""

    def __init__(self, folder: Path) -> None:
        self.now = {str(p.relative_to(folder)): bytearray(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}
        self.synced = {name: bytes(content) for name, content in self.now.items()}
        self.unsynced: dict[str, list[tuple[int, bytes]]] = {}
        self.acknowledged = 0

    def apply(self, call: Call) -> None:
        match call.op:
            case "write":
                written_at(self.now.setdefault(call.path, bytearray()), call.offset, call.data)
                self.unsynced.setdefault(call.path, []).append((call.offset, call.data))
            case "sync" if call.path in self.now:
                self._settle(call.path)
            case "truncate":
                content = self.now.setdefault(call.path, bytearray())
                cut_to(content, call.offset)
                self._truncate_synced(call.path, call.offset)
            case "create":
                self.now[call.path] = bytearray()
                self._settle(call.path)
            case "unlink":
                self.now.pop(call.path, None)
                self.synced.pop(call.path, None)
                self.unsynced.pop(call.path, None)
            case "rename":
                self._rename(call.path, call.data.decode())
            case "mark":
                self.acknowledged = call.offset

    def after_power_cut(self, rng: random.Random) -> dict[str, bytearray]:
        """Every synced byte, and of the others whatever chance leaves."""
        found = {name: bytearray(content) for name, content in self.synced.items()}
        for name, writes in self.unsynced.items():
            content, share = found.setdefault(name, bytearray()), rng.random()
            for offset, data in writes:
                for start, part in in_sectors(offset, data):
                    if rng.random() < share:
                        written_at(content, start, part)
        return found

    def _settle(self, name: str) -> None:
        self.synced[name] = bytes(self.now[name])
        self.unsynced.pop(name, None)

    def _truncate_synced(self, name: str, size: int) -> None:
        content = bytearray(self.synced.get(name, b""))
        cut_to(content, size)
        self.synced[name] = bytes(content)
        kept = [
            (offset, data[: max(size - offset, 0)]) for offset, data in self.unsynced.get(name, []) if offset < size
        ]
        self.unsynced[name] = kept

    def _rename(self, old: str, new: str) -> None:
        self.now[new], self.synced[new] = self.now.pop(old), self.synced.pop(old, b"")
        self.unsynced[new] = self.unsynced.pop(old, [])


def written_at(content: bytearray, offset: int, data: bytes) -> None:
    """`content` after a write; a hole reads as zeros."""
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def in_sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """A write at `offset` in the parts that a disk writes whole or not at all: its sectors begin where the file's do."""
    start = 0
    while start < len(data):
        stop = start + _SECTOR_BYTES - (offset + start) % _SECTOR_BYTES
        yield offset + start, data[start:stop]
        start = stop


def cut_to(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


class State(NamedTuple):
    """The files as a crash may leave them, and how many records were acknowledged by then."""

    what: str
    files: dict[str, bytearray]
    acknowledged: int


def traced(driver: Driver, folder: Path) -> tuple[Files, list[Call]]:
    """The scenario's calls, and the files that it began with."""
    place = driver.fresh(folder)
    before, disk, trace = Files(folder), Disk(), folder.with_suffix(".trace")

    def life() -> None:
        disk.watch(folder)
        fd = os.open(trace, os.O_WRONLY | os.O_CREAT)
        disk.trace(fd)
        two_lives(place, disk.mark)

    outcome = in_a_child(life)
    assert outcome == ("", ""), outcome
    return before, list(calls_in(trace.read_bytes(), folder))


def states(files: Files, calls: list[Call], rng: random.Random, scale: float) -> Iterator[State]:
    """Every state that the module's text names; with `scale` < 1, a random choice of them."""
    acknowledging = [number for number, call in enumerate(calls) if call.op == "mark"]
    every_byte_from = acknowledging[-2]
    for number, call in enumerate(calls):
        if call.op == "write":
            yield from _torn(files, call, number, rng, scale, every_byte=every_byte_from <= number <= acknowledging[-1])
        files.apply(call)
        if rng.random() < max(scale, 0.2):
            yield State(f"after call {number}", files.now, files.acknowledged)
        for _ in range(_POWER_CUTS_PER_CALL):
            if any(files.unsynced.values()) and rng.random() < scale:
                yield State(f"power cut after call {number}", files.after_power_cut(rng), files.acknowledged)


def _torn(
    files: Files, call: Call, number: int, rng: random.Random, scale: float, *, every_byte: bool
) -> Iterator[State]:
    cuts = range(1, len(call.data))
    if not every_byte:
        cuts = sorted(rng.sample(cuts, min(_OTHER_CUTS_PER_WRITE, len(cuts))))
    whole = bytes(files.now.get(call.path, b""))
    for cut in cuts:
        if rng.random() < scale:
            torn = bytearray(whole)
            written_at(torn, call.offset, call.data[:cut])
            what = f"call {number}, the write to {call.path} at {call.offset}, cut after {cut} bytes"
            yield State(what, {**files.now, call.path: torn}, files.acknowledged)


def campaign(driver: Driver, scale: float, seed: int) -> Tally | None:
    if driver.moved is None:
        return None
    tally, rng = Tally("torn", driver.name), random.Random(seed)
    digests()
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name:
        files, calls = traced(driver, Path(name, "traced"))
        for state in states(files, calls, rng, scale):
            place = put(driver, Path(name, "found"), state.files)
            judged(tally, place, state)
            tally.cycles += 1
            tally.seen[_kind(state.what)] += 1
    return tally


def judged(tally: Tally, place: Place, state: State) -> None:
    judge(tally, place, state.acknowledged, what=state.what)
    goes_on(tally, place, state.acknowledged, state.what)


def put(driver: Driver, folder: Path, files: dict[str, bytearray]) -> Place:
    """The journal with these files, in a folder of its own."""
    assert driver.moved is not None
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return driver.moved(folder)


def _kind(what: str) -> str:
    return (
        "power cuts" if what.startswith("power") else "cut after a call" if what.startswith("after") else "torn writes"
    )
