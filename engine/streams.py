"""What a client sees: deltas and completions, made from the reader's chunks in the client's own thread."""

from collections.abc import Callable
from dataclasses import dataclass

from refold.engine.delivery import Chunk, Delivery
from refold.engine.models import Detokenizes, Text
from refold.journal.events import FinishReason
from refold.projections.outbox import Output


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a request's output.

    Attributes:
        request_id: whose.
        index: output index of the first of `token_ids`; the next delta's is `index + len(token_ids)`.
        token_ids: one or more new tokens; empty only in a last delta that brings nothing but the end.
        text: what these tokens complete, whole characters only; a token that ended the request is not part of it.
        finish_reason: set in the last delta, and only there.
        message: why, where the reason is `error` or `capacity`.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A request from beginning to end. Fields as in `Delta`."""

    request_id: str
    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    message: str = ""


class Transcript:
    """Turns the chunks of one reader into deltas; the detokeniser starts where the reader does."""

    __slots__ = ("_delivery", "_detokenizer", "_output", "_text")

    def __init__(self, delivery: Delivery, output: Output, text: Text | None) -> None:
        self._delivery = delivery
        self._output = output
        self._text = text
        self._detokenizer: Detokenizes | None = None

    def add(self, chunk: Chunk) -> Delta:
        """The delta for the next chunk."""
        return Delta(
            request_id=self._output.request_id,
            index=chunk.index,
            token_ids=chunk.token_ids,
            text=self._decode(chunk),
            finish_reason=chunk.finish_reason,
            message=chunk.message,
        )

    def completion(self, deltas: list[Delta]) -> Completion:
        """All deltas of a request, from index 0 to its end, as one."""
        last = deltas[-1]
        assert deltas[0].index == 0, deltas[0]
        assert last.finish_reason is not None, last
        return Completion(
            request_id=self._output.request_id,
            num_prompt_tokens=self._output.num_prompt_tokens,
            token_ids=[token for delta in deltas for token in delta.token_ids],
            text="".join(delta.text for delta in deltas),
            finish_reason=last.finish_reason,
            message=last.message,
        )

    def _decode(self, chunk: Chunk) -> str:
        if self._text is None:
            return ""
        if self._detokenizer is None:
            self._detokenizer = self._text.detokenizer(self._delivery.prior(self._output, chunk.index))
        token_ids = chunk.token_ids
        if chunk.stop_token_id is not None and token_ids and token_ids[-1] == chunk.stop_token_id:
            token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids) if token_ids else ""
        return text + self._detokenizer.flush() if chunk.finish_reason else text


OnDelta = Callable[[Delta], None]
