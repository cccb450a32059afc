"""Linear layers with weights packed once, and the smallest number of rows at which they are batch-invariant.

oneDNN lays a weight out for its kernels at every call unless it is packed beforehand; packed, small batches run up to twice
as fast, and a row's result no longer depends on how many rows there are, from two rows on (one row takes another kernel). The
packing operators are private to torch, so they are tried once, checked against the plain product, and replaced by it where
they fail. What was chosen is part of the worker's environment.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn import functional

LinearKind = Literal["onednn_packed", "plain"]
Rows = Callable[[torch.Tensor], torch.Tensor]

_CANDIDATE_ROWS = (2, 4, 8, 16)
_PROBE_ROWS = 96


def choose_linear(dtype: torch.dtype) -> LinearKind:
    """Try the packed operator in `dtype` on this machine."""
    weight, rows = _probe_tensor(64, 32).to(dtype), _probe_tensor(4, 32).to(dtype)
    try:
        packed = Linear(weight, "onednn_packed")(rows)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return "plain"
    close = torch.allclose(packed.float(), functional.linear(rows, weight).float(), rtol=0.02, atol=0.02)
    return "onednn_packed" if close else "plain"


class Linear:
    """`rows @ weight.T` for a weight of shape (out, in); rows (n, in) → (n, out)."""

    __slots__ = ("_kind", "_weight")

    def __init__(self, weight: torch.Tensor, kind: LinearKind) -> None:
        self._kind = kind
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if kind == "onednn_packed" else weight  # noqa: SLF001

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        if self._kind == "onednn_packed":
            return torch.ops.mkldnn._linear_pointwise(rows, self._weight, None, "none", [], "")  # type: ignore[no-any-return]  # noqa: SLF001
        return functional.linear(rows, self._weight)


def smallest_invariant_rows(operator: Rows, width: int, dtype: torch.dtype) -> int | None:
    """The least number of rows from which `operator` gives a row the same bits however many there are. None: it never does.

    Measured, not assumed: which kernel runs at which size differs between instruction sets.
    """
    rows = _probe_tensor(_PROBE_ROWS, width).to(dtype)
    full = operator(rows)
    counts = sorted({*range(2, 18), 24, 31, 32, 48, 64, 95})
    equal = {count: torch.equal(operator(rows[:count].contiguous()), full[:count]) for count in counts}
    for least in _CANDIDATE_ROWS:
        if all(same for count, same in equal.items() if count >= least):
            return least
    return None


def _probe_tensor(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(20_240_229)
    return torch.randn(rows, width, generator=generator)
