"""The audit read model: its tables, and the views that show it.

The description below is this revision's own, as of its day: later ones change it, they don't edit it. The views' text is in
`migrations/views/r0004`; a later revision that changes a view brings its new text in a folder of its own.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from refold.migrations.views import read_view

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
KINDS: dict[str, Any] = {"": BIG, "text": sa.Text(), "blob": sa.LargeBinary()}

# Table -> its key and its columns; `?` may be null.
TABLES = {
    "audit_projections": (
        "projection_id",
        """
        projection_id stream:text version is_live position head_hash:text engine_epoch time_ns num_events
        num_request_events journal_head state_position state:blob? damage:text? damage_position?
        """,
    ),
    "audit_requests": (
        "projection_id handle",
        """
        projection_id handle request_id:text status:text position submitted_ns arrival_ns priority tenant:text
        adapter:text cache_salt:text grammar:text is_session num_media num_prompt_tokens max_tokens
        first_scheduled_ns? first_scheduled_step? num_cached_tokens first_token_ns? last_token_ns?
        finished_position? finished_ns? finish_reason:text? finish_message:text? abort_cause:text?
        num_output_tokens num_finished_output_tokens? num_turns num_scheduled_tokens num_recomputed_tokens
        num_preemptions preempted_ns num_worker_losses num_stale_tokens_delivered num_stale_tokens_dropped
        num_drafted_tokens num_accepted_tokens max_inter_token_ns? num_in_flight_tokens
        num_aborted_in_flight_tokens is_redacted
        """,
    ),
    "audit_events": (
        "projection_id position event_index handle",
        """
        projection_id position event_index handle time_ns engine_epoch kind:text step? num_tokens? detail:text
        """,
    ),
    "audit_steps": (
        "projection_id step",
        """
        projection_id step position event_index time_ns engine_epoch num_entries num_tokens num_prefill_tokens
        num_decode_entries num_prefill_entries num_chunk_entries num_admitted num_hit_tokens num_drafts
        num_new_blocks num_evicted_blocks num_owned_blocks num_blocks num_running num_waiting
        num_steps_in_flight outcome resolved_position? resolved_ns? num_output_tokens num_stale_entries
        """,
    ),
    "audit_step_entries": (
        "projection_id step entry",
        """
        projection_id step entry handle epoch first_position num_tokens num_drafts kind outcome resolved_event?
        num_outputs first_output_index? num_accepted
        """,
    ),
    "audit_tokens": (
        "projection_id handle output_index",
        """
        projection_id handle output_index token_id? step entry is_drafted
        """,
    ),
    "audit_preemptions": (
        "projection_id position event_index",
        """
        projection_id position event_index handle time_ns engine_epoch reason:text for_handle? needed_blocks
        free_blocks num_released_blocks num_computed_tokens num_stale_tokens stale_policy:text epoch
        drained_position? drained_ns? resumed_position? resumed_ns? resumed_step? num_hit_tokens?
        num_recomputed_tokens?
        """,
    ),
    "audit_stale": (
        "projection_id step entry",
        """
        projection_id step entry handle epoch num_tokens num_placeholders cause:text first_policy:text
        policy:text stale_position stale_event stale_ns dropped_position? dropped_event? outcome
        resolved_position? resolved_event? resolved_ns? num_outputs
        """,
    ),
    "audit_prefix_hits": (
        "projection_id step entry block_index",
        """
        projection_id step entry block_index handle first_position num_tokens num_blocks source_handle?
        source_step?
        """,
    ),
    "audit_lives": (
        "projection_id engine_epoch",
        """
        projection_id engine_epoch opened_position opened_ns refold_version:text model:text policy:text
        max_num_seqs max_num_batched_tokens max_in_flight_steps num_blocks block_size num_recovered_requests
        num_steps num_output_tokens closed_position? closed_ns? close_reason:text? last_ns num_lost_steps
        num_lost_tokens
        """,
    ),
    "audit_workers": (
        "projection_id generation",
        """
        projection_id generation kind:text environment:text engine_epoch started_position started_ns
        lost_position? lost_event? lost_ns? lost_reason:text? num_lost_steps num_lost_tokens num_lost_requests
        """,
    ),
    "audit_minutes": (
        "projection_id minute",
        """
        projection_id minute num_submitted num_finished num_aborted num_prompt_tokens num_steps
        num_scheduled_tokens num_prefill_tokens num_entries num_output_tokens num_stale_tokens_delivered
        num_stale_tokens_dropped num_preemptions num_recomputed_tokens num_hit_tokens num_drafted_tokens
        num_accepted_tokens num_worker_losses num_owned_blocks max_owned_blocks max_running max_waiting
        """,
    ),
    "audit_tenants": (
        "projection_id tenant minute",
        """
        projection_id tenant:text minute num_submitted num_finished num_scheduled_tokens num_output_tokens
        num_preemptions
        """,
    ),
    "audit_speculation": (
        "projection_id draft_position minute",
        """
        projection_id draft_position minute num_drafted num_accepted
        """,
    ),
    "audit_durations": (
        "projection_id minute kind bucket_ns",
        """
        projection_id minute kind:text bucket_ns num
        """,
    ),
    "audit_violations": (
        "projection_id position event_index number",
        """
        projection_id position event_index number time_ns rule:text handle? step? message:text
        """,
    ),
}
INDEXES = (
    ("audit_projections", "stream"),
    ("audit_requests", "projection_id request_id"),
    ("audit_requests", "projection_id submitted_ns"),
    ("audit_requests", "projection_id finish_reason"),
    ("audit_requests", "projection_id tenant"),
    ("audit_events", "projection_id handle position"),
    ("audit_events", "projection_id kind position"),
    ("audit_steps", "projection_id time_ns"),
    ("audit_steps", "projection_id outcome step"),
    ("audit_step_entries", "projection_id handle step"),
    ("audit_preemptions", "projection_id handle position"),
    ("audit_preemptions", "projection_id for_handle"),
    ("audit_preemptions", "projection_id time_ns"),
    ("audit_stale", "projection_id handle step"),
    ("audit_prefix_hits", "projection_id handle step"),
    ("audit_prefix_hits", "projection_id source_handle"),
    ("audit_workers", "projection_id lost_position"),
    ("audit_tenants", "projection_id minute"),
    ("audit_speculation", "projection_id minute"),
)

# How selective the indexes are in a journal of some size, for SQLite's planner: without knowing that there are few projections and
# many of everything else, it begins with the wrong table. Rows in all, then rows for each value of 1, 2, ... columns.
STATISTICS = {
    "audit_projections": ("2 1", "2 1"),
    "audit_requests": ("20000 20000 1", "20000 20000 1", "20000 20000 2", "20000 20000 4000", "20000 20000 2000"),
    "audit_events": ("80000 80000 4 2 1", "80000 80000 4 1", "80000 80000 8000 2"),
    "audit_steps": ("20000 20000 1", "20000 20000 2", "20000 20000 7000 1"),
    "audit_step_entries": ("1000000 1000000 50 1", "1000000 1000000 50 1"),
    "audit_tokens": ("1000000 1000000 50 1",),
    "audit_preemptions": ("5000 5000 2 1", "5000 5000 3 1", "5000 5000 3", "5000 5000 2"),
    "audit_stale": ("8000 8000 2 1", "8000 8000 4 1"),
    "audit_prefix_hits": ("20000 20000 10 2 1", "20000 20000 2 1", "20000 20000 20"),
    "audit_minutes": ("2000 2000 1",),
    "audit_tenants": ("8000 8000 2000 1", "8000 8000 4"),
    "audit_durations": ("400000 400000 200 50 1",),
    "audit_violations": ("2 2 1 1 1",),
}

VIEWS = {
    "requests": "Which requests were there, how long did each wait for what, and how did it end?",
    "request_events": "What happened to a request, event by event?",
    "events": "Which rare events were there (all but the steps and their outputs), of any request or of the engine?",
    "steps": "What did each step do: how many requests and tokens, prefill or decode, how full was the pool, how long did it take?",
    "step_entries": "Who was in the batch of a step, with what, and what came of it?",
    "preemptions": "Who was preempted, for whom and why, what did it cost, and how long did it delay the request?",
    "stale_output": "Which work in flight turned stale, of which epoch and why, and was it delivered or dropped?",
    "tokens": "Where does each token of an output come from: which step, which place in its batch, drafted or sampled?",
    "batch_mates": "With whom did a token share the batch that it was computed in?",
    "counters": "How did the scheduler's counters of a request move, event by event? (Summed up in SQL, not by the engine's code.)",
    "counters_by_minute": "How much of everything was there in each minute?",
    "kv_occupancy": "How full was the pool of KV blocks, step by step?",
    "prefix_hits": "Which tokens were not computed again because the prefix cache had them, and whose work was that?",
    "speculation": "How many drafts were accepted, by their place in the run of drafts?",
    "engine_lives": "When did an engine open the journal, how did its life end, and what was lost with it?",
    "worker_losses": "When was a worker lost, why, and what went with it?",
    "aborts": "Which requests ended before their time, why, and what had their clients got by then?",
    "durations": "How long did things take: the middle, the slowest twentieth and the slowest hundredth, minute by minute?",
    "tenants": "Who got how much of the engine?",
    "tenants_by_minute": "Who got how much of the engine in each minute?",
    "integrity": "How far does the read model go, is what it was made of whole, and what was checked?",
    "violations": "What must not be? This view must be empty.",
}


def upgrade() -> None:
    for table, (key, columns) in TABLES.items():
        op.create_table(
            table,
            *map(_column, columns.split()),
            sa.PrimaryKeyConstraint(*key.split(), name=op.f(f"pk_{table}")),
            sqlite_strict=True,
            sqlite_with_rowid=False,
        )
    for table, columns in INDEXES:
        op.create_index(op.f(_index_name(table, columns)), table, columns.split())
    if op.get_context().dialect.name == "sqlite":
        _tell_planner()
    for view in VIEWS:
        op.execute(f"CREATE VIEW {view} AS {read_view('r0004', view)}")
    _list_views()


def _list_views() -> None:
    """A table that says what the views are for. It's made last, on purpose.

    SQLite (3.40 at least) takes `integrity_check` for one of a single table, and doesn't look at the free pages, if what it finds first
    in its own list of tables is a view. What it finds first has to do with what was made last; a test sees to it that it's this.
    """
    listed = op.create_table(
        "audit_views",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("question", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_audit_views")),
        sqlite_strict=True,
        sqlite_with_rowid=False,
    )
    assert listed is not None
    op.bulk_insert(listed, [{"name": name, "question": question} for name, question in VIEWS.items()])


def _tell_planner() -> None:
    op.execute("ANALYZE audit_projections")  # an empty table: it makes sqlite_stat1, and nothing else
    put = sa.text("INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES (:tbl, :idx, :stat)")
    for table, stats in STATISTICS.items():
        indexes = [table, *(_index_name(table, columns) for name, columns in INDEXES if name == table)]
        for index, stat in zip(indexes, stats, strict=True):
            op.execute(put.bindparams(tbl=table, idx=index, stat=stat))


def _index_name(table: str, columns: str) -> str:
    named = "_".join(column for column in columns.split() if column != "projection_id")
    return f"ix_{table}_{named}"


def _column(word: str) -> sa.Column[object]:
    name, _, kind = word.rstrip("?").partition(":")
    return sa.Column(name, KINDS[kind], nullable=word.endswith("?"), autoincrement=False)


def downgrade() -> None:
    raise NotImplementedError("a journal is never taken back to older tables: restore a backup")
