"""What `refold run` prints: completions in order on stdout, what went wrong on stderr."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from refold.engine.cli.failures import NOT_SO
from refold.engine.cli.output import is_one_place, note, painter, write, write_json
from refold.engine.history.plain import count, safe, safe_text

if TYPE_CHECKING:
    from refold.engine.engine import Delta


class Printer:
    """Writes each completion to stdout once it and those before it are there; a single one as it comes."""

    def __init__(self, *, as_json: bool) -> None:
        self.status = 0
        self.last_id = ""
        self._as_json = as_json
        self._paint = painter(sys.stdout)
        self._ids: list[str] = []
        self._titles: dict[str, str] = {}
        self._texts: dict[str, list[str]] = {}
        self._token_ids: dict[str, list[int]] = {}
        self._ends: dict[str, Delta] = {}
        self._thoughts: dict[str, dict[str, Any]] = {}
        self._next = 0
        self._is_mid_line = False
        self._shares_place = is_one_place(sys.stdout, sys.stderr)
        self._writing = threading.RLock()  # an interrupt may come while it is held, and is complained of

    def expect(self, ids: list[str], titles: dict[str, str]) -> None:
        """These requests will come, and are shown in this order."""
        self._ids, self._titles = ids, titles
        self._texts = {request_id: [] for request_id in ids}
        self._token_ids = {request_id: [] for request_id in ids}

    def reject(self, place: str, line: str, hint: str) -> None:
        """A prompt that can't be served."""
        note(f"refold: {safe(place)}: {safe(line)}\n  hint: {safe(hint)}")
        if self._as_json:
            write_json({"schema": "refold.run/1", "place": place, "error": line})

    def add(self, delta: "Delta") -> None:
        """The next piece of a request."""
        self._texts[delta.request_id].append(delta.text)
        self._token_ids[delta.request_id] += delta.token_ids
        self._note_logprobs(delta)
        if self._streams:
            self._stream(delta.text)
        if delta.finish_reason is None:
            return
        self.last_id = delta.request_id
        self._ends[delta.request_id] = delta
        if delta.finish_reason in {"error", "capacity"}:
            self.status = NOT_SO
            self.end_line()
            note(f"refold: {safe(delta.request_id)} ended with {delta.finish_reason}: {safe(delta.message)}")
        if self._streams:
            self.end_line()
        elif self._as_json:
            self._write_json(delta)
        else:
            self._write_due()

    @property
    def shows_progress(self) -> bool:
        """Whether whoever looks at stderr sees an answer grow there."""
        return self._streams and self._shares_place

    @property
    def _streams(self) -> bool:
        return len(self._ids) == 1 and not self._as_json

    def end_line(self) -> None:
        """End a line that was begun: what comes next, a complaint for example, is no part of an answer."""
        with self._writing:
            self._end_line()

    @contextmanager
    def line_of_its_own(self) -> Iterator[None]:
        """Meanwhile another thread may write a line to stderr: where an answer streams to the same place, it doesn't fall into it."""
        if not self._shares_place:  # an answer in a file is left as it is, and whoever reads it slowly holds nobody up
            yield
            return
        with self._writing:
            self._end_line()
            yield

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._is_mid_line = False
            write("")
            sys.stdout.flush()

    def _stream(self, text: str) -> None:
        with self._writing:
            self._is_mid_line = True  # first: a signal may come at any moment after the write
            sys.stdout.write(safe_text(text))
            sys.stdout.flush()

    def _note_logprobs(self, delta: "Delta") -> None:
        told = self._thoughts.setdefault(delta.request_id, {})
        if delta.prompt_logprobs is not None:
            told["prompt_logprobs"] = delta.prompt_logprobs
        if delta.logprobs is not None:
            told.setdefault("logprobs", []).extend(delta.logprobs)

    def _write_json(self, end: "Delta") -> None:
        write_json(
            {
                "schema": "refold.run/1",
                "request_id": end.request_id,
                "text": "".join(self._texts[end.request_id]),
                "token_ids": self._token_ids[end.request_id],
                "finish_reason": end.finish_reason,
                "message": end.message,
                **self._thoughts[end.request_id],
            }
        )
        sys.stdout.flush()

    def _write_due(self) -> None:
        """Write the completions whose turn it is."""
        while self._next < len(self._ids) and self._ids[self._next] in self._ends:
            request_id = self._ids[self._next]
            self._next += 1
            end = f"{count(len(self._token_ids[request_id]), 'token')}, {self._ends[request_id].finish_reason}"
            title = self._titles.get(request_id, "left by an earlier run")
            write(self._paint(f"== {safe(request_id)} ({end}): {title}", bold=True))
            write(safe_text("".join(self._texts[request_id])))
        sys.stdout.flush()
