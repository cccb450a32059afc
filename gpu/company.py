"""The self-test of a worker: has a row of logits the same bits whoever else is in the step, however its request was cut?

Three requests are computed alone, each in one piece. Then they are computed again in company: in chunks, in turns, in another
order, decodes beside prefills. The last rows of every piece must have the bits that they had alone. One of the requests is
longer than a tile of attention, and in some steps there are more rows than any kernel's smallest block, in others fewer.

It runs through all of the model as it will be used: embedding, norms, linear layers, rotary embedding, cache, attention. For
shapes that it doesn't have, it proves nothing; that is what the project's tests are for. It finds a machine, or a build, on
which an operator isn't what it was when they ran. It writes into blocks of the cache, so it comes before anything else.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from refold.gpu.model_runner import Entry

LENGTHS = (5, 21, 140)
LAST_ROWS = 2


class Piece(NamedTuple):
    """Positions `start` to `stop` of a request."""

    request: int
    start: int
    stop: int


STEPS: tuple[tuple[Piece, ...], ...] = (
    (Piece(2, 0, 96), Piece(0, 0, 4)),
    (Piece(1, 0, 1), Piece(2, 96, 127), Piece(0, 4, 5)),
    (Piece(2, 127, 128), Piece(1, 1, 18)),
    (Piece(1, 18, 19), Piece(2, 128, 137)),
    (Piece(2, 137, 138), Piece(1, 19, 20)),
    (Piece(1, 20, 21), Piece(2, 138, 140)),
)
"""All three, whole."""


class Fault(NamedTuple):
    """A row that has other bits in company: in how many of its numbers."""

    request: int
    position: int
    num_different: int
    num_numbers: int

    @property
    def words(self) -> str:
        """As it may stand in a worker's environment."""
        return (
            f"the row at position {self.position} of a request of {LENGTHS[self.request]} tokens differs in company, in "
            f"{self.num_different} of {self.num_numbers} numbers"
        )


class Room(NamedTuple):
    """What the cache has room for."""

    num_blocks: int
    block_size: int
    max_positions: int

    def blocks_of(self, lengths: tuple[int, ...]) -> list[list[int]]:
        """A block table for each length, as long as blocks last. The last block comes first: tables are no ranges."""
        free, tables = list(range(self.num_blocks)), list[list[int]]()
        for length in lengths:
            needed = -(-min(length, self.max_positions) // self.block_size)
            tables.append(free[-needed:][::-1])
            del free[-needed:]
        return tables


def find_dependence(run: Callable[[list[Entry]], torch.Tensor], vocab_size: int, room: Room) -> Fault | None:
    """The first row whose bits depend on its company; None: none does. `run` is `ModelRunner.run`, on an unused cache.

    Where the cache has no room for all of the requests, their ends are left out.
    """
    tables = room.blocks_of(LENGTHS)
    lengths = [
        min(length, room.max_positions, len(table) * room.block_size)
        for length, table in zip(LENGTHS, tables, strict=True)
    ]
    tokens = [[(7 + 31 * request + 13 * at * at) % vocab_size for at in range(n)] for request, n in enumerate(lengths)]

    def entry(piece: Piece, num_logits: int) -> Entry:
        return Entry(tokens[piece.request][piece.start : piece.stop], piece.start, tables[piece.request], num_logits)

    steps = [cut for step in STEPS if (cut := _within(step, lengths))]
    firsts = [_first_row(number, steps) for number in range(len(lengths))]
    alone = {
        n: run([entry(Piece(n, 0, length), length - firsts[n])]).clone() for n, length in enumerate(lengths) if length
    }
    for cut in steps:
        counts = [min(LAST_ROWS, piece.stop - piece.start) for piece in cut]
        rows = run([entry(piece, count) for piece, count in zip(cut, counts, strict=True)])
        for piece, count, found in zip(cut, counts, torch.split(rows, counts), strict=True):
            stop = piece.stop - firsts[piece.request]
            fault = _fault(piece, alone[piece.request][stop - count : stop], found)
            if fault is not None:
                return fault
    return None


def _within(step: tuple[Piece, ...], lengths: list[int]) -> list[Piece]:
    """The pieces of a step as far as there is room for their requests."""
    cut = [piece._replace(stop=min(piece.stop, lengths[piece.request])) for piece in step]
    return [piece for piece in cut if piece.start < piece.stop]


def _first_row(request: int, steps: list[list[Piece]]) -> int:
    """The first of a request's rows that anything is compared with: logits of those before it are nobody's, and dear."""
    of_request = [piece for step in steps for piece in step if piece.request == request]
    return min((max(piece.start, piece.stop - LAST_ROWS) for piece in of_request), default=0)


def _fault(piece: Piece, alone: torch.Tensor, found: torch.Tensor) -> Fault | None:
    """Compare the last rows of a piece, bit by bit."""
    differs = alone.view(torch.int32) != found.view(torch.int32)
    if not bool(differs.any()):
        return None
    row = int(differs.any(1).nonzero()[0])
    return Fault(piece.request, piece.stop - len(found) + row, int(differs[row].sum()), differs.shape[1])
