"""The tables of the read model, as data: one description for the rows that are made, the SQL that writes them and the migrations.

Every table's key begins with `projection_id`. A projection is one rendering of one stream; the views show the one that is live.
So a read model is rebuilt beside the old one, and shown by changing one row.

How a row gets in (`mode`):
    insert    new, and never changed
    replace   the whole row as it is now, under its key
    add       counts to add to those that are there; a column whose name begins with `max_` keeps the larger value
"""

from typing import Literal, NamedTuple

Mode = Literal["insert", "replace", "add"]
Kind = Literal["int", "text", "blob"]

PROJECTION_VERSION = 1
"""Raised when the same events make other rows: read models of older versions are then built again."""

IN_FLIGHT, DELIVERED, STALE_DELIVERED, STALE_DROPPED, LOST = range(5)
"""What became of an entry of a step; for a step: in flight, came back (as `DELIVERED`), lost."""

DECODE, PREFILL, CHUNK = range(3)
"""What an entry computes: tokens sampled before, a prompt to its end, or a part of one that samples nothing."""


class Column(NamedTuple):
    """One column; of 64-bit integers, text or bytes."""

    name: str
    kind: Kind
    nullable: bool


class Table(NamedTuple):
    """One table; `key` and `indexes` are columns in order."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    indexes: tuple[tuple[str, ...], ...]
    mode: Mode

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names."""
        return tuple(column.name for column in self.columns)


def _table(name: str, mode: Mode, key: str, columns: str, *indexes: str) -> Table:
    """Columns are `name`, `name:text` or `name:blob`, with a `?` if they may be null."""
    parsed = []
    for word in f"{key} {columns}".split():
        column, _, kind = word.rstrip("?").partition(":")
        parsed.append(Column(column, kind or "int", word.endswith("?")))  # type: ignore[arg-type]
    keys = tuple(word.partition(":")[0] for word in key.split())
    return Table(name, tuple(parsed), keys, tuple(tuple(index.split()) for index in indexes), mode)


PROJECTIONS = _table(
    "audit_projections",
    "replace",
    "projection_id",
    """stream:text version is_live position head_hash:text engine_epoch time_ns num_events num_request_events journal_head
    state_position state:blob? damage:text? damage_position?""",
    "stream",
)
REQUESTS = _table(
    "audit_requests",
    "replace",
    "projection_id handle",
    """request_id:text status:text position submitted_ns arrival_ns priority tenant:text adapter:text cache_salt:text
    grammar:text is_session num_media num_prompt_tokens max_tokens first_scheduled_ns? first_scheduled_step? num_cached_tokens
    first_token_ns? last_token_ns? finished_position? finished_ns? finish_reason:text? finish_message:text?
    abort_cause:text? num_output_tokens num_finished_output_tokens? num_turns num_scheduled_tokens num_recomputed_tokens
    num_preemptions preempted_ns num_worker_losses num_stale_tokens_delivered num_stale_tokens_dropped num_drafted_tokens
    num_accepted_tokens max_inter_token_ns? num_in_flight_tokens num_aborted_in_flight_tokens is_redacted""",
    "projection_id request_id",
    "projection_id submitted_ns",
    "projection_id finish_reason",
    "projection_id tenant",
)
EVENTS = _table(
    "audit_events",
    "insert",
    "projection_id position event_index handle",
    "time_ns engine_epoch kind:text step? num_tokens? detail:text",
    "projection_id handle position",
    "projection_id kind position",
)
STEPS = _table(
    "audit_steps",
    "replace",
    "projection_id step",
    """position event_index time_ns engine_epoch num_entries num_tokens num_prefill_tokens num_decode_entries
    num_prefill_entries num_chunk_entries num_admitted num_hit_tokens num_drafts num_new_blocks num_evicted_blocks
    num_owned_blocks num_blocks num_running num_waiting num_steps_in_flight outcome resolved_position? resolved_ns?
    num_output_tokens num_stale_entries""",
    "projection_id time_ns",
    "projection_id outcome step",
)
ENTRIES = _table(
    "audit_step_entries",
    "replace",
    "projection_id step entry",
    """handle epoch first_position num_tokens num_drafts kind outcome resolved_event? num_outputs first_output_index?
    num_accepted""",
    "projection_id handle step",
)
TOKENS = _table(
    "audit_tokens",
    "insert",
    "projection_id handle output_index",
    "token_id? step entry is_drafted",
)
PREEMPTIONS = _table(
    "audit_preemptions",
    "replace",
    "projection_id position event_index",
    """handle time_ns engine_epoch reason:text for_handle? needed_blocks free_blocks num_released_blocks num_computed_tokens
    num_stale_tokens stale_policy:text epoch drained_position? drained_ns? resumed_position? resumed_ns? resumed_step?
    num_hit_tokens? num_recomputed_tokens?""",
    "projection_id handle position",
    "projection_id for_handle",
    "projection_id time_ns",
)
STALE = _table(
    "audit_stale",
    "replace",
    "projection_id step entry",
    """handle epoch num_tokens num_placeholders cause:text first_policy:text policy:text stale_position stale_event stale_ns
    dropped_position? dropped_event? outcome resolved_position? resolved_event? resolved_ns? num_outputs""",
    "projection_id handle step",
)
HITS = _table(
    "audit_prefix_hits",
    "insert",
    "projection_id step entry block_index",
    "handle first_position num_tokens num_blocks source_handle? source_step?",
    "projection_id handle step",
    "projection_id source_handle",
)
LIVES = _table(
    "audit_lives",
    "replace",
    "projection_id engine_epoch",
    """opened_position opened_ns refold_version:text model:text policy:text max_num_seqs max_num_batched_tokens
    max_in_flight_steps num_blocks block_size num_recovered_requests num_steps num_output_tokens closed_position? closed_ns?
    close_reason:text? last_ns num_lost_steps num_lost_tokens""",
)
WORKERS = _table(
    "audit_workers",
    "replace",
    "projection_id generation",
    """kind:text environment:text engine_epoch started_position started_ns lost_position? lost_event? lost_ns?
    lost_reason:text? num_lost_steps num_lost_tokens num_lost_requests""",
    "projection_id lost_position",
)
MINUTES = _table(
    "audit_minutes",
    "add",
    "projection_id minute",
    """num_submitted num_finished num_aborted num_prompt_tokens num_steps num_scheduled_tokens num_prefill_tokens
    num_entries num_output_tokens num_stale_tokens_delivered num_stale_tokens_dropped num_preemptions num_recomputed_tokens
    num_hit_tokens num_drafted_tokens num_accepted_tokens num_worker_losses num_owned_blocks max_owned_blocks max_running
    max_waiting""",
)
TENANTS = _table(
    "audit_tenants",
    "add",
    "projection_id tenant:text minute",
    "num_submitted num_finished num_scheduled_tokens num_output_tokens num_preemptions",
    "projection_id minute",
)
SPECULATION = _table(
    "audit_speculation",
    "add",
    "projection_id draft_position minute",
    "num_drafted num_accepted",
    "projection_id minute",
)
DURATIONS = _table("audit_durations", "add", "projection_id minute kind:text bucket_ns", "num")
VIOLATIONS = _table(
    "audit_violations",
    "insert",
    "projection_id position event_index number",
    "time_ns rule:text handle? step? message:text",
)

FACTS = (
    REQUESTS,
    EVENTS,
    STEPS,
    ENTRIES,
    TOKENS,
    PREEMPTIONS,
    STALE,
    HITS,
    LIVES,
    WORKERS,
    MINUTES,
    TENANTS,
    SPECULATION,
    DURATIONS,
    VIOLATIONS,
)
VIEW_LIST = _table("audit_views", "insert", "name:text", "question:text")
"""What the views answer, for whoever opens the database with another program."""

TABLES = (PROJECTIONS, *FACTS, VIEW_LIST)

_KEPT_BITS = 8


def bucket_of(duration_ns: int) -> int:
    """The lower bound of the bucket that a duration falls in: its first 8 binary digits, so at most 0.8 % less than it is."""
    spare = duration_ns.bit_length() - _KEPT_BITS
    return duration_ns if spare <= 0 else duration_ns >> spare << spare
