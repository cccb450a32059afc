"""`refold run`: generate text, and keep the journal."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from refold.engine.cli.console import DEFAULT_JOURNAL, json_option, reading, remembered, verb
from refold.engine.cli.failures import BUG, UNREADABLE, USAGE, Complaint, explain
from refold.engine.cli.interrupts import in_words, let_finish, once_is_enough, terminable
from refold.engine.cli.output import named, note
from refold.engine.cli.run_notes import (
    nothing_to_do,
    report_recovery,
    require_something,
    tell_kind,
    tell_quarantine,
    tell_repeated,
    warn_of_copies,
)
from refold.engine.cli.sampling_in import sampling_options, taken_sampling
from refold.engine.cli.submission import Submission, is_memory
from refold.engine.cli.typed import typed
from refold.engine.history.plain import count, safe

if TYPE_CHECKING:
    from refold.engine.cli.printer import Printer
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
    "--journal",
    envvar="REFOLD_JOURNAL",
    default=DEFAULT_JOURNAL,
    show_default=True,
    callback=remembered,
    help="Where to keep the journal.",
)
@sampling_options
@click.option("--chat/--no-chat", default=None, help="Use the model's chat template; the default where it has one.")
@click.option("--num-blocks", type=int, help="KV blocks in the pool.")
@click.option("--block-size", type=int, help="Tokens per KV block.")
@click.option("--max-num-seqs", type=int, help="Requests that run at once.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens per step, at most.")
@click.option("--max-in-flight-steps", "--window", type=int, help="Steps scheduled ahead; 1 is synchronous.")
@click.option("--policy", help="fcfs, priority or fair_share.")
@click.option("--speculation", help="off, or drafts from the scheduler's look-up (ngram) or the worker's (worker).")
@click.option("--num-speculative-tokens", type=int, help="Drafts per request and step, at most.")
@click.option("--threads", type=int, help="CPU threads of the worker.")
@click.option("--dtype", help="float32, bfloat16 or int8: faster and coarser in this order.")
@click.option(
    "--record-logits", is_flag=True, default=None, help="Digests of logits, for `refold replay --execute` to compare."
)
@click.option("--worker", help="process (it may die, the engine goes on) or thread.")
@click.option("--start-timeout-s", type=float, help="Seconds that a worker process has until its first sign of life.")
@click.option("--audit", is_flag=True, help="Keep the SQL views up to date while it runs, at low priority.")
@json_option
def command(
    prompts: tuple[str, ...],
    file: str | None,
    model: str,
    journal: str,
    chat: bool | None,
    as_json: bool,
    **engine_options: Any,
) -> None:
    """Generate text for prompts given as arguments, in a file or on stdin.

    Every request goes through the journal. Interrupt it, kill it, pull the plug: the same command on the same journal
    finishes what was left, without losing or repeating a token. What an interrupted run has finished is printed, not computed
    again; so is whatever has the id that a prompt brings, if it asked for the same. Without prompts it only finishes what was
    left. A run that ended in good order is done: the same command then asks anew.
    """
    from refold.engine.cli.printer import Printer
    from refold.engine.cli.prompts_in import read_prompts
    from refold.engine.engine import Engine
    from refold.engine.logs import configure_logging

    sampling = taken_sampling(engine_options)
    read = read_prompts(prompts, file, sampling)
    printer = Printer(as_json=as_json)
    configure_logging(around_line=printer.line_of_its_own)
    options = {name: value for name, value in engine_options.items() if value is not None}
    engine = Engine(model, journal, **options).find_model()
    as_chat = _has_chat_template(engine) if chat is None else chat
    for each in read.asked if as_chat else ():
        each.as_chat()
    for refused in read.refused:
        printer.reject(*refused)
    submission = Submission([each for each in read.asked if _is_servable(engine, each, printer)], model, journal)
    if read and not submission.asked:
        raise SystemExit(USAGE)
    if not read:
        require_something(journal)
    tell_kind(journal)
    warn_of_copies(submission.asked)
    with terminable(), _explained(submission, journal), engine.open(await_worker=False), _impatient():
        assert engine.recovery is not None
        report_recovery(engine.recovery)
        tell_quarantine(engine, journal)
        submission.since = _name(submission.asked, engine, journal)
        status = max(_serve(engine, submission, printer), USAGE if len(submission.asked) < len(read) else 0)
    can_tell = printer.last_id and not is_memory(journal)
    tells = f"; `{typed('request', printer.last_id, journal)}` tells more" if can_tell else ""
    note(f"journal: {named(journal)}{tells}")
    if status:
        raise SystemExit(status)


@contextlib.contextmanager
def _explained(submission: Submission, journal: str) -> Iterator[None]:
    """Ctrl-C, SIGTERM, a worker that can't be kept alive, or a disk that fails, closes the engine; then this says how to go on."""
    from refold.journal.errors import JournalError, WorkerLost

    try:
        yield
    except KeyboardInterrupt as interrupt:
        line, status = in_words(interrupt)
        raise Complaint(line, submission.how_to_go_on(), status) from None
    except WorkerLost as error:
        raise Complaint(str(error), submission.how_to_go_on(), BUG) from error
    except JournalError as error:
        line, hint, status = explain(error, "refold run", journal)
        hint = submission.how_to_go_on_once_mended(error) or hint if status == UNREADABLE else hint
        raise Complaint(line, hint, status) from error


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """While the engine closes, a second Ctrl-C or SIGTERM ends the process at once. The journal survives that, as it survives a kill.

    One that comes only then, after the last answer, has nothing to interrupt: the run ends as if it hadn't come.
    """
    try:
        yield
        let_finish(lambda: note("all is done: closing the journal; once more ends it at once"))
    except KeyboardInterrupt as interrupt:
        once_is_enough()
        note(
            f"{in_words(interrupt)[0]}: closing the journal when the steps in flight are done; once more ends it at once"
        )
        raise


def _name(asked: "list[Asked]", engine: "Engine", journal: str) -> int:
    """Give ids to prompts that bring none, and find those that are in the journal already.

    Returns the journal's length: all that is submitted now comes behind.
    """
    from refold.engine.cli.earlier import name_and_find
    from refold.journal.errors import JournalError
    from refold.journal.record import EMPTY_HEAD

    try:
        with reading(journal) as reader:
            head = reader.head()
    except JournalError:  # in memory: there is no other run
        head = EMPTY_HEAD._replace(engine_epoch=1)
    name_and_find(asked, engine, journal, head.engine_epoch)
    if found := sum(bool(each.journaled) for each in asked):
        note(
            f"taken up: {found:,} of {count(len(asked), 'prompt')} in the journal already; what it has isn't computed again"
        )
    tell_repeated(asked)
    return head.position


def _has_chat_template(engine: "Engine") -> bool:
    from refold.journal.errors import Rejected

    try:
        return engine.tokenizer is not None and bool(
            engine.tokenizer.render_chat([{"role": "user", "content": "Hello"}])
        )
    except Rejected:
        return False


def _is_servable(engine: "Engine", asked: "Asked", printer: "Printer") -> bool:
    """Whether a prompt can be served, as far as that can be known before an engine leaves its traces in the journal.

    What only the journal knows comes later: whether an id is taken, or is none for a new request but an old one's.
    """
    from refold.engine.submissions import looks_like_choice

    request_id = "this" if asked.request_id is None or looks_like_choice(asked.request_id) else asked.request_id
    return _passes(
        lambda: engine.check(asked.prompt, asked.sampling, request_id=request_id, **_order(asked)), asked, printer
    )


def _passes(attempt: Callable[[], object], asked: "Asked", printer: "Printer") -> bool:
    """Try something with a prompt. One that is rejected is reported, and stands in nobody's way."""
    from refold.journal.errors import Rejected

    try:
        attempt()
    except Rejected as error:
        line, hint, _ = explain(error, "refold run")
        line = asked.in_own_words(line)
        printer.reject(asked.place, line, asked.remedy(line) or hint)
        return False
    return True


def _order(asked: "Asked") -> dict[str, Any]:
    return {"priority": asked.priority, "cache_salt": asked.cache_salt}


def _serve(engine: "Engine", submission: Submission, printer: "Printer") -> int:
    """Submit the prompts, wait for all that is unfinished; returns the exit status.

    The prompts are in the journal before the model's weights are loaded: from then on, a kill costs nothing.
    """
    from refold.engine.cli.progress import bar

    assert engine.recovery is not None
    left, asked = engine.recovery.request_ids, submission.asked
    submission.is_open = True
    if not asked and not left:
        raise nothing_to_do()
    taken_up = {name for each in asked for name in each.journaled}
    status, ids = 0, [request_id for request_id in left if request_id not in taken_up]
    taken: list[Asked] = []
    names: set[str | None] = set()
    for each in asked:
        if each.is_repeated and each.request_id in names:
            continue
        if _submit(engine, each, ids, printer):
            taken.append(each)
            names.add(each.request_id)
            submission.num_receipts += 1
        else:
            status = USAGE
    engine.await_worker()
    printer.expect(ids, {name: _title(each) for each in taken for name in each.ids()})
    with bar("generating", len(ids), "requests", is_wanted=not printer.shows_progress) as progress:

        def on_delta(delta: "Delta") -> None:
            printer.add(delta)
            progress.advance(delta.finish_reason is not None)

        try:
            engine.wait(ids, on_delta)
        finally:
            printer.end_line()
    return max(status, printer.status)


def _title(asked: "Asked") -> str:
    """The beginning of a prompt, on one line."""
    prompt = asked.prompt
    if isinstance(prompt, list):
        last = prompt[-1] if prompt else ""
        prompt = str(last.get("content", "")) if isinstance(last, dict) else count(len(prompt), "token")
    line = " ".join(prompt.split())
    return safe(line if len(line) <= _MAX_TITLE else line[: _MAX_TITLE - 1] + "\N{HORIZONTAL ELLIPSIS}")


def _submit(engine: "Engine", asked: "Asked", ids: list[str], printer: "Printer") -> bool:
    """Submit what the journal doesn't have of one prompt, and note its ids; false if it was rejected."""
    from refold.engine.engine import enqueue_rest

    def submit() -> None:
        if asked.journaled:
            rest = {"request_id": asked.request_id, **_order(asked)}
            enqueue_rest(engine, asked.prompt, asked.sampling, asked.journaled, **rest)
            ids.extend(asked.ids())
            return
        name = engine.enqueue(asked.prompt, asked.sampling, request_id=asked.request_id, **_order(asked))
        ids.extend(engine.choices(name))

    return _passes(submit, asked, printer)
