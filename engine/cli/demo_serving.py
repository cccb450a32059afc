"""The demo's victim: a process that serves prompts and writes down what its clients saw, until it is killed.

Not a verb. It is started as `python -m refold.engine.cli.demo_serving ORDER`, where ORDER is JSON.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from refold.engine.history.receipts import Receipt


class Order(msgspec.Struct):
    """What to serve, and where."""

    model: str
    journal: str
    receipts: str
    options: dict[str, Any]
    requests: list["OrderedRequest"]


class OrderedRequest(msgspec.Struct):
    """One request of the demo."""

    request_id: str
    messages: list[dict[str, str]]
    sampling: dict[str, Any]


class ReceiptBook:
    """A file of receipts. Each is on disk's way before the next token is looked at: one line, one write."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, receipt: Receipt) -> None:
        """Write one."""
        os.write(self._fd, msgspec.json.encode(receipt) + b"\n")


def read_receipts(path: Path) -> list[Receipt]:
    """All receipts whose line is whole."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Receipt) for line in lines]


def serve(order: Order) -> None:
    """Serve all requests to their end."""
    from refold.engine.engine import Delta, Engine
    from refold.engine.sampling_params import SamplingParams

    book = ReceiptBook(order.receipts)

    def on_delta(delta: Delta) -> None:
        book.add(receipt_of(delta))

    with Engine(order.model, order.journal, **order.options) as engine:
        ids = [
            engine.enqueue(each.messages, SamplingParams(**each.sampling), request_id=each.request_id)
            for each in order.requests
        ]
        engine.wait(ids, on_delta)


def receipt_of(delta: Any) -> Receipt:
    """What a client notes of a `Delta`."""
    return Receipt(delta.request_id, delta.index, delta.token_ids, delta.text, delta.finish_reason)


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=Order))
