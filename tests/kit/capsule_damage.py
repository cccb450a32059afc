"""Capsules that were true once: bytes damaged, or values put in the place of others.

Damaged bytes are mostly refused by the reader. Damaged values are not: a place of a well-formed record holds another number, another
record's value, or a text that somebody might take for a path or a program, so that the fold and the laws have to cope.
"""

import copy
import gzip
import io
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from refold.engine.history.capsule import write_capsule
from tests.history.journals import sealed
from tests.history.readers import ListReader
from tests.kit.simulation import Simulation

NUMBERS: tuple[object, ...] = (
    -1,
    0,
    1,
    2,
    7,
    255,
    2**20,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
)
VALUES: tuple[object, ...] = (
    *NUMBERS,
    1.5,
    1e300,
    True,
    None,
    "",
    "x" * 5000,
    "../../../tmp/x",
    "/etc/passwd",
    "req-1",
    "__import__('os').system('id')",
    "'; DROP TABLE journal_records; --",
    "<script>alert(1)</script>",
    "\u0000\u001b[2J\u202e",
    "\ud83d\ude00",
    [],
    {},
    [0] * 300,
    [[[]]],
)

Json = Any


def originals(count: int = 6) -> list[bytes]:
    """The lines of true capsules: sessions, media, drafts, aborts, crashes, lost workers."""
    texts = []
    for seed in range(count):
        simulation = Simulation(seed)
        simulation.play()
        target = io.BytesIO()
        write_capsule(ListReader(sealed([simulation.drive.records])), target, note="for you")  # type: ignore[arg-type]
        texts.append(gzip.decompress(target.getvalue()))
    return texts


def bytes_damaged(rng: random.Random, text: bytes) -> bytes:
    """Some bytes are others, or gone, or twice; some numbers are large, negative, or of another type."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 6)):
        if not data:
            break
        at = rng.randrange(len(data))
        match rng.randrange(7):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 200)]
            case 3:
                digits = [i for i in range(at, min(at + 200, len(data))) if chr(data[i]).isdigit()]
                if digits:
                    data[digits[0] : digits[0] + 1] = rng.choice(
                        (b"-1", b"0", b"99999999999", b"1e9", b"null", b'"x"', b"9" * 30)
                    )
            case 4:
                data[at:at] = rng.choice((b"[", b"{", b"]", b"}", b'"', b",", b"\n", b"\x00", b"\\u0000", b'"../../x"'))
            case 5:
                rows = data.split(b"\n")
                rng.shuffle(rows)
                data = bytearray(b"\n".join(rows))
            case 6:
                data = data[: rng.randrange(len(data)) + 1]
    return bytes(data)


def values_damaged(rng: random.Random, text: bytes, others: Sequence[bytes]) -> bytes:
    """Some places of well-formed lines hold something else; a line may be another capsule's, gone, or twice."""
    lines = text.splitlines()
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        match rng.randrange(8):
            case 0:
                lines[at] = rng.choice(rng.choice(others).splitlines())
            case 1 if len(lines) > 2:
                del lines[at]
            case 2:
                lines.insert(at, lines[at])
            case _:
                lines[at] = _value_damaged(rng, lines[at])
    if rng.random() < 0.8:  # a header with a wrong count is refused before anything else is looked at
        lines[0] = _header_of(lines[0], len(lines) - 1)
    return b"\n".join(lines) + b"\n"


def _value_damaged(rng: random.Random, line: bytes) -> bytes:
    try:
        tree = json.loads(line)
    except ValueError:
        return line
    places = list(_places(tree))
    if places:
        holder, key = rng.choice(places)
        old = holder[key]
        holder[key] = rng.choice(VALUES) if rng.random() < 0.1 else _of_the_same_kind(rng, old, places)
        if isinstance(holder, list) and rng.random() < 0.2:
            holder.insert(key, old)
    return json.dumps(tree).encode()


def _places(tree: Json) -> Iterator[tuple[Json, Any]]:
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _of_the_same_kind(rng: random.Random, value: Json, places: Sequence[tuple[Json, Any]]) -> Json:
    """Another value that the reader's types still take: a neighbour's, one that is near, or a strange one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and rng.random() < 0.6:
        return value + rng.choice((-1, 1, 2, -value, 64, 1000, -2 * value))
    if isinstance(value, list) and rng.random() < 0.5:
        return rng.choice((value[::-1], value[:-1], value[1:], value + value[:1], []))
    same = [holder[key] for holder, key in places if type(holder[key]) is type(value)]
    strange = [each for each in VALUES if type(each) is type(value)]
    return copy.deepcopy(rng.choice(same + strange))


def _header_of(line: bytes, num_records: int) -> bytes:
    try:
        return json.dumps(json.loads(line) | {"num_records": num_records}).encode()
    except (ValueError, TypeError):
        return line


def damaged(rng: random.Random, texts: Sequence[bytes]) -> bytes:
    """A file that was a capsule."""
    text = rng.choice(texts)
    if rng.random() < 0.75:
        return gzip.compress(values_damaged(rng, text, texts), 1)
    data = gzip.compress(bytes_damaged(rng, text), 1)
    return bytes_damaged(rng, data) if rng.random() < 0.2 else data
