"""The form of a model that the compiled library computes. See `refold.gpu.native` for what that is."""

import torch

from refold.gpu.company import Room
from refold.gpu.kv_cache import KvCache
from refold.gpu.model_runner import Entry
from refold.gpu.models.native_llama import NativeLlama, Run, stored_dtype
from refold.gpu.native import Library
from refold.gpu.spec import ModelSpec


class NativeRunner:
    """A `Runner`, with as many threads as torch has."""

    __slots__ = ("_model", "cache", "facts")

    def __init__(
        self, library: Library, spec: ModelSpec, weights: dict[str, torch.Tensor], room: Room, dtype: torch.dtype
    ) -> None:
        """Pack the weights. Raises Rejected if memory runs out."""
        self.cache = KvCache(
            spec,
            num_blocks=room.num_blocks,
            block_size=room.block_size,
            dtype=stored_dtype(dtype),
            are_keys_transposed=True,
        )
        self._model = NativeLlama(
            library,
            spec,
            weights,
            self.cache,
            max_positions=room.max_positions,
            dtype=dtype,
            threads=torch.get_num_threads(),
        )
        # By construction; `refold.gpu.trusted_runner` has it tried.
        self.facts = {"step": "native", "native": library.build, "batch_invariant": "yes"}

    def run(self, entries: list[Entry]) -> torch.Tensor:
        """See `Runner`."""
        assert entries, "a step has at least one entry"
        return self._model.run([Run(*entry) for entry in entries])
