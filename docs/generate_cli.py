"""Writes docs/reference/cli.md from the command line itself: `python docs/generate_cli.py`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from refold.engine.cli.app import app

PAGE = Path(__file__).parent / "reference" / "cli.md"
WIDTH = 100

HEAD = """<!-- Written by docs/generate_cli.py from the help texts in engine/cli: edit those. -->

# Command line

What `refold --help` and each verb's `--help` say. Exit codes have [their own page](exit-codes.md).

"""


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(_section(path, text) for path, text in helps(app, "refold"))


def helps(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """The path and the help text of a command and of every command below it."""
    settings = command.context_settings | {"terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for verb in command.list_commands(context):
            below = command.get_command(context, verb)
            assert below is not None, f"{context.command_path} lists {verb} and doesn't have it"
            if not below.hidden:
                yield from helps(below, verb, context)


def _section(path: str, text: str) -> str:
    body = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"## {path}\n\n```text\n{body}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
