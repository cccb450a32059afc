"""Write the golden journal of the current schema version: `python -m tests.golden.make_golden_journal`.

One file per schema version, made once and never again: `journal_schema_N.jsonl`, a record per line, with every kind of event
in it, and one request redacted. Later versions of refold must fold it to the digest in its last line, for ever. Refuses to
overwrite.
"""

import json
import sys
from pathlib import Path

from refold.engine.history.redaction import RedactionPlan
from refold.journal.codec import decode, encode
from refold.journal.events import (
    EVENT_TYPES,
    SCHEMA_VERSION,
    EngineClosed,
    EngineOpened,
    Event,
    RequestSubmitted,
    WorkerLost,
)
from refold.journal.record import EMPTY_HEAD, Head, Record, head_after, seal
from refold.journal.stores.memory import MemoryJournal, MemoryStore
from refold.scheduler.commands import CloseEngine, RecordDigest
from refold.scheduler.decide import decide
from refold.scheduler.fold import fold_all
from refold.scheduler.state import digest
from tests.kit.asking import AskingSimulation

FOLDER = Path(__file__).parent


def line(record: Record) -> str:
    """A record as one line of JSON; body and content stay readable."""
    content = None if record.content is None else record.content.decode()
    texts = {"body": record.body.decode(), "content": content}
    digests = {"content_hash": record.content_hash.hex(), "hash": record.hash.hex()}
    return json.dumps(record._asdict() | texts | digests, ensure_ascii=False)


def richest_life(seeds: range) -> tuple[list[list[Event]], str]:
    """The life that shows most kinds of events, and the digest that it ends with."""
    best: tuple[int, list[list[Event]], str] = (0, [], "")
    for seed in seeds:
        simulation = AskingSimulation(seed)
        simulation.play()
        drive = simulation.drive
        drive.do(RecordDigest())
        drive.do(CloseEngine(reason="end of the golden journal"))
        kinds = {type(event) for events in drive.records for event in events}
        if len(kinds) > best[0]:
            best = (len(kinds), drive.records, digest(drive.state))
    missing = [kind.__name__ for kind in EVENT_TYPES if kind not in {type(e) for r in best[1] for e in r}]
    sys.stderr.write(f"{best[0]} of {len(EVENT_TYPES)} kinds of events; missing {missing}\n")
    return best[1], best[2]


def redact_one(store: MemoryStore, final_digest: str) -> tuple[Head, str]:
    """Redact the request that said most, at rest; returns the head and the digest of the state after it."""
    plans = []
    for request_id in {e.request_id for r in store.read() for e in decode(r) if isinstance(e, RequestSubmitted)}:
        plans.append(RedactionPlan(request_id))
        plans[-1].follow(store.read())
    plan = max(plans, key=lambda plan: (len(plan.contents), plan.request_id))
    assert digest(plan.state) == final_digest
    events = decide(plan.state, plan.command("the golden journal has one of everything"))
    head = store.open_stream()
    store.erase_content("main", [seal(head, 1_800_000_000_000_000_000, *encode(events))], plan.contents)
    fold_all(plan.state, events)
    return store.head(), digest(plan.state)


def main() -> None:
    path = FOLDER / f"journal_schema_{SCHEMA_VERSION}.jsonl"
    if path.exists():
        sys.exit(f"{path} exists: a golden journal is made once; a new schema version gets a file of its own")
    records, final_digest = richest_life(range(400))
    assert isinstance(records[-1][-1], EngineClosed)
    head, journal = EMPTY_HEAD, MemoryJournal()
    stored = journal.records["main"] = []
    for position, events in enumerate(records):
        if isinstance(events[0], EngineOpened) or (isinstance(events[0], WorkerLost) and "restart" in events[0].reason):
            opened = next(e for later in records[position:] for e in later if isinstance(e, EngineOpened))
            head = head._replace(engine_epoch=opened.engine_epoch)
        record = seal(head, 1_700_000_000_000_000_000 + position, *encode(events, salt=f"{position:016}"))
        stored.append(record)
        head = journal.heads["main"] = head_after(record)
    head, digest_now = redact_one(MemoryStore(journal), final_digest)
    lines = [*map(line, stored), json.dumps({"digest": digest_now, "head": head.hash.hex(), "records": len(stored)})]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
