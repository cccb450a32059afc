"""What a client sees: deltas and completions, made from a reader's chunks in the client's own thread or event loop."""

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from refold.engine.delivery import Chunk, Delivery, Reader, bell_of_running_loop
from refold.engine.models import Detokenizes, Text
from refold.journal.events import FinishReason
from refold.journal.surprisals import TokenLogprobs, numbers_per_token, token_logprobs
from refold.projections.outbox import Output


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of a request's output.

    Attributes:
        request_id: whose.
        index: output index of the first of `token_ids`; the next delta's is `index + len(token_ids)`.
        token_ids: one or more new tokens; empty only in a last delta that brings nothing but the end.
        text: what these tokens complete, whole characters only; a token that ended the request is not part of it.
        finish_reason: set in the last delta, and only there; that of the turn, where a session's turn is read.
        message: why, where the reason is `error` or `capacity`.
        logprobs: what the model thought of each of `token_ids`; None where nobody asked.
        prompt_logprobs: beside the first token, what it thought of the prompt, None in the place of the prompt's first token; None
            where nobody asked.
        choice: which of the `n` completions of one prompt.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    message: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """A request from beginning to end. Fields as in `Delta`.

    Of a prompt with `n` completions it is the first; `choices` are all of them, in order, and empty where `n` is 1.
    """

    request_id: str
    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    message: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    choices: tuple["Completion", ...] = ()

    def among(self, choices: tuple["Completion", ...]) -> "Completion":
        """The same, with all completions of its prompt."""
        return replace(self, choices=choices)


OnDelta = Callable[[Delta], None]


async def follow(
    delivery: Delivery, output: Output, cursor: int, text: Text | None, *, one_turn: bool = False
) -> AsyncGenerator[Delta, None]:
    """Deltas of one request from output index `cursor` to its end, or to the end of the turn that `cursor` is in.

    Raises:
        RefoldError: the engine stopped before the end.
    """
    bell, rung = bell_of_running_loop(), asyncio.Event()
    transcript = Transcript(delivery, output, text)
    reader = delivery.attach(output, cursor, lambda _: bell.ring(rung))
    rung.set()
    try:
        while True:
            await rung.wait()
            rung.clear()
            chunk = delivery.take(reader)
            if chunk is None:
                continue
            delta = transcript.add(chunk, one_turn=one_turn)
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        delivery.detach(reader)


async def follow_choices(
    delivery: Delivery, outputs: Sequence[Output], text: Text | None
) -> AsyncGenerator[Delta, None]:
    """Deltas of the completions of one prompt, as they come, until the last has ended.

    Raises:
        RefoldError: the engine stopped before that.
    """
    bell, rung = bell_of_running_loop(), asyncio.Event()
    readers = [delivery.attach(output, 0, lambda _: bell.ring(rung)) for output in outputs]
    transcripts = [Transcript(delivery, output, text, choice) for choice, output in enumerate(outputs)]
    left = dict(zip(readers, transcripts, strict=True))
    rung.set()
    try:
        while left:
            await rung.wait()
            rung.clear()
            for reader, transcript in list(left.items()):
                chunk = delivery.take(reader)
                if chunk is None:
                    continue
                delta = transcript.add(chunk)
                if delta.finish_reason is not None:
                    del left[reader]
                yield delta
    finally:
        for reader in readers:
            delivery.detach(reader)


def complete(
    delivery: Delivery,
    outputs: Sequence[Output],
    text: Text | None,
    on_delta: OnDelta | None,
    choices: Iterable[int] = repeat(0),
) -> list[Completion]:
    """Wait for requests to end, in this thread; their completions, in order. `choices`: the number of each among its prompt's.

    Raises:
        RefoldError: the engine stopped before the end.
    """
    rung: queue.SimpleQueue[Reader] = queue.SimpleQueue()
    readers = [delivery.attach(output, 0, rung.put) for output in outputs]
    transcripts = {
        reader: Transcript(delivery, output, text, choice)
        for reader, output, choice in zip(readers, outputs, choices, strict=False)
    }
    left = len(readers)
    for reader in readers:
        rung.put(reader)
    try:
        while left:
            reader = rung.get()
            transcript = transcripts[reader]
            chunk = None if transcript.is_complete else delivery.take(reader)
            if chunk is None:
                continue
            transcript.deltas.append(transcript.add(chunk))
            left -= transcript.is_complete
            if on_delta is not None:
                on_delta(transcript.deltas[-1])
    finally:
        for reader in readers:
            delivery.detach(reader)
    return [transcripts[reader].completion() for reader in readers]


class Transcript:
    """Turns the chunks of one reader into deltas; the detokeniser starts where the reader does.

    Attributes:
        deltas: those kept for a completion.
    """

    __slots__ = ("_choice", "_delivery", "_detokenizer", "_output", "_text", "deltas")

    def __init__(self, delivery: Delivery, output: Output, text: Text | None, choice: int = 0) -> None:
        self._choice = choice
        self._delivery = delivery
        self._output = output
        self._text = text
        self._detokenizer: Detokenizes | None = None
        self.deltas: list[Delta] = []

    def add(self, chunk: Chunk, *, one_turn: bool = False) -> Delta:
        """The delta for the next chunk; with `one_turn`, the turn's end is the end."""
        return Delta(
            request_id=self._output.request_id,
            index=chunk.index,
            token_ids=chunk.token_ids,
            text=self._decode(chunk),
            finish_reason=(chunk.turn_reason if one_turn else None) or chunk.finish_reason,
            message=chunk.message,
            logprobs=_told(chunk.token_ids, chunk.surprisals),
            prompt_logprobs=self._of_prompt(chunk),
            choice=self._choice,
        )

    def _of_prompt(self, chunk: Chunk) -> list[TokenLogprobs | None] | None:
        told = _told(self._output.prompt_token_ids[1:], chunk.prompt_surprisals)
        return None if told is None else [None, *told]

    @property
    def is_complete(self) -> bool:
        """Whether `deltas` holds the last one."""
        return bool(self.deltas) and self.deltas[-1].finish_reason is not None

    def completion(self) -> Completion:
        """`deltas`, from index 0 to the end, as one."""
        first, last = self.deltas[0], self.deltas[-1]
        assert first.index == 0, first
        assert last.finish_reason is not None, last
        told = [delta.logprobs for delta in self.deltas if delta.logprobs is not None]
        return Completion(
            request_id=self._output.request_id,
            num_prompt_tokens=self._output.num_prompt_tokens,
            token_ids=[token for delta in self.deltas for token in delta.token_ids],
            text="".join(delta.text for delta in self.deltas),
            finish_reason=last.finish_reason,
            message=last.message,
            logprobs=[each for delta in told for each in delta] if told else None,
            prompt_logprobs=first.prompt_logprobs,
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
        if chunk.finish_reason or chunk.turn_reason:
            text += self._detokenizer.flush()
        return text


def _told(token_ids: Sequence[int], surprisals: list[list[int]] | None) -> list[TokenLogprobs] | None:
    if surprisals is None:
        return None
    num_top = (len(surprisals[0]) - numbers_per_token(0)) // 2 if surprisals else 0
    return token_logprobs(token_ids, [number for each in surprisals for number in each], num_top)
