"""Rows in the making: what a run of records changes in the tables."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from refold.projections.audit import schema
from refold.projections.audit.schema import IN_FLIGHT, Mode, Table
from refold.projections.audit.story import Life, Preemption, Request, Stale, Step, Story, Worker

Row = tuple[Any, ...]


class Change(NamedTuple):
    """Rows for one table, and how they get in."""

    table: Table
    mode: Mode
    rows: list[Row]


_MINUTE = {name: place for place, name in enumerate(schema.MINUTES.names[2:])}
_MAX_PLACES = [place for name, place in _MINUTE.items() if name.startswith("max_")]


class Minute:
    """The counts of one minute, in the order of the columns."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * len(_MINUTE)

    def add(self, **counts: int) -> None:
        """Count; a `max_` keeps the larger."""
        for name, count in counts.items():
            place = _MINUTE[name]
            if place in _MAX_PLACES:
                self.counts[place] = max(self.counts[place], count)
            else:
                self.counts[place] += count


def _columns(table: Table) -> Callable[[Any], Row]:
    """A reader of a row's columns, but for the first, from an object that has them as attributes."""
    return attrgetter(*table.names[1:])


_request = _columns(schema.REQUESTS)
_step = _columns(schema.STEPS)
_preemption = _columns(schema.PREEMPTIONS)
_stale = _columns(schema.STALE)
_life = _columns(schema.LIVES)
_worker = _columns(schema.WORKERS)


class Rows:
    """What changes. `changes` says it table by table; `redacted` are requests whose tokens are to be forgotten, after that."""

    def __init__(self, projection_id: int) -> None:
        self.projection_id = projection_id
        self.entries: list[Row] = []
        self.entry_updates: list[Row] = []
        self.tokens: list[Row] = []
        self.events: list[Row] = []
        self.hits: list[Row] = []
        self.violations: list[Row] = []
        self.redacted: list[int] = []
        self.requests: dict[int, Request] = {}
        self.steps: list[Step] = []
        self.preemptions: dict[tuple[int, int], Preemption] = {}
        self.stale: dict[tuple[int, int], Stale] = {}
        self.lives: dict[int, Life] = {}
        self.workers: dict[int, Worker] = {}
        self.minutes: defaultdict[int, Minute] = defaultdict(Minute)
        self.tenants: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0] * 5)
        self.speculation: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        self.durations: defaultdict[tuple[int, str, int], int] = defaultdict(int)

    @property
    def size(self) -> int:
        """About how many rows there are."""
        return len(self.entries) + len(self.entry_updates) + len(self.tokens) + len(self.events) + len(self.requests)

    def changes(self, story: Story) -> list[Change]:
        """All of it, what is in flight included, which from now on has rows.

        Only to be called at the border of a record.
        """
        new_steps, known_steps = self._steps(story)
        pid = self.projection_id
        changes = [
            Change(schema.REQUESTS, "replace", [(pid, *_request(r)) for r in self.requests.values()]),
            Change(schema.EVENTS, "insert", self.events),
            Change(schema.STEPS, "insert", new_steps),
            Change(schema.STEPS, "replace", known_steps),
            Change(schema.ENTRIES, "insert", self.entries),
            Change(schema.ENTRIES, "replace", self.entry_updates),
            Change(schema.TOKENS, "insert", self.tokens),
            Change(schema.PREEMPTIONS, "replace", [(pid, *_preemption(p)) for p in self.preemptions.values()]),
            Change(schema.STALE, "replace", [(pid, *_stale(s)) for s in self.stale.values()]),
            Change(schema.HITS, "insert", self.hits),
            Change(schema.LIVES, "replace", [(pid, *_life(life)) for life in self.lives.values()]),
            Change(schema.WORKERS, "replace", [(pid, *_worker(w)) for w in self.workers.values()]),
            Change(schema.MINUTES, "add", [(pid, minute, *m.counts) for minute, m in self.minutes.items()]),
            Change(schema.TENANTS, "add", [(pid, *key, *counts) for key, counts in self.tenants.items()]),
            Change(schema.SPECULATION, "add", [(pid, *key, *counts) for key, counts in self.speculation.items()]),
            Change(schema.DURATIONS, "add", [(pid, *key, count) for key, count in self.durations.items()]),
            Change(schema.VIOLATIONS, "insert", self.violations),
        ]
        return [change for change in changes if change.rows]

    def _steps(self, story: Story) -> tuple[list[Row], list[Row]]:
        """The rows of steps without and with a row, and the entries of those in flight that have none."""
        new: list[Row] = []
        known: list[Row] = []
        for step in [*self.steps, *(step for step in story.steps.values() if not step.is_written)]:
            (known if step.is_written else new).append((self.projection_id, *_step(step)))
        for step in story.steps.values():
            if not step.is_written:
                self.entries += map(self.waiting_entry, [step] * step.num_entries, range(step.num_entries))
                step.is_written = True
        return new, known

    def waiting_entry(self, step: Step, entry: int) -> Row:
        """The row of an entry in flight."""
        return self.entry(step, entry, (IN_FLIGHT, None, 0, None, 0))

    def entry(self, step: Step, entry: int, fate: Sequence[Any]) -> Row:
        """The row of an entry: `fate` is outcome, event that resolved it, outputs, index of the first, accepted drafts."""
        drafts = step.drafts[entry] if step.drafts else 0
        head = (self.projection_id, step.step, entry, step.handles[entry], step.epochs[entry])
        return (*head, step.first_positions[entry], step.tokens[entry], drafts, step.kinds[entry], *fate)
