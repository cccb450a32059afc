"""Times, as people write them on a command line."""

from datetime import UTC, datetime
from typing import Any

import click

_MAX = 1 << 62


class TimeType(click.ParamType[int]):
    """The type of an option that names a time."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds since 1970."""
        return value if isinstance(value, int) else parse_time(str(value), param, ctx, self)


def parse_time(text: str, param: click.Parameter | None, ctx: click.Context | None, kind: click.ParamType[Any]) -> int:
    """A time as `refold log` shows it, in ISO 8601, or as whole nanoseconds since 1970. Without a zone it is UTC."""
    if text.isdigit() and len(text) > 8:
        return min(int(text), _MAX)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        kind.fail(f"{text[:60]!r} is no time: give YYYY-MM-DDTHH:MM:SS.mmmZ, or nanoseconds since 1970", param, ctx)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return ((since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds) * 1000


TIME = TimeType()
