"""The paged key/value cache: `num_blocks` blocks of `block_size` positions, for every layer, in one allocation.

A slot is one position of one block: `block_id * block_size + offset`. Memory order is layer, key or value, head, slot, head
dimension: for one head, the positions of a block lie together, so a block is gathered as one run of bytes. Attention reads
tiles of a fixed number of positions; `unit` is the longest run of slots that both a block and a tile consist of whole.
Where the compiled library computes, the keys of a block lie the other way round: dimension, then offset.
"""

from math import gcd

import torch

from refold.gpu.spec import ModelSpec
from refold.journal.errors import Rejected

TILE_TOKENS = 128


class KvCache:
    """Keys and values by slot. Starts as zeros: a masked position must be finite to count for nothing."""

    __slots__ = (
        "_keys_and_values",
        "are_keys_transposed",
        "block_size",
        "num_blocks",
        "num_heads",
        "num_slots",
        "unit",
    )

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        are_keys_transposed: bool = False,
    ) -> None:
        self.are_keys_transposed = are_keys_transposed
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.num_heads = spec.num_kv_heads
        self.unit = gcd(block_size, TILE_TOKENS)
        shape = (spec.num_layers, 2 * spec.num_kv_heads * self.num_slots, spec.head_dim)
        try:
            self._keys_and_values = torch.zeros(shape, dtype=dtype)
        except RuntimeError as error:
            gib = shape[0] * shape[1] * shape[2] * dtype.itemsize / 2**30
            raise Rejected(
                f"a KV cache of {num_blocks} blocks needs {gib:.1f} GiB, more than there is; lower num_blocks"
            ) from error

    def planes(self, slots: torch.Tensor) -> torch.Tensor:
        """Where slots (n) lie in a layer, for keys then values, head by head: indices (2 * heads * n)."""
        starts = torch.arange(2 * self.num_heads).unsqueeze(1) * self.num_slots
        return (starts + slots).flatten()

    def unit_planes(self, units: torch.Tensor) -> torch.Tensor:
        """As `planes`, for runs of `unit` slots."""
        starts = torch.arange(2 * self.num_heads).unsqueeze(1) * (self.num_slots // self.unit)
        return (starts + units.flatten()).flatten()

    def data_ptr(self) -> int:
        """Address of the whole, for the library."""
        return self._keys_and_values.data_ptr()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of keys and values of slots (n), all layers: (layers, 2 * heads, n, head_dim). For tests and debuggers."""
        stored = self._keys_and_values.view(self._keys_and_values.shape[0], 2, self.num_heads, self.num_slots, -1)
        keys, values = stored.unbind(1)
        if self.are_keys_transposed:
            blocks = keys.reshape(*keys.shape[:2], self.num_blocks, keys.shape[3], self.block_size)
            keys = blocks.transpose(3, 4).reshape(keys.shape)
        return torch.cat([keys[:, :, slots], values[:, :, slots]], 1)

    def write(self, layer: int, planes: torch.Tensor, rows: torch.Tensor) -> None:
        """Store keys and values: rows (2 * heads * n, head_dim) at `planes` indices."""
        self._keys_and_values[layer].index_copy_(0, planes, rows)

    def gather(self, layer: int, unit_planes: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the runs at `unit_planes` indices into `out` (runs, unit * head_dim)."""
        runs = self._keys_and_values[layer].view(-1, out.shape[1])
        torch.index_select(runs, 0, unit_planes, out=out)
