"""Positions of records, as people write them on a command line."""

from typing import Any

import click


class PositionType(click.IntRange):
    """The type of an option that names a record. Who writes something else is told where that belongs."""

    name = "position"

    def __init__(self) -> None:
        super().__init__(0, 2**62)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The position."""
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            option = param.opts[0] if param is not None else "POS"
            by_time = "--after" if option == "--since" else "--before"
            self.fail(
                f"{str(value)[:60]!r} is no position of a record: give a whole number, such as {option} 120; by time it is {by_time} "
                "2026-09-21T14:14:30Z, by step --step 7",
                param,
                ctx,
            )


POSITION = PositionType()
