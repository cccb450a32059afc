"""The group of verbs: loads a verb when it is called, and turns every error into one line, one hint and an exit status."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click

from refold.engine.cli import let_interrupt
from refold.engine.cli.failures import report
from refold.journal.store import DEFAULT_STREAM

EPILOG = """\b
Examples:
  refold demo                          kill an engine half way, and watch nothing get lost
  refold run "Why is the sky blue?"    generate, and keep the journal in ./refold.db
  refold log -n 20                     the last 20 events, in words
  refold request req-1                 the life of one request
  refold verify                        is the journal whole, were the laws kept?
  refold audit list                    what can be asked; `refold sql` asks anything else

A verb that reads takes the journal as its last argument; without one it takes $REFOLD_JOURNAL, else ./refold.db.

\b
Exit status: 0 fine, 1 violated or not found, 2 usage or rejected input, 3 journal unreadable, damaged or foreign,
4 journal of a newer refold, 5 journal locked or owned, 70 a bug of refold, 74 output that can't be
written, 130 interrupted, 141 nobody reads the output any more, 143 terminated."""


class Verb(NamedTuple):
    """Where a verb lives, and what `refold --help` says of it."""

    module: str
    summary: str


VERBS = {
    "run": Verb("run", "Generate text for prompts; keep the journal."),
    "log": Verb("log", "List the events, in words or as JSON."),
    "show": Verb("show", "Show the engine's state at a position."),
    "request": Verb("request", "Tell the life of one request."),
    "why": Verb("why", "Tell why a request waited, was preempted, or got stale output."),
    "blame": Verb("blame", "Say where each token of a request came from."),
    "stalls": Verb("stalls", "List the longest waits, and what they were for."),
    "verify": Verb("verify", "Check the hash chain, the laws and the digests."),
    "sql": Verb("sql", "Ask the journal anything, in SQL."),
    "audit": Verb("audit", "Answer an auditor's questions by name."),
    "diff": Verb("diff", "Find where two journals part, or a journal and today's code."),
    "bisect": Verb("bisect", "Find the first position where something turns true."),
    "assert": Verb("assert_", "Check that predicates hold all along."),
    "replay": Verb("replay", "Fold a journal, at once or step by step."),
    "fork": Verb("fork", "Play a journal again under another configuration."),
    "shrink": Verb("shrink", "Reduce a failing journal to a short test."),
    "capsule": Verb("capsule", "Pack a journal for a bug report, and unpack it."),
    "trace": Verb("trace", "Write a trace for Perfetto."),
    "report": Verb("report", "Explain a journal on one HTML page."),
    "head": Verb("head", "Export the head of a journal, to keep elsewhere."),
    "prove": Verb("prove", "Prove that a record is in a journal."),
    "check-proof": Verb("check_proof", "Check such a proof."),
    "redact": Verb("redact", "Erase what a finished request said."),
    "quarantine": Verb("quarantine", "Show what killed workers, and let it in again."),
    "stat": Verb("stat", "Show a journal's size, rates and growth."),
    "copy": Verb("copy", "Copy a journal to another store, verified."),
    "archive": Verb("archive", "Move the oldest records to a compressed file."),
    "compact": Verb("compact", "Give back the room of what isn't needed."),
    "migrate": Verb("migrate", "Create or upgrade a journal's tables."),
    "demo": Verb("demo", "Kill an engine half way, recover, and prove that nothing was lost."),
}


class Settings:
    """What holds for one run of the command. `command`, with its verb, `journal` and `stream`: once they are known.

    `told` has what was said on stderr and need not be said again.
    """

    __slots__ = ("command", "debug", "journal", "stream", "told")

    def __init__(self) -> None:
        self.command = "refold"
        self.journal = "JOURNAL"
        self.stream = DEFAULT_STREAM
        self.told: set[str] = set()
        self.debug = os.environ.get("REFOLD_DEBUG", "") not in {"", "0"}

    def report(self, error: BaseException) -> int:
        """Say on stderr what went wrong; returns the exit status."""
        about = {"command": self.command, "journal": self.journal, "stream": self.stream}
        return report(error, debug=self.debug, told=self.told, **about)


class VerbGroup(click.Group):
    """A group whose verbs are modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The verbs, in the order in which one meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a verb."""
        if cmd_name not in VERBS:
            return None
        command = import_module(f"refold.engine.cli.{VERBS[cmd_name].module}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the verb, or say which one is close."""
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(name, VERBS, n=1)
            guess = f"; did you mean `refold {close[0]}`?" if close else f"; the verbs are {', '.join(VERBS)}"
            raise click.UsageError(f"no verb {name!r}{guess}", ctx)
        if name in VERBS:
            ctx.obj.command = f"refold {name}"
        found = super().resolve_command(ctx, args)
        let_interrupt()
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the verbs without importing one."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the command line and exit; the only place that turns an error into an exit status."""
        _open_missing_streams()
        self._main_shell_completion(extra, prog_name or "refold", None)
        settings = Settings()
        status = 0
        try:
            with self.make_context(
                prog_name or "refold", list(sys.argv[1:] if args is None else args), obj=settings
            ) as ctx:
                self.invoke(ctx)
        except click.exceptions.Exit as error:
            status = error.exit_code
        except BaseException as error:  # noqa: BLE001 - the last frame: nothing may pass it as a traceback
            status = settings.report(error)
        try:
            sys.stdout.flush()  # also of a verb that failed half way, or that had a "no" to say
        except (OSError, KeyboardInterrupt) as error:
            status = settings.report(error)
        sys.exit(status)


def _open_missing_streams() -> None:
    """Give a process that was started without some of the standard streams empty ones: no file of ours may get their numbers.

    A stdout that was closed stays one that can't be written, so that whoever asked for data is told that it went nowhere.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if name == "stdout" else os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


def _show_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if not value:
        return
    import platform
    import sqlite3
    from importlib.util import find_spec

    from refold import __version__

    core = find_spec("refold.scheduler.fold")
    form = "" if core is None or str(core.origin).endswith(".py") else ", compiled core"
    click.echo(f"refold {__version__} (Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}{form})")
    ctx.exit()


def _set_debug(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value:
        ctx.obj.debug = True


def debug_option(function: Any) -> Any:
    """`--debug`, for the group and for each verb."""
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_set_debug,
        help="Show the traceback of an error ($REFOLD_DEBUG=1 does too).",
    )(function)


@click.group(
    cls=VerbGroup,
    epilog=EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show versions and exit."
)
@debug_option
@click.pass_context
def app(ctx: click.Context) -> None:
    """An LLM inference engine that keeps a journal: run it, and replay it."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
