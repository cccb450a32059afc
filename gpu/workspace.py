"""Scratch memory that is kept. Fresh large allocations fault in every page, which costs more than what is put there."""

from math import prod

import torch


class Workspace:
    """Named buffers that grow and never shrink. What a buffer held before is garbage, but always finite garbage."""

    __slots__ = ("_buffers", "_dtype")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A contiguous tensor of `shape` over the buffer `name`. It is valid until the next `take` of that name."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.zeros(size + size // 4, dtype=self._dtype)
        return buffer[:size].view(shape)
