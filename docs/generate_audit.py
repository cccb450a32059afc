"""Writes docs/reference/audit.md from the catalogue of views: `python docs/generate_audit.py`."""

import importlib
import sqlite3
import sys
import tempfile
from pathlib import Path

from refold import migrations
from refold.engine.audit.export import type_of
from refold.projections.audit.catalogue import VIEWS, View, meaning

PAGE = Path(__file__).parent / "reference" / "audit.md"
TYPES = {"int64": "integer", "float64": "real", "string": "text"}

HEAD = """<!-- Written by docs/generate_audit.py from projections/audit/catalogue.py: edit those. -->

# SQL audit

Every journal can be asked in SQL. An *audit read model*, tables of requests, steps, entries, tokens and whatever else there is to
ask for, is projected from the events; views show it. They have the same names, columns and rows on SQLite (3.40 or newer) and
PostgreSQL.

**The views are the contract.** Within a major version columns are only added, and keep their meaning. The tables `audit_*` behind them
are not: they may change with any version.

## Where it is, and how it is kept

| journal | read model |
|---|---|
| SQLite | in the same file |
| PostgreSQL | in the same database (and schema) |
| segments | in a SQLite file beside the folder: `NAME.audit.db` |
| one that you can't write | in a temporary file, for as long as you ask |
| a SQLite file that has lost its end | in a temporary file as well |

- `refold sql` and `refold audit NAME` project what was appended since the last time, then ask. `--as-is` asks what is there.
- `refold audit follow` projects what a running engine writes, as it writes it.
- `Engine(..., audit=True)`, or `refold run --audit`, does the same inside the engine, at low priority.
- Of a damaged journal the read model ends before the damage, and is kept: each question looks whether the damage is still there. A SQLite file that
  has lost its end is not written to, as that would fold its damaged WAL into it, which a restorer may need; and nothing of what was said is left
  elsewhere, where a redaction would miss it. So each question projects such a journal anew: to ask more than a few, ask a copy, which
  `refold copy --accept-end` makes.
- `refold audit rebuild` builds it anew beside the old one, and then shows it; who asks meanwhile sees the old one.

Each batch of rows and the checkpoint that says how far it goes are one transaction. So it may be killed at any instant, and two may do
it at once: nothing is in twice, and nothing is missing. What a [redaction](../how-to.md) erases from a journal is gone from its read
model as well, in the same transaction (of segments: right after it).

The journal is the evidence; the read model is what was derived from it. The hash chain doesn't cover these tables, and a record is not
read again once it is projected: whoever can write the file can change an answer, and damage to a record from before isn't seen by `refold sql`.
`refold audit integrity` reads every record that isn't archived again, and checks the chain, before it calls a journal whole (with `--as-is` it
doesn't, and says so). `refold verify` judges the journal, and `refold audit rebuild` derives the tables anew from it.

To the projection, an event that contradicts those before it is a row of `violations`, and it goes on. A record that isn't what was
written ends it: the views then tell of what comes before, and `integrity` says where and why.

Times are record times in nanoseconds since 1970 UTC; names that end in `_ns` without saying when are durations. Any other program
can open the file or database: `datasette run.db`, `psql`, `duckdb`. Where a program counts the rows of what it shows, as Datasette does within
a second, narrow `counters`, `batch_mates` and `request_events` of a long journal to a request first: `/run/counters?request_id=req-1`. The examples below ask this journal, which is written once (its ids are taken then):

```python
from refold import Engine, SamplingParams

with Engine("simulated?vocab=50", "run.db", num_blocks=18, block_size=4, max_num_seqs=6, speculation="ngram") as engine:
    greeting = [1, 2, 3, 4, 5, 6, 7, 8]
    params = [SamplingParams(max_tokens=16 + i, seed=i, ignore_eos=True) for i in range(8)]
    engine.run([[*greeting, 9 + i] for i in range(8)], params, request_ids=[f"req-{i}" for i in range(8)])
```

```console
$ refold audit list
$ refold audit requests run.db
$ refold audit tokens run.db --request req-1 -n 3
$ refold sql run.db "SELECT reason, COUNT(*) AS num FROM preemptions GROUP BY reason" --json
$ refold audit violations run.db
```

A statement that writes is refused:

<!-- exit status: 2 -->
```console
$ refold sql run.db "DELETE FROM journal_records"
```

To other tools: `refold audit export` writes the views as Parquet files (`refold[analytics]`). `batch_mates`, every batch times
itself, is left out unless `--view` names it: DuckDB joins `step_entries` with itself in less time than it takes to write that down.

```console
$ refold audit export lake run.db
$ python -c 'import pyarrow.parquet as p; print(p.read_table("lake/requests.parquet").num_rows)'
```

"""


def page() -> str:
    """The whole page."""
    columns = _columns()
    listed = "\n".join(f"- [{view.name}](#{view.name}): {view.question}" for view in VIEWS)
    return f"{HEAD}## The views\n\n{listed}\n\n" + "\n".join(_section(view, columns[view.name]) for view in VIEWS)


def _columns() -> dict[str, list[str]]:
    """The columns that the migrations give each view."""
    listed = importlib.import_module("refold.migrations.versions.0004_audit").VIEWS
    assert set(listed) == {view.name for view in VIEWS}, set(listed) ^ {view.name for view in VIEWS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "empty.db")
        migrations.ensure(str(path))
        connection = sqlite3.connect(path)
        found = {
            view.name: [column[0] for column in connection.execute(f"SELECT * FROM {view.name}").description]  # noqa: S608
            for view in VIEWS
        }
        connection.close()
    return found


def _section(view: View, columns: list[str]) -> str:
    rows = "\n".join(f"| `{name}` | {TYPES[type_of(name)]} | {meaning(view.name, name)} |" for name in columns)
    example = f'```console\n$ refold sql run.db "{view.example}"\n```'
    return f"### {view.name}\n\n{view.question}\n\n{example}\n\n| column | type | meaning |\n|---|---|---|\n{rows}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
