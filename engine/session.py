"""Sessions, as a client has them: a request whose input comes in turns.

A turn ends as a request would (`stop`, `length`), but its keys and values stay, so the next one computes only what is new.
The turn's last token was handed out but is not part of the context: the next input takes its place. Output indices go on
over all turns, and `Engine.resume` reads them as one stream.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self

from refold.engine.asking import obeyed
from refold.engine.life import Life
from refold.engine.messages import Ask
from refold.engine.prompts import Extension
from refold.engine.sampling_params import SamplingParams
from refold.engine.streams import Delta, follow
from refold.journal.errors import RefoldError, Rejected
from refold.projections.outbox import Output
from refold.scheduler.commands import CloseSession


class Session:
    """A session, from `Engine.open_session` or `Engine.attach_session`; for one task at a time.

    As an async context manager it closes at the end. One that shall outlive its client is used without.
    """

    def __init__(self, life: Life, output: Output, cursor: int) -> None:
        """`cursor` is the output index from which on `turn` reads."""
        assert output.is_session, output.request_id
        self._life = life
        self._output = output
        self._cursor = cursor

    @property
    def request_id(self) -> str:
        """The session's id, for `Engine.resume`, `abort` and `attach_session`."""
        return self._output.request_id

    async def turn(self) -> AsyncGenerator[Delta, None]:
        """Stream the turn that comes next, from where the last reader of this object left it.

        Turns that nobody has read yet come one by one. Leaving the loop ends nothing.

        Yields:
            Deltas; the last one has the turn's `finish_reason`.

        Raises:
            Rejected: every turn is read, and the session has no more input.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        delivery, output = self._life.core.delivery, self._output
        if not delivery.has_turn(output, self._cursor):
            raise Rejected(f"session {self.request_id!r} has no turn left to read: extend it first")
        stream = follow(delivery, output, self._cursor, self._life.desk.text_or_none, one_turn=True)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self._cursor = delta.index + len(delta.token_ids)
                yield delta

    async def extend(self, prompt: Extension = "", sampling: SamplingParams | None = None) -> None:
        """Give the session its next input; returns once it is in the journal. While a turn runs, it waits for its end.

        Args:
            prompt: text, encoded without special tokens, or token ids. May be empty: go on, from a new last token.
            sampling: of this turn; None for that of the turn before, whose seed also stays if this has none.

        Raises:
            Rejected: the session is closed, or has no room for it.
            RefoldError: the engine stopped, for the reason that it carries.
        """
        await obeyed(self._life.core, self._life.desk.extension(self.request_id, prompt, sampling))

    async def close(self) -> None:
        """End the input: the session ends with its last turn, at once if that is over. Idempotent."""
        await obeyed(self._life.core, Ask(lambda _: CloseSession(request_id=self.request_id)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except RefoldError:
            if error is None:
                raise
