"""`refold run`: generate text, and keep the journal."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from refold.engine.cli.console import (
    DEFAULT_JOURNAL,
    json_option,
    named,
    note,
    painter,
    reading,
    verb,
    write,
    write_json,
)
from refold.engine.cli.failures import INTERRUPTED, NOT_SO, USAGE, Complaint, explain
from refold.engine.history.plain import count, listed, safe, safe_text

if TYPE_CHECKING:
    from refold.engine.cli.prompts_in import Asked
    from refold.engine.engine import Delta, Engine

EXAMPLES = """Examples:
  refold run "Why is the sky blue?"
  refold run --file prompts.txt --journal batch.db --max-tokens 40
  printf 'One prompt\\nper line\\n' | refold run - --json
  refold run --journal batch.db            finish what an interrupted run left unfinished
  refold run --model simulated "no weights, no torch"

A line of a file that starts with { is JSON: {"prompt": "...", "sampling": {"max_tokens": 20}} or {"messages": [...]}."""


_MAX_TITLE = 60


@verb("run", EXAMPLES)
@click.argument("prompts", nargs=-1, metavar="[PROMPTS]...")
@click.option("--file", metavar="PATH", help="Prompts from a file, one per line or JSON lines; - is stdin.")
@click.option(
    "--model", default="smollm2", show_default=True, help="smollm2, a GGUF file, a safetensors folder, or simulated."
)
@click.option(
    "--journal", envvar="REFOLD_JOURNAL", default=DEFAULT_JOURNAL, show_default=True, help="Where to keep the journal."
)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens per prompt, at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, default=0, help="Only the K likeliest tokens; 0 for all.")
@click.option("--top-p", type=float, default=1.0, help="Only the likeliest tokens that make up this probability.")
@click.option("--seed", type=int, help="Of every prompt; without one the engine draws one each.")
@click.option("--chat/--no-chat", default=None, help="Use the model's chat template; the default where it has one.")
@click.option("--num-blocks", type=int, help="KV blocks in the pool.")
@click.option("--block-size", type=int, help="Tokens per KV block.")
@click.option("--max-num-seqs", type=int, help="Requests that run at once.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens per step, at most.")
@click.option("--max-in-flight-steps", "--window", type=int, help="Steps scheduled ahead; 1 is synchronous.")
@click.option("--policy", help="fcfs, priority or fair_share.")
@click.option("--threads", type=int, help="CPU threads of the worker.")
@click.option("--worker", help="process (it may die, the engine goes on) or thread.")
@json_option
def command(
    prompts: tuple[str, ...],
    file: str | None,
    model: str,
    journal: str,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    chat: bool | None,
    as_json: bool,
    **engine_options: Any,
) -> None:
    """Generate text for prompts given as arguments, in a file or on stdin.

    Every request goes through the journal. Interrupt it, kill it, pull the plug: the same command on the same journal
    finishes what was left, without losing or repeating a token. Without prompts it does only that.
    """
    from refold.engine.cli.prompts_in import read_prompts
    from refold.engine.engine import Engine
    from refold.engine.logs import configure_logging

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    asked = read_prompts(prompts, file, sampling)
    configure_logging()
    options = {name: value for name, value in engine_options.items() if value is not None}
    engine = Engine(model, journal, **options)
    printer = Printer(as_json=as_json)
    with _interruptible(journal, model), engine, _impatient():
        _report_recovery(engine)
        as_chat = _has_chat_template(model) if chat is None else chat
        status = _serve(engine, _named(asked, journal), as_chat, printer)
    tells = f"; `refold request {printer.last_id} {named(journal)}` tells more" if printer.last_id else ""
    note(f"journal: {named(journal)}{tells}")
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def _interruptible(journal: str, model: str) -> Iterator[None]:
    """Ctrl-C closes the engine, and then says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        hint = (
            f"the journal is whole: `refold run --model {safe(model)} --journal {named(journal)}` finishes what is left"
        )
        raise Complaint("interrupted", hint, INTERRUPTED) from None


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """While the engine closes, a second Ctrl-C ends the process at once. The journal survives that, as it survives a kill."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        note("interrupted: finishing the steps in flight; once more ends it at once")
        raise


def _named(asked: "list[Asked]", journal: str) -> "list[Asked]":
    """Give short ids to prompts that bring none: `run3-1` is the first of the journal's third engine."""
    from refold.journal.errors import JournalError

    try:
        with reading(journal) as reader:
            epoch = reader.head().engine_epoch
    except JournalError:  # in memory: there is no other run
        epoch = 1
    for number, each in enumerate(asked, start=1):
        each.request_id = each.request_id if each.request_id is not None else f"run{epoch}-{number}"
    return asked


def _report_recovery(engine: "Engine") -> None:
    recovery = engine.recovery
    if recovery is None or not recovery.requests:
        return
    end = "was closed" if recovery.was_closed else "ended without a word"
    note(
        f"recovered: the last engine on this journal {end}; {count(recovery.requests, 'unfinished request')} with "
        f"{count(recovery.tokens, 'token')} so far will be finished too: {listed([safe(i) for i in engine.unfinished()])}"
    )


def _has_chat_template(model: str) -> bool:
    from refold.engine.models import find_model
    from refold.journal.errors import Rejected

    try:
        return bool(find_model(model).load_text().render_chat([{"role": "user", "content": "Hello"}]))
    except Rejected:
        return False


def _serve(engine: "Engine", asked: "list[Asked]", as_chat: bool, printer: "Printer") -> int:
    """Submit the prompts, wait for all that is unfinished; returns the exit status."""
    from refold.engine.cli.progress import bar

    left = engine.unfinished()
    if not asked and not left:
        raise Complaint("no prompt, and nothing unfinished in the journal", 'give a prompt: `refold run "Hello"`')
    status, ids = 0, list(left)
    for each in asked:
        status = max(status, _submit(engine, each, as_chat, ids, printer))
    printer.expect(ids, {each.request_id: _title(each) for each in asked if each.request_id is not None})
    with bar("generating", len(ids), "requests") as progress:

        def on_delta(delta: "Delta") -> None:
            printer.add(delta)
            progress.advance(delta.finish_reason is not None)

        engine.wait(ids, on_delta)
    return max(status, printer.status)


def _title(asked: "Asked") -> str:
    """The beginning of a prompt, on one line."""
    prompt = asked.prompt
    if isinstance(prompt, list):
        last = prompt[-1] if prompt else ""
        prompt = str(last.get("content", "")) if isinstance(last, dict) else count(len(prompt), "token")
    line = " ".join(prompt.split())
    return safe(line if len(line) <= _MAX_TITLE else line[: _MAX_TITLE - 1] + "\N{HORIZONTAL ELLIPSIS}")


def _submit(engine: "Engine", asked: "Asked", as_chat: bool, ids: list[str], printer: "Printer") -> int:
    """Submit one prompt. One that is rejected is reported, and stands in nobody's way."""
    from refold.journal.errors import Rejected

    prompt = asked.prompt
    if as_chat and isinstance(prompt, str) and prompt:
        prompt = [{"role": "user", "content": prompt}]
    try:
        request_id = engine.enqueue(
            prompt,
            asked.sampling,
            request_id=asked.request_id,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )
    except Rejected as error:
        line, hint, _ = explain(error)
        printer.reject(asked.place, line, hint)
        return USAGE
    ids.append(request_id)
    return 0


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
        self._next = 0

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
        streams = len(self._ids) == 1 and not self._as_json
        if streams:
            sys.stdout.write(safe_text(delta.text))
            sys.stdout.flush()
        if delta.finish_reason is None:
            return
        self.last_id = delta.request_id
        self._ends[delta.request_id] = delta
        if delta.finish_reason in {"error", "capacity"}:
            self.status = NOT_SO
            note(f"refold: {safe(delta.request_id)} ended with {delta.finish_reason}: {safe(delta.message)}")
        if streams:
            write("")
        elif self._as_json:
            self._write_json(delta)
        else:
            self._write_due()

    def _write_json(self, end: "Delta") -> None:
        write_json(
            {
                "schema": "refold.run/1",
                "request_id": end.request_id,
                "text": "".join(self._texts[end.request_id]),
                "token_ids": self._token_ids[end.request_id],
                "finish_reason": end.finish_reason,
                "message": end.message,
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
