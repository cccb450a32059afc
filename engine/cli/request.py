"""`refold request`: the life of one request."""

import sys
from collections.abc import Callable
from typing import Any

import click
import msgspec

from refold.engine.cli.console import journal_argument, json_option, reading, stream_option, tell_if_cut, verb
from refold.engine.cli.failures import UNREADABLE, Complaint, damage_hint, damaged
from refold.engine.cli.output import clock, duration, note, painter, write, write_json
from refold.engine.cli.progress import bar
from refold.engine.cli.unknown import unknown_request
from refold.engine.history.life import Life, LifeStory
from refold.engine.history.plain import count, safe, safe_text
from refold.engine.history.replay import Contradiction, replay
from refold.engine.history.waits import Wait, Waits, by_reason
from refold.engine.history.words import sampling_in_words
from refold.journal.errors import JournalCorrupt, RefoldError
from refold.journal.store import JournalReader
from refold.scheduler.stall import WAIT_WORDS

EXAMPLES = """Examples:
  refold request req-1                 the life of req-1 in ./refold.db
  refold request req-1 run.db --json   the same as data
  refold log --request req-1           every event that names it
  refold why req-1                     the causes of each delay"""


@verb("request", EXAMPLES)
@click.argument("request_id", metavar="ID")
@stream_option
@json_option
@journal_argument
def command(request_id: str, stream: str, as_json: bool, journal: str) -> None:
    """Tell the life of a request, from its submission to its end.

    When it was admitted, what preempted it and for whom, what became of its tokens in flight, and how long everything
    took. The request may have outlived its engine.
    """
    story, waits = LifeStory(request_id), list[Wait]()
    with reading(journal, stream) as reader:
        broken = _follow(story, reader, stream, waits)
    if story.life is None:
        if broken is not None:
            raise damaged(broken, journal, stream)
        raise unknown_request(request_id, story.names.similar(request_id), journal, stream)
    text = text_of(story.life)
    if as_json:
        told = msgspec.to_builtins(story.life)
        write_json({"schema": "refold.request/1", **told, "waited_ns": by_reason(waits), "text": text})
    else:
        _tell(story, text, waits)
    if broken is not None:
        line = f"the life above is told up to record {broken.position - 1}, the last that is sound: {broken}"
        raise Complaint(line, damage_hint(broken, journal, stream), UNREADABLE) from broken
    tell_if_cut(journal, story.position, stream, is_open=story.is_open)


def _follow(
    story: LifeStory, reader: JournalReader, stream: str, waits: list[Wait]
) -> JournalCorrupt | Contradiction | None:
    """Follow the journal as far as it can be read; the error that ended it early, if one did."""
    follower, head, broken = Waits(story.request_id), reader.head(stream), None
    try:
        with bar("reading", head.position, "records") as progress:
            for record, events, state in replay(reader, stream, expect=head):
                story.observe(record, events)
                waits += follower.observe(record, events, state)
                progress.advance()
    except (JournalCorrupt, Contradiction) as error:
        broken = error
    waits += follower.rest()
    if story.life is not None:
        waits[:] = [wait for wait in waits if wait.handle == story.life.handle]
    return broken


def text_of(life: Life) -> str | None:
    """The output as text, where the model's tokenizer is at hand; None where it isn't (its files, or its packages)."""
    from refold.engine.models import find_model

    try:
        detokenizer = find_model(life.model).load_text().detokenizer([])
        return detokenizer.push(life.output_token_ids) + detokenizer.flush()
    except (ImportError, OSError, RefoldError):
        return None


def _tell(story: LifeStory, text: str | None, waits: list[Wait]) -> None:
    life = story.life
    assert life is not None
    paint = painter(sys.stdout)
    write(paint(f"{safe(life.request_id)}: {_summary(life)}", bold=True))
    write(
        f"{count(life.num_prompt_tokens, 'prompt token')}, up to {life.sampling.max_tokens} more; "
        f"{sampling_in_words(life.sampling)}; model {safe(life.model)}"
    )
    if story.num_namesakes:
        write(f"{count(story.num_namesakes, 'earlier request')} had the same id; this is the last one")
    write("")
    for moment in life.moments:
        where = f"{moment.position:>7}  {clock(moment.time_ns)}  e{moment.engine_epoch}"
        colour = _COLOURS.get(moment.kind)
        words = _WORDS[moment.kind](moment.facts)
        write(f"{paint(where, dim=True)}  {paint(words, fg=colour) if colour else words}")
    write("")
    for line in _latencies(life):
        write(line)
    for reason, spent in by_reason(waits).items():
        if spent:
            write(f"{'waited':<20}{duration(spent)} for {WAIT_WORDS[reason]}")
    if life.is_redacted:
        write(f"{'output':<20}erased")
        return
    write(f"{'output':<20}{' '.join(map(str, life.output_token_ids)) or 'nothing yet'}")
    if text:
        write(f"{'text':<20}{safe_text(text)}")
    elif text is None:
        note(
            f"hint: the text needs the tokenizer of {safe(life.model)}: pip install 'refold[gpu]', and the model's files"
        )


def _summary(life: Life) -> str:
    words = f"finished ({life.finish_reason})" if life.status == "finished" else life.status
    words += ", redacted" if life.is_redacted else f", {count(len(life.output_token_ids), 'token')} out"
    if life.num_preemptions:
        words += f", preempted {count(life.num_preemptions, 'time')}"
    if life.num_workers_lost:
        words += f", lost its worker {count(life.num_workers_lost, 'time')}"
    return words


def _latencies(life: Life) -> list[str]:
    figures = {
        "queued": life.queued_ns,
        "time to first token": life.time_to_first_token_ns,
        "mean inter-token": life.mean_inter_token_ns,
        "total": life.total_ns,
    }
    return [f"{name:<20}{duration(value)}" for name, value in figures.items() if value is not None]


_COLOURS = {
    "submitted": "blue",
    "preempted": "yellow",
    "stale_delivered": "magenta",
    "stale_dropped": "magenta",
    "worker_lost": "red",
    "aborted": "red",
    "quarantined": "red",
    "quarantine_lifted": "cyan",
    "finished": "green",
    "redacted": "red",
}


def _entered(verb_: str) -> Callable[[dict[str, Any]], str]:
    def words(facts: dict[str, Any]) -> str:
        hit = facts["num_hit_tokens"]
        cache = f", {count(hit, 'token')} from the prefix cache" if hit else ""
        return f"{verb_} at step {facts['step']}{cache}"

    return words


def _output(facts: dict[str, Any]) -> str:
    first, last = facts["first_index"], facts["last_index"]
    if first == last:
        return f"output {first} delivered, step {facts['first_step']}"
    return f"outputs {first} to {last} delivered, steps {facts['first_step']} to {facts['last_step']}"


def _preempted(facts: dict[str, Any]) -> str:
    return f"preempted {facts['words']}"


def _stale(fate: str) -> Callable[[dict[str, Any]], str]:
    def words(facts: dict[str, Any]) -> str:
        tokens = facts["num_tokens"]
        output = f"{count(tokens, 'output')} {fate}" if tokens else "nothing sampled"
        if "first_index" in facts:
            output = (
                f"output {facts['first_index']} {fate}" if tokens == 1 else f"{output} from {facts['first_index']} on"
            )
        return (
            f"step {facts['step']} came back stale: {count(facts['num_scheduled_tokens'], 'scheduled token')}, {output}"
        )

    return words


def _worker_lost(facts: dict[str, Any]) -> str:
    lost = count(facts["num_lost_tokens"], "scheduled token")
    return f"worker {facts['generation']} lost ({safe(facts['reason'])}) with {lost} in flight; will compute again"


def _finished(facts: dict[str, Any]) -> str:
    stop = f" (stop token {facts['stop_token_id']})" if facts["stop_token_id"] is not None else ""
    message = f": {safe(facts['message'])}" if facts["message"] else ""
    return f"finished: {facts['reason']} after {count(facts['num_output_tokens'], 'token')}{stop}{message}"


def _because(reason: str) -> str:
    return f" ({safe(reason)})" if reason else ""


def _computed(what: str) -> Callable[[dict[str, Any]], str]:
    def words(facts: dict[str, Any]) -> str:
        tokens = count(facts["num_tokens"], "token")
        return f"computes {tokens} from position {facts['first_position']}{what}, step {facts['step']}"

    return words


_WORDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "submitted": lambda facts: f"submitted with {count(facts['num_prompt_tokens'], 'prompt token')}",
    "admitted": _entered("admitted"),
    "resumed": _entered("admitted again"),
    "chunk": _computed(", a chunk"),
    "prompt_end": _computed(" to the last one known"),
    "first_token": lambda facts: f"output 0 delivered, the first, step {facts['step']}",
    "output": _output,
    "took_blocks_of": lambda facts: (
        f"{safe(facts['victim'])} was preempted for it: needed {count(facts['needed_blocks'], 'block')}"
    ),
    "preempted": _preempted,
    "stale_delivered": _stale("delivered"),
    "stale_dropped": _stale("dropped"),
    "worker_lost": _worker_lost,
    "engine_closed": lambda facts: f"engine {facts['engine_epoch']} had closed; the next one computes it again",
    "turn_ended": lambda facts: f"turn ended: {facts['reason']} after {count(facts['num_output_tokens'], 'token')}",
    "extended": lambda facts: f"extended by {count(facts['num_tokens'], 'token')}",
    "input_closed": lambda _: "closed: no more input",
    "grammar_ready": lambda _: "its grammar is ready",
    "drafts_proposed": lambda facts: f"{count(facts['num_tokens'], 'draft')} proposed",
    "aborted": lambda facts: f"aborted by {safe(facts['cause'])}",
    "quarantined": lambda facts: (
        f"found to kill workers ({facts['num_lost_workers']} so far): its content is quarantined"
    ),
    "quarantine_lifted": lambda _: "its content is quarantined no longer",
    "finished": _finished,
    "redacted": lambda facts: "redacted: what it said and was told is erased" + _because(facts["reason"]),
}
