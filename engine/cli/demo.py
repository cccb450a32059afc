"""`refold demo`: kill an engine half way, recover, and prove that nothing was lost.

A child process serves prompts and notes what its clients saw. It is killed with SIGKILL when about half is out. Then this
process opens the journal, attaches to every request after what its client saw, finishes them all, and settles three
accounts: the clients' receipts against the journal, the journal's hash chain, and the scheduler's laws. Every number in the
summary is counted from the journal or from the receipts.
"""

import asyncio
import contextlib
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from refold.engine.cli.console import json_option, verb
from refold.engine.cli.demo_prompts import CONVERSATIONS
from refold.engine.cli.demo_serving import Order, OrderedRequest, ReceiptBook, read_receipts, receipt_of
from refold.engine.cli.failures import BUG, NOT_SO, UNREADABLE, USAGE, Complaint
from refold.engine.cli.output import note, write_json
from refold.engine.history.plain import count
from refold.engine.history.receipts import Receipt

if TYPE_CHECKING:
    from refold.engine.cli.demo_summary import Summary

EXAMPLES = """Examples:
  refold demo                          with SmolLM2, in ./demo-output
  refold demo --model simulated        no weights, no torch: a few seconds
  refold demo --keep /tmp/demo --json"""

FOLDER = Path("demo-output")
JOURNAL, BEFORE, AFTER, CHILD_LOG = "demo.db", "seen-before.jsonl", "seen-after.jsonl", "engine.log"
BLOCK_SIZE, MAX_NUM_SEQS, WINDOW = 16, 8, 2

_POLL_S = 0.02
_PATIENCE_S = 90.0


@verb("demo", EXAMPLES)
@click.option(
    "--model", default="smollm2", show_default=True, help="smollm2, a GGUF file, a safetensors folder, or simulated."
)
@click.option(
    "--keep", metavar="DIR", type=click.Path(path_type=Path), help="Keep the journal here, instead of ./demo-output."
)
@click.option(
    "--max-tokens", type=click.IntRange(8, 512), default=40, show_default=True, help="Tokens per request, about."
)
@json_option
def command(model: str, keep: Path | None, max_tokens: int, as_json: bool) -> None:
    """Serve prompts, kill the engine with SIGKILL half way, recover, finish, verify.

    The engine runs with a KV pool that is too small, so that requests are preempted, and with two steps in flight, so that
    their output comes back stale. Exit status 1 if a token was lost, came twice or came wrong.
    """
    from refold.engine.cli.demo_summary import draw, summarize

    model = "simulated?step_ms=8&eos=-1" if model == "simulated" else model
    folder = _fresh_folder(keep)
    order = _order(model, folder, max_tokens)
    note(f"1/4  serving {count(len(order.requests), 'prompt')} with {model}, {order.options['num_blocks']} KV blocks")
    _serve_half(order, folder)
    num_seen = sum(len(receipt.token_ids) for receipt in read_receipts(folder / BEFORE))
    note(f"2/4  killed the engine with SIGKILL after {count(num_seen, 'token')}")
    note("3/4  opening the journal again, finishing every request")
    asyncio.run(_finish(order, folder))
    note("4/4  verifying: receipts, hash chain, laws")
    summary = summarize(order.journal, read_receipts(folder / BEFORE), read_receipts(folder / AFTER))
    if as_json:
        write_json({"schema": "refold.demo/1", **msgspec.to_builtins(summary)})
    else:
        draw(summary, _commands(summary))
    if not summary.is_clean:
        lost = f"{summary.lost_tokens} lost, {summary.duplicated_tokens} duplicated, {summary.wrong_tokens} wrong"
        raise Complaint(f"tokens: {lost}", f"this is a bug of refold: report it with {folder}", NOT_SO)


def _order(model: str, folder: Path, max_tokens: int) -> Order:
    """What to serve, and with how small a pool."""
    from refold.engine.models import find_model

    text = find_model(model).load_text()
    requests: list[OrderedRequest] = []
    prompts: list[list[int]] = []
    for number, (request_id, messages) in enumerate(CONVERSATIONS):
        limit = max_tokens + number % 5 * 4 - 8
        sampling = {"max_tokens": limit, "temperature": 0.0 if number % 3 else 0.6, "seed": number}
        requests.append(OrderedRequest(request_id, messages, sampling))
        prompts.append(text.encode(text.render_chat(list(messages))))
    options = {
        "block_size": BLOCK_SIZE,
        "num_blocks": _tight_pool(prompts, max_tokens),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 256,
        "max_in_flight_steps": WINDOW,
        "seed": 0,
    }
    return Order(model, str(folder / JOURNAL), str(folder / BEFORE), options, requests)


def _tight_pool(prompts: list[list[int]], max_tokens: int) -> int:
    """Blocks for the prompts that run first, shared beginnings counted once, and for a third of what these come to say.

    So all of them are admitted, and some are preempted when their answers grow.
    """
    first = prompts[:MAX_NUM_SEQS]
    full = {tuple(tokens[:end]) for tokens in first for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}
    answers = len(first) * math.ceil(max_tokens / BLOCK_SIZE)
    longest = max(math.ceil((len(tokens) + 2 * max_tokens) / BLOCK_SIZE) for tokens in prompts)
    return max(longest, len(full) + len(first) + answers // 3)


def _fresh_folder(keep: Path | None) -> Path:
    """A folder without an earlier demo in it. Only what an earlier demo left in its own folder is ever deleted."""
    folder = FOLDER if keep is None else keep
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        if keep is None:
            return Path(tempfile.mkdtemp(prefix="refold-demo-"))
        hint = "name a folder that you may write to with --keep"
        raise Complaint(f"cannot write to {folder}: {error.strerror}", hint, UNREADABLE) from error
    if keep is not None and (folder / JOURNAL).exists():
        raise Complaint(f"{folder / JOURNAL} exists already", "give --keep another folder, or delete the file", USAGE)
    _refuse_owned(folder / JOURNAL)
    for name in (
        JOURNAL,
        *(f"{JOURNAL}{suffix}" for suffix in ("-wal", "-shm", ".lock", ".mark")),
        BEFORE,
        AFTER,
        CHILD_LOG,
    ):
        (folder / name).unlink(missing_ok=True)
    return folder


def _refuse_owned(journal: Path) -> None:
    from refold.journal.errors import JournalOwned
    from refold.journal.stores import engine_owner

    owner = engine_owner(str(journal))
    if owner is not None:
        raise JournalOwned(
            f"{journal} is written by process {owner}: wait for that demo, or use --keep with another folder"
        )


def _serve_half(order: Order, folder: Path) -> None:
    """Let a child serve, and kill it when about half of all tokens are out."""
    arguments = [sys.executable, "-m", "refold.engine.cli.demo_serving", msgspec.json.encode(order).decode()]
    with (folder / CHILD_LOG).open("wb") as log:
        child = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - ourselves
    try:
        _wait_for_half(child, order, folder)
    finally:
        child.kill()
        status = child.wait()
    if status != -signal.SIGKILL:
        raise _child_failed(
            folder, f"the engine ended by itself with status {status} before half of its tokens were out"
        )


def _wait_for_half(child: "subprocess.Popen[bytes]", order: Order, folder: Path) -> None:
    from refold.engine.cli.progress import bar

    budget = {each.request_id: int(each.sampling["max_tokens"]) for each in order.requests}
    half, done, moved_s = sum(budget.values()) / 2, 0, time.monotonic()
    with bar("serving", int(half), "tokens until the kill") as progress:
        while done < half and child.poll() is None:
            time.sleep(_POLL_S)
            now = _progress(read_receipts(folder / BEFORE), budget)
            if now > done:
                progress.advance(now - done)
                done, moved_s = now, time.monotonic()
            elif time.monotonic() - moved_s > _PATIENCE_S:
                raise _child_failed(folder, f"no token for {_PATIENCE_S:.0f} s")


def _progress(receipts: list[Receipt], budget: dict[str, int]) -> int:
    """Tokens seen; a request that has ended counts with all that it might have had."""
    ended = {receipt.request_id for receipt in receipts if receipt.finish_reason is not None}
    running = sum(len(receipt.token_ids) for receipt in receipts if receipt.request_id not in ended)
    return running + sum(budget[request_id] for request_id in ended)


def _child_failed(folder: Path, what: str) -> Complaint:
    lines = (folder / CHILD_LOG).read_text(errors="replace").strip().splitlines()
    return Complaint(f"the demo's engine failed: {what}", f"it said: {lines[-1] if lines else 'nothing'}", BUG)


async def _finish(order: Order, folder: Path) -> None:
    """Open the journal again, attach to each request after what its client saw, and go on to the end."""
    from refold.engine.cli.progress import bar
    from refold.engine.engine import Engine

    receipts = read_receipts(folder / BEFORE)
    last = {each.request_id: -1 for each in order.requests}
    for receipt in receipts:
        last[receipt.request_id] = receipt.index + len(receipt.token_ids) - 1
    ended = {receipt.request_id for receipt in receipts if receipt.finish_reason is not None}
    book = ReceiptBook(str(folder / AFTER))
    with bar("finishing", len(last) - len(ended), "requests") as progress:
        async with Engine(order.model, order.journal, **order.options) as engine:

            async def follow(request_id: str) -> None:
                async with contextlib.aclosing(engine.resume(request_id, after=last[request_id])) as deltas:
                    async for delta in deltas:
                        book.add(receipt_of(delta))
                progress.advance()

            await asyncio.gather(*(follow(request_id) for request_id in last if request_id not in ended))


def _commands(summary: "Summary") -> list[tuple[str, str]]:
    """Three commands that work as they stand, from this folder."""
    refold, journal = _command_name(), shlex.quote(summary.journal)
    request = shlex.quote(summary.eventful_request_id)
    return [
        (f"{refold} request {request} {journal}", "the life of one request, across the kill"),
        (f"{refold} show --at {summary.last_position_before_kill} {journal}", "the engine at the moment of the kill"),
        (f"{refold} log --kind RequestPreempted,StaleOutputConsumed,WorkerLost {journal}", "every trouble there was"),
    ]


def _command_name() -> str:
    """How this command was called, so that it can be called again."""
    called = Path(sys.argv[0])
    if called.name != "refold":
        return f"{shlex.quote(_from_here(Path(sys.executable)))} -m refold"
    found = shutil.which("refold")
    if found is not None and Path(found).resolve() == called.resolve():
        return "refold"
    return shlex.quote(_from_here(called))


def _from_here(path: Path) -> str:
    """A path as one would type it here."""
    absolute = path.absolute()
    return os.path.relpath(absolute) if absolute.is_relative_to(Path.cwd()) else str(absolute)
