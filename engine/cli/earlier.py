"""What earlier runs left: which prompts of this run are in the journal already.

A prompt with an id is in the journal if a request of that id asked for the same. One without is named after its run and its place
(`run3-2`), so it can be told again only by these: it is in the journal if a run that was interrupted asked for the same at that
place. A run was interrupted if something of it is unfinished, or if the engine that worked on it last ended without a word, or by
Ctrl-C, or for a fault. What was finished in good order is done: who asks for it again, wants it again.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from refold.engine.cli.console import reading
from refold.engine.cli.output import note
from refold.engine.history.plain import safe
from refold.engine.messages import CLOSED
from refold.engine.submissions import choice_id
from refold.journal.codec import decode, events_among
from refold.journal.errors import JournalError
from refold.journal.events import EngineClosed, EngineOpened, Event, RequestFinished, RequestSubmitted

if TYPE_CHECKING:
    from refold.engine.cli.prompts_in import Asked
    from refold.engine.engine import Engine
    from refold.scheduler.commands import SubmitRequest

_NAME = re.compile(r"run([0-9]{1,18})-([0-9]{1,18})(?:#[0-9]{1,3})?", re.ASCII)
_TOLD = ("prompt_token_ids", "priority", "cache_salt", "tenant", "adapter", "media", "resumable", "grammar")
_KINDS = (EngineOpened, EngineClosed, RequestSubmitted, RequestFinished)


class _Content(NamedTuple):
    """What a request asks for: a digest of all but the seed, and the seed."""

    digest: bytes
    seed: int


class Earlier:
    """The journal as it was before this run, as far as its prompts may be in it."""

    def __init__(self, ids: frozenset[str] = frozenset(), num_places: int = 0) -> None:
        self._ids, self._num_places = ids, num_places
        self._contents: dict[str, _Content] = {}
        self._model, self._life, self._closed_life = "", 0, 0
        self._unfinished: dict[int, int] = {}
        self._last_life: dict[int, int] = {}

    def observe(self, event: Event) -> None:
        """The next event of the journal."""
        if isinstance(event, EngineOpened):
            self._life, self._model = self._life + 1, event.config.model_fingerprint
        elif isinstance(event, EngineClosed):
            if event.reason == CLOSED:
                self._closed_life = self._life
        elif isinstance(event, RequestSubmitted):
            self._submitted(event)
        elif isinstance(event, RequestFinished) and (run := self._unfinished.pop(event.handle, None)) is not None:
            self._last_life[run] = self._life

    def _submitted(self, event: RequestSubmitted) -> None:
        named = _NAME.fullmatch(event.request_id)
        if named:
            run = int(named[1])
            self._unfinished[event.handle] = run
            self._last_life[run] = self._life
        if event.request_id in self._ids or (named and int(named[2]) <= self._num_places):
            self._contents[event.request_id] = content_of(event, self._model)

    def has(self, request_id: str) -> bool:
        """Whether a request has this name, whatever it asked for."""
        return request_id in self._contents

    def has_same(self, request_id: str, wanted: _Content, *, with_seed: bool) -> bool:
        """Whether the request of this name asked for the same. A seed that nobody gave was drawn, and doesn't count."""
        found = self._contents.get(request_id)
        return found is not None and found.digest == wanted.digest and (found.seed == wanted.seed or not with_seed)

    def interrupted(self) -> list[int]:
        """The numbers of the runs that were interrupted, the newest first."""
        cut = {run for run, life in self._last_life.items() if life > self._closed_life}
        return sorted(cut.union(self._unfinished.values()), reverse=True)


def content_of(asked: "RequestSubmitted | SubmitRequest", model: str) -> _Content:
    """What a request asks for, of which model (its fingerprint)."""
    seedless = msgspec.structs.replace(asked.sampling, seed=0)
    told: list[Any] = [model, seedless, *(getattr(asked, name) for name in _TOLD)]
    return _Content(hashlib.sha256(msgspec.json.encode(told)).digest(), asked.sampling.seed)


def name_and_find(asked: "Sequence[Asked]", engine: "Engine", journal: str, epoch: int) -> None:
    """Give a name to each prompt that brings none, and note which completions are in the journal already, or asked for twice.

    `run3-1` is the first prompt of the journal's third engine, or of one that carries that engine's run on.
    """
    search = _Search(engine, _earlier(asked, engine, journal))
    first: dict[str, Asked] = {}
    carried_on: int | None = None
    for each in asked:
        if each.request_id is not None:
            if (before := first.setdefault(each.request_id, each)) is not each and search.are_same(before, each):
                each.is_repeated, each.journaled = True, before.journaled
            else:
                each.journaled = search.found(each, each.request_id)
            continue
        for run in search.runs:
            name = f"run{run}-{each.number}"
            if found := search.found(each, name):
                each.request_id, each.journaled = name, found
                carried_on = run if carried_on is None else max(run, carried_on)
                break
    for each in asked:
        if each.request_id is None:
            name = f"run{carried_on}-{each.number}"
            names = {name, choice_id(name, 0), *each.ids_under(name)}
            is_free = carried_on is not None and not any(map(search.earlier.has, names))
            each.request_id = name if is_free else f"run{epoch}-{each.number}"


class _Search:
    """Finds prompts among what earlier runs left."""

    def __init__(self, engine: "Engine", earlier: Earlier) -> None:
        self.earlier = earlier
        self.runs = earlier.interrupted()
        self._engine, self._model = engine, engine.config.model_fingerprint
        self._contents: dict[int, list[_Content]] = {}
        self._claimed: set[str] = set()

    def found(self, asked: "Asked", request_id: str) -> frozenset[str]:
        """The names of a prompt's completions under this id that are in the journal; none if one of them asked for something else."""
        names = asked.ids_under(request_id)
        if not self._claimed.isdisjoint(names):  # by another prompt of this run
            return frozenset()
        known = [self.earlier.has(name) for name in names]
        if not any(known):
            return frozenset()
        with_seed = asked.sampling.seed is not None
        columns = zip(names, known, self._contents_of(asked), strict=True)
        same = [
            self.earlier.has_same(name, wanted, with_seed=with_seed) for name, is_known, wanted in columns if is_known
        ]
        found = frozenset(name for name, is_known in zip(names, known, strict=True) if is_known and all(same))
        self._claimed |= found
        return found

    def are_same(self, before: "Asked", asked: "Asked") -> bool:
        """Whether a prompt asks for what one before it asked for. A seed counts where one is given."""
        if asked.sampling.seed not in (None, before.sampling.seed):
            return False
        one, other = self._contents_of(before), self._contents_of(asked)
        return [each.digest for each in one] == [each.digest for each in other]

    def _contents_of(self, asked: "Asked") -> list[_Content]:
        if asked.number not in self._contents:
            from refold.engine.engine import would_submit

            order = {"priority": asked.priority, "cache_salt": asked.cache_salt}
            commands = would_submit(self._engine, asked.prompt, asked.sampling, request_id="this", **order)  # type: ignore[arg-type]
            self._contents[asked.number] = [content_of(command, self._model) for command in commands]
        return self._contents[asked.number]


def _earlier(asked: "Sequence[Asked]", engine: "Engine", journal: str) -> Earlier:
    """What the journal tells of earlier runs. It is read only if one may have been interrupted, or an id is taken."""
    recovery = engine.recovery
    assert recovery is not None
    names = [each.request_id for each in asked if each.request_id is not None]
    if not recovery.records:
        return Earlier()
    may_be_cut = len(names) < len(asked) and (bool(recovery.requests) or not _ended_well(journal, recovery.records))
    if not (may_be_cut or any(map(engine.knows, names))):
        return Earlier()
    earlier = Earlier(
        frozenset(name for each in asked for name in each.ids()), max((each.number for each in asked), default=0)
    )
    try:
        for event in _events(journal, recovery.records):
            earlier.observe(event)
    except JournalError as error:
        note(f"refold: what earlier runs asked for can't be read, so nothing of it is taken up: {safe(str(error))}")
        return Earlier()
    return earlier


def _ended_well(journal: str, stop: int) -> bool:
    """Whether the journal's first `stop` records end with an engine that was closed in good order, having done what it was to do."""
    try:
        with reading(journal) as reader:
            last = [event for record in reader.read(start=stop - 1, stop=stop) for event in decode(record)]
    except JournalError:  # said where more is read
        return False
    return any(isinstance(event, EngineClosed) and event.reason == CLOSED for event in last)


def _events(journal: str, stop: int) -> Iterator[Event]:
    with reading(journal) as reader:
        yield from events_among(reader.read(start=0, stop=stop), _KINDS)
