"""Stepping: a debugger's prompt over a timeline. One command a line, an answer to each; the terminal is somebody else's."""

from collections.abc import Callable, Iterator
from typing import Any

from refold.engine.history.differences import differences
from refold.engine.history.plain import count, listed, safe
from refold.engine.history.portrait import request_portrait
from refold.engine.history.timeline import Timeline
from refold.engine.history.words import sentence
from refold.journal.errors import NotFound, Rejected

HELP = """n [N]        N records forward (1)            b [N]      N records back (1)
g POS        go to a record                   s STEP     go to the record that scheduled a step
r ID         next record about a request      k KIND     next record with such an event
v            go to the first violation        e          to the last record
p            the state in short               p ID       one request's counters
d            what the last move changed       h          this help
q            leave"""

MAX_SHOWN = 12


class Stepper:
    """Answers commands. `violation` finds the first record that breaks a law, None if none does; it is asked once."""

    def __init__(self, timeline: Timeline, violation: Callable[[], int | None]) -> None:
        self.timeline = timeline
        self._find_violation = violation
        self._violation: int | None = None
        self._asked = False
        self._before: dict[str, Any] = timeline.portrait() if timeline.state.was_opened else {}
        self._commands: dict[str, Callable[[str], Iterator[str]]] = {
            "n": lambda rest: self._moved(lambda: self.timeline.forward(_number(rest, 1))),
            "b": lambda rest: self._moved(lambda: self.timeline.back(_number(rest, 1))),
            "g": lambda rest: self._moved(lambda: self.timeline.seek(_number(rest))),
            "s": lambda rest: self._moved(lambda: self.timeline.seek_step(_number(rest))),
            "e": lambda _: self._moved(lambda: self.timeline.seek(len(self.timeline) - 1)),
            "r": self._next_of_request,
            "k": self._next_of_kind,
            "v": self._to_violation,
            "p": self._show,
            "d": self._changes,
            "h": lambda _: iter(HELP.splitlines()),
        }

    def answer(self, line: str) -> list[str] | None:
        """The lines that answer a command; None: leave. An empty line is `n`."""
        word, _, rest = (line.strip() or "n").partition(" ")
        if word in {"q", "quit", "exit"}:
            return None
        command = self._commands.get(word)
        if command is None:
            return [f"no command {safe(word[:20])!r}; h shows them"]
        try:
            return list(command(rest.strip()))
        except (NotFound, Rejected) as error:
            return [str(error)]

    def where(self) -> list[str]:
        """The record that the cursor is at, in words."""
        self.timeline.learn_names()
        record = self.timeline.record
        if record is None:
            return [f"before the first of {count(len(self.timeline), 'record')}"]
        lines = [sentence(event, self.timeline.names) for event in self.timeline.events]
        return [f"{record.position:>7}  {lines[0]}", *(f"         {line}" for line in lines[1:])]

    def _moved(self, move: Callable[[], object]) -> Iterator[str]:
        self._before = self._portrait()
        move()
        yield from self.where()

    def _portrait(self) -> dict[str, Any]:
        return self.timeline.portrait()

    def _next_of_request(self, request_id: str) -> Iterator[str]:
        before = self._portrait()
        if not request_id or not self.timeline.next_of(request_id):
            yield f"nothing further on names {safe(request_id)!r}"
            return
        self._before = before
        yield from self.where()

    def _next_of_kind(self, kind: str) -> Iterator[str]:
        from refold.journal.events import EVENT_TYPES  # noqa: PLC0415 - for this command only

        kinds = [each for each in EVENT_TYPES if kind and kind.lower() in each.__name__.lower()]
        before = self._portrait()
        if not kinds or not self.timeline.next_event(*kinds):
            yield f"nothing further on is a {safe(kind)!r}"
            return
        self._before = before
        yield from self.where()

    def _to_violation(self, _: str) -> Iterator[str]:
        if not self._asked:
            self._violation, self._asked = self._find_violation(), True
        if self._violation is None:
            yield "no law is broken in this journal"
            return
        yield f"the first violation is at record {self._violation}; this is the state before it"
        position = self._violation - 1
        yield from self._moved(lambda: self.timeline.seek(position))

    def _show(self, request_id: str) -> Iterator[str]:
        state = self.timeline.state
        if request_id:
            request = state.requests.find_live(request_id)
            if request is None:
                yield f"{safe(request_id)!r} is not live here"
                return
            yield from (f"{name:<30} {value}" for name, value in request_portrait(request).items())
            return
        pool, queues = state.pool, state.queues
        yield f"running  {_names(queues.running)}"
        yield f"waiting  {_names(queues.waiting)}"
        yield f"window   {listed([f'step {s.step} ({len(s.handles)})' for s in state.window.in_flight]) or 'empty'}"
        yield f"pool     {pool.num_free} of {pool.num_blocks} blocks free, {pool.num_fenced} fenced"

    def _changes(self, _: str) -> Iterator[str]:
        found = [d for d in differences(self._before, self._portrait()) if d.path != "digest"]
        yield from (difference.words() for difference in found[:MAX_SHOWN])
        if len(found) > MAX_SHOWN:
            yield f"and {len(found) - MAX_SHOWN} more"
        if not found:
            yield "nothing"


def _names(requests: list[Any]) -> str:
    return listed([safe(request.request_id) for request in requests], MAX_SHOWN) or "nobody"


def _number(text: str, usual: int | None = None) -> int:
    if not text and usual is not None:
        return usual
    try:
        return int(text)
    except ValueError as error:
        raise Rejected(f"{text[:20]!r} is no number") from error
