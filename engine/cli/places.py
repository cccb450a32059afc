"""Places in a journal, as people name them: a position, `step:40`, `time:2026-09-21T14:14:30.004Z`, or `end`."""

from typing import Any, Literal, NamedTuple

import click

from refold.engine.cli.failures import NOT_SO, Complaint
from refold.engine.cli.output import clock
from refold.engine.cli.times import parse_time
from refold.engine.cli.typed import of_stream, typed
from refold.engine.history.timeline import Timeline
from refold.engine.history.times import record_at
from refold.journal.errors import NotFound


class Place(NamedTuple):
    """What was asked for; `value` is a position, a step or nanoseconds since 1970."""

    kind: Literal["position", "step", "time", "end"]
    value: int


class PlaceType(click.ParamType[Place]):
    """The type of an option that names a place."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        """Read it, or fail with what would do."""
        if isinstance(value, Place):
            return value
        kind, _, rest = str(value).rpartition(":") if str(value).startswith("step:") else ("", "", str(value))
        if str(value).startswith("time:"):
            return Place("time", parse_time(str(value).removeprefix("time:"), param, ctx, self))
        if value == "end":
            return Place("end", 0)
        try:
            number = int(rest)
        except ValueError:
            self.fail(
                f"{str(value)[:60]!r} is no place: give a position, step:N, time:YYYY-MM-DDTHH:MM:SSZ or end",
                param,
                ctx,
            )
        if number < 0:
            self.fail(f"{number} is no place: positions and steps start at 0", param, ctx)
        return Place("step" if kind == "step" else "position", number)


PLACE = PlaceType()


def position_of(timeline: Timeline, place: Place | None, journal: str) -> int:
    """The position of a place; of the last record without one. -1: the journal is empty.

    Raises:
        Complaint: there is no such place.
    """
    of = of_stream(timeline.stream)
    length, hint = len(timeline), f"`{typed('log', journal, options=(*of, '-n', 1))}` shows the last record"
    if place is None or place.kind == "end":
        return length - 1
    if place.kind == "time":
        position = timeline.position_of_time(place.value)
        if position < 0 < length:
            first = clock(record_at(timeline.reader, 0, timeline.stream).time_ns)
            first_hint = f"`{typed('show', journal, options=(*of, '--at', 0))}` shows the state after it"
            raise Complaint(f"time {clock(place.value)}: the first record was made at {first}", first_hint, NOT_SO)
        return position
    if place.kind == "position":
        if place.value >= length:
            end = f"the last record is at {length - 1}" if length else "the journal is empty"
            raise Complaint(f"position {place.value}: {end}", hint, NOT_SO)
        return place.value
    try:
        return timeline.position_of_step(place.value)
    except NotFound as error:
        last = typed("log", journal, options=(*of, "--kind", "StepScheduled", "-n", 1))
        raise Complaint(str(error), f"`{last}` shows the last step", NOT_SO) from error
