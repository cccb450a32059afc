"""Golden journals: what was written by an earlier schema folds for ever, lawfully, to the state that it had."""

import json
from pathlib import Path

import pytest

from refold.journal.codec import decode
from refold.journal.events import SCHEMA_VERSION
from refold.journal.record import Record
from refold.journal.verify import verified
from refold.scheduler.fold import fold
from refold.scheduler.lawbook import LawBook
from refold.scheduler.state import State, digest

FILES = sorted((Path(__file__).parent.parent / "golden").glob("journal_schema_*.jsonl"))


def records_of(lines):
    for text in lines:
        fields = {"content": "", "content_hash": ""} | json.loads(text)
        texts = {name: fields[name] and fields[name].encode() for name in ("body", "content")}
        texts["content"] = b"" if texts["content"] == "" else texts["content"]
        digests = {name: bytes.fromhex(fields[name]) for name in ("content_hash", "hash")}
        yield Record(**(fields | texts | digests))


def test_every_schema_version_has_its_golden_journal():
    assert [path.stem for path in FILES] == [f"journal_schema_{n}" for n in range(1, SCHEMA_VERSION + 1)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_journal_folds_to_the_state_that_it_had(path):
    *lines, last = path.read_text(encoding="utf-8").splitlines()
    told, state, book, kinds = json.loads(last), State(), LawBook(), set()
    for record in verified(records_of(lines)):
        for event in decode(record):
            fold(state, event)
            book.observe(state, event)
            kinds.add(type(event))
    assert digest(state) == told["digest"]
    assert record.hash.hex() == told["head"]
    assert record.position + 1 == told["records"]
    assert len(kinds) >= 19
