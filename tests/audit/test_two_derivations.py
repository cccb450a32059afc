"""Two derivations of every counter agree at every event: the engine's fold, and window sums in SQL. On both databases.

They share nothing but the journal: the fold counts as it applies events, SQL sums what the projection wrote about entries.
"""

from collections import defaultdict

import pytest

from refold.projections.audit.catalogue import VIEWS
from refold.projections.audit.project import project as project_record
from refold.projections.audit.rows import Rows
from refold.projections.audit.story import Story
from refold.scheduler.fold import fold
from refold.scheduler.state import State
from tests.kit.audited import asking, contents, path_url, project, sealed, simulated, write

SEEDS = (6, 13, 39, 58)
Counters = tuple[int, int, int, int, int]


def told_by_the_fold(records) -> dict[tuple[int, int], dict[int, Counters]]:
    """(position, event) -> handle -> counters, of every request that the fold still knows after that event."""
    state, told = State(), {}
    for position, events in enumerate(records):
        for index, event in enumerate(events):
            fold(state, event)
            told[position, index] = {
                handle: (
                    r.num_in_flight_tokens,
                    r.num_stale_output_tokens,
                    r.num_deliverable_stale_tokens,
                    r.num_output_placeholders,
                    r.next_output_index,
                )
                for handle, r in state.requests.by_handle.items()
            }
    return told


def told_by_sql(ask) -> dict[tuple[int, int], dict[int, Counters]]:
    """(position, event) -> handle -> counters, where they change."""
    told: defaultdict[tuple[int, int], dict[int, Counters]] = defaultdict(dict)
    for handle, position, index, *counters in ask(
        "SELECT handle, position, event_index, num_in_flight_tokens, num_stale_output_tokens, num_deliverable_stale_tokens, "
        "num_output_placeholders, num_output_tokens FROM counters"
    ):
        told[position, index][handle] = tuple(counters)
    return told


def disagreements(records, ask) -> list[str]:
    """Every event and request where the two say different things."""
    by_fold, by_sql, now, found = told_by_the_fold(records), told_by_sql(ask), {}, []
    assert by_sql.keys() <= by_fold.keys(), "SQL knows of events that aren't there"
    for place, counters in by_fold.items():
        now |= by_sql.get(place, {})
        for handle, expected in counters.items():
            if now.get(handle, (0,) * 5) != expected:
                found.append(f"{place}, handle {handle}: SQL {now.get(handle)}, fold {expected}")
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_sql_and_the_fold_agree_at_every_event(seed, database, tmp_path, postgres_server):
    records = simulated(seed)
    url = path_url(tmp_path) if database == "sqlite" else postgres_server.empty()
    write(url, sealed(records))
    project(url)
    with asking(url) as ask:
        assert disagreements(records, ask) == []
        assert ask("SELECT * FROM violations") == []


def test_a_disagreement_is_found(tmp_path):
    records = simulated(6)
    url = write(path_url(tmp_path), sealed(records))
    project(url)
    import sqlite3

    connection = sqlite3.connect(url)
    connection.execute("UPDATE audit_step_entries SET num_tokens = num_tokens + 1 WHERE step = 7 AND entry = 0")
    connection.commit()
    connection.close()
    with asking(url) as ask:
        assert disagreements(records, ask)
        assert [row[1] for row in ask("SELECT * FROM violations")] == ["accounting"]


@pytest.mark.parametrize("seed", SEEDS)
def test_both_databases_show_the_same_rows(seed, tmp_path, postgres_server):
    records, names = sealed(simulated(seed)), [view.name for view in VIEWS]
    ours, theirs = path_url(tmp_path), postgres_server.empty()
    for url, size in ((ours, 60), (theirs, 35)):
        write(url, records)
        project(url, max_rows=size)
    assert contents(ours, names) == contents(theirs, names)


@pytest.mark.parametrize("seed", range(12))
def test_the_projections_own_account_is_the_folds(seed):
    records = simulated(seed)
    state, story, rows = State(), Story(), Rows(1)
    for record, events in zip(sealed(records), records, strict=True):
        project_record(story, rows, record, events)
        for event in events:
            fold(state, event)
        live = state.requests.by_handle
        assert story.requests.keys() == live.keys()
        for handle, r in live.items():
            ours = story.requests[handle]
            assert (ours.epoch, ours.status, ours.num_known) == (r.epoch, r.status, len(r.tokens))
            assert (ours.num_computed, ours.block_ids) == (r.num_computed_tokens, r.block_ids)
        if state.was_opened:
            assert len(story.owners) == sum(count > 0 for count in state.pool.ref_counts)
        assert (story.num_running, story.num_waiting) == (len(state.queues.running), len(state.queues.waiting))
    assert rows.violations == []
