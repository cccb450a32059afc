"""The demo's summary: every number counted from the journal or from the clients' receipts."""

import sys
from collections import Counter
from pathlib import Path

import msgspec

from refold.engine.cli.output import rich_console
from refold.engine.history.plain import count, safe, safe_text
from refold.engine.history.receipts import Receipt, settle
from refold.engine.history.verify import Verdict, format_head, verify_journal
from refold.journal.codec import decode
from refold.journal.events import (
    EngineOpened,
    Event,
    OutputDelivered,
    RequestFinished,
    RequestPreempted,
    RequestSubmitted,
    StaleOutputConsumed,
    StepScheduled,
)
from refold.journal.record import Record
from refold.journal.stores import open_reader
from refold.projections.outbox import Outbox


class Summary(msgspec.Struct):
    """What happened. `answer_before` and `answer_after` are one recovered answer, cut where the engine was killed."""

    model: str
    journal: str
    journal_bytes: int
    requests: int
    finished_requests: int
    tokens: int
    steps: int
    tokens_per_second: float
    preemptions: int
    num_blocks: int
    stale_tokens_delivered: int
    stale_tokens_dropped: int
    tokens_before_kill: int
    steps_in_flight_at_kill: int
    last_position_before_kill: int
    recovered_requests: int
    recovery_seconds: float
    lost_tokens: int
    duplicated_tokens: int
    wrong_tokens: int
    records: int
    events: int
    laws: int
    digests: int
    head: str
    eventful_request_id: str
    answer_request_id: str = ""
    answer_before: str = ""
    answer_after: str = ""

    @property
    def is_clean(self) -> bool:
        """Nothing lost, nothing twice, nothing wrong, nothing left."""
        clean = not (self.lost_tokens or self.duplicated_tokens or self.wrong_tokens)
        return clean and self.finished_requests == self.requests


class _Story:
    """What the summary needs beyond the totals: times, the moment of the kill, and who had the most trouble."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.model = ""
        self.num_blocks = 0
        self.first_ns: dict[int, int] = {}
        self.last_ns: dict[int, int] = {}
        self.first_output_ns: dict[int, int] = {}
        self.killed: Record | None = None
        self.unfinished_at_kill: set[int] = set()
        self.trouble: Counter[int] = Counter()

    def observe(self, record: Record, events: list[Event]) -> None:
        """Follow one record."""
        self.outbox.observe_all(events)
        if record.engine_epoch == 1:
            self.killed = record
        for event in events:
            self._observe(record, event)

    def _observe(self, record: Record, event: Event) -> None:
        epoch = record.engine_epoch
        if isinstance(event, EngineOpened):
            self.model, self.num_blocks = event.config.model, event.config.num_blocks
        elif isinstance(event, StepScheduled):
            self.first_ns.setdefault(epoch, record.time_ns)
        elif isinstance(event, RequestSubmitted) and epoch == 1:
            self.unfinished_at_kill.add(event.handle)
        elif isinstance(event, RequestFinished) and epoch == 1:
            self.unfinished_at_kill.discard(event.handle)
        elif isinstance(event, RequestPreempted):
            self.trouble[event.handle] += 2
        elif isinstance(event, OutputDelivered | StaleOutputConsumed):
            self.first_output_ns.setdefault(epoch, record.time_ns)
            self.last_ns[epoch] = record.time_ns
            if isinstance(event, StaleOutputConsumed):
                self.trouble.update(event.handles)

    def serving_seconds(self) -> float:
        """From each life's first step to its last output."""
        return sum(last - self.first_ns[epoch] for epoch, last in self.last_ns.items()) / 1e9

    def recovery_seconds(self) -> float:
        """From the last record of the killed engine to the first output of the next one."""
        assert self.killed is not None
        return (self.first_output_ns.get(2, self.killed.time_ns) - self.killed.time_ns) / 1e9

    def eventful(self) -> str:
        """The request with the most trouble, of those that crossed the kill if there are any."""
        crossed = self.unfinished_at_kill or set(self.outbox.by_handle)
        handle = max(sorted(crossed), key=lambda each: self.trouble[each])
        return self.outbox.by_handle[handle].request_id


def summarize(journal: str, before: list[Receipt], after: list[Receipt]) -> Summary:
    """Verify the journal, settle the receipts against it, and count.

    Raises:
        JournalCorrupt: the journal is damaged.
        InvariantViolation: a law is broken.
    """
    reader = open_reader(journal)
    try:
        verdict = verify_journal(reader)
        story = _Story()
        for record in reader.read():
            story.observe(record, decode(record))
    finally:
        reader.close()
    return _counted(journal, verdict, story, before, after)


def _counted(journal: str, verdict: Verdict, story: _Story, before: list[Receipt], after: list[Receipt]) -> Summary:
    totals = verdict.totals
    outputs = {output.request_id: output.token_ids for output in story.outbox.by_handle.values()}
    account = settle([*before, *after], outputs)
    assert story.killed is not None
    answer = _answer_across_the_kill(before, after)
    return Summary(
        model=story.model,
        journal=journal,
        journal_bytes=Path(journal).stat().st_size,
        requests=totals.requests,
        finished_requests=sum(totals.finished.values()),
        tokens=totals.tokens,
        steps=totals.steps,
        tokens_per_second=totals.tokens / max(story.serving_seconds(), 1e-9),
        preemptions=totals.preemptions,
        num_blocks=story.num_blocks,
        stale_tokens_delivered=totals.stale_tokens_delivered,
        stale_tokens_dropped=totals.stale_tokens_dropped,
        tokens_before_kill=sum(len(receipt.token_ids) for receipt in before),
        steps_in_flight_at_kill=totals.lost_steps,
        last_position_before_kill=story.killed.position,
        recovered_requests=len(story.unfinished_at_kill),
        recovery_seconds=story.recovery_seconds(),
        lost_tokens=account.num_lost,
        duplicated_tokens=account.num_duplicated,
        wrong_tokens=account.num_wrong,
        records=verdict.num_records,
        events=verdict.num_events,
        laws=len(verdict.laws),
        digests=verdict.num_digests,
        head=format_head(verdict.head),
        eventful_request_id=story.eventful(),
        answer_request_id=answer[0],
        answer_before=answer[1],
        answer_after=answer[2],
    )


def _answer_across_the_kill(before: list[Receipt], after: list[Receipt]) -> tuple[str, str, str]:
    """The request whose text the kill cut most evenly: its id, and the two halves."""
    halves: dict[str, list[str]] = {}
    for part, receipts in enumerate((before, after)):
        for receipt in receipts:
            halves.setdefault(receipt.request_id, ["", ""])[part] += receipt.text
    request_id = max(halves, key=lambda each: min(map(len, halves[each])), default="")
    first, second = halves.get(request_id, ["", ""])
    return request_id, first, second


def draw(summary: Summary, commands: list[tuple[str, str]]) -> None:
    """Show it, so that it is understood in ten seconds."""
    from rich.table import Table
    from rich.text import Text

    console = rich_console(sys.stdout)
    good = "bold green" if summary.is_clean else "bold red"
    console.print()
    console.print(Text(_headline(summary), style=good))
    console.print()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, words in _rows(summary):
        table.add_row(name, Text(words, style=good if name in {"lost", "duplicated", "verified"} else ""))
    console.print(table)
    if summary.answer_before and summary.answer_after:
        console.print()
        answer = Text(f"{safe(summary.answer_request_id)}: ", style="bold")
        answer.append(_flat(summary.answer_before), style="default not bold")
        answer.append(" [killed here] ", style="bold red")
        answer.append(_flat(summary.answer_after), style="default not bold")
        console.print(answer)
    console.print()
    console.print(Text("try next", style="bold"))
    width = max(len(line) for line, _ in commands)
    for line, what in commands:
        console.print(
            Text(f"  {line:<{width}}  ").append(f"# {what}", style="dim"), no_wrap=True, overflow="ignore", crop=False
        )


def _headline(summary: Summary) -> str:
    if summary.is_clean:
        return "The engine was killed half way. Nothing was lost, nothing came twice."
    return "The engine was killed half way, and not every token came exactly once: this is a bug."


def _flat(text: str) -> str:
    return safe_text(text).replace("\n", " ")


def _rows(s: Summary) -> list[tuple[str, str]]:
    rate = f"{s.tokens_per_second:,.0f} tokens/s"
    stale = f"{s.stale_tokens_delivered} delivered, {s.stale_tokens_dropped} dropped"
    wrong = f" ({s.wrong_tokens} came wrong)" if s.wrong_tokens else ""
    return [
        ("requests", f"{s.finished_requests} of {s.requests} finished, with {safe(s.model)}"),
        ("tokens", f"{s.tokens:,} in {count(s.steps, 'step')}, {rate}"),
        ("preemptions", f"{s.preemptions}, in a pool of {count(s.num_blocks, 'block')}"),
        ("stale tokens", f"{stale} (in flight when their request was preempted or ended)"),
        (
            "killed",
            f"SIGKILL after {count(s.tokens_before_kill, 'token')}, with {count(s.steps_in_flight_at_kill, 'step')} in flight",
        ),
        (
            "recovered",
            f"{count(s.recovered_requests, 'unfinished request')}; next token {s.recovery_seconds:.1f} s after the kill",
        ),
        ("lost", f"{s.lost_tokens}{wrong}"),
        ("duplicated", f"{s.duplicated_tokens}"),
        (
            "verified",
            f"hash chain of {count(s.records, 'record')}; {s.laws} laws after each of {count(s.events, 'event')}; {count(s.digests, 'digest')}",
        ),
        ("journal", f"{safe(s.journal)}, {s.journal_bytes / 1024:,.0f} KiB"),
    ]
