-- Written by `python -m refold.migrations write` from the migrations, which are where to change anything.

CREATE TABLE refold_schema (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT refold_schema_pkc PRIMARY KEY (version_num)
);

CREATE TABLE journal_streams (
	stream_id INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	head_position INTEGER NOT NULL, 
	head_hash BLOB NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	CONSTRAINT pk_journal_streams PRIMARY KEY (stream_id), 
	CONSTRAINT uq_journal_streams_name UNIQUE (name)
)
 STRICT

;

CREATE TABLE journal_records (
	stream_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	schema_version INTEGER NOT NULL, 
	time_ns INTEGER NOT NULL, 
	body TEXT NOT NULL, 
	hash BLOB NOT NULL, content TEXT, content_hash BLOB, 
	CONSTRAINT pk_journal_records PRIMARY KEY (stream_id, position), 
	CONSTRAINT fk_journal_records_stream_id FOREIGN KEY(stream_id) REFERENCES journal_streams (stream_id)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE journal_snapshots (
	stream_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	hash BLOB NOT NULL, 
	version TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	body BLOB NOT NULL, 
	checksum BLOB NOT NULL, 
	CONSTRAINT pk_journal_snapshots PRIMARY KEY (stream_id, position), 
	CONSTRAINT fk_journal_snapshots_stream_id FOREIGN KEY(stream_id) REFERENCES journal_streams (stream_id)
)
 STRICT

;

CREATE TABLE journal_archives (
	stream_id INTEGER NOT NULL, 
	start INTEGER NOT NULL, 
	stop INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	hash BLOB NOT NULL, 
	path TEXT NOT NULL, 
	num_bytes INTEGER NOT NULL, 
	checksum BLOB NOT NULL, 
	CONSTRAINT pk_journal_archives PRIMARY KEY (stream_id, start), 
	CONSTRAINT fk_journal_archives_stream_id FOREIGN KEY(stream_id) REFERENCES journal_streams (stream_id)
)
 STRICT

;

CREATE TABLE audit_projections (
	projection_id INTEGER NOT NULL, 
	stream TEXT NOT NULL, 
	version INTEGER NOT NULL, 
	is_live INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	head_hash TEXT NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	time_ns INTEGER NOT NULL, 
	num_events INTEGER NOT NULL, 
	num_request_events INTEGER NOT NULL, 
	journal_head INTEGER NOT NULL, 
	state_position INTEGER NOT NULL, 
	state BLOB, 
	damage TEXT, 
	damage_position INTEGER, 
	CONSTRAINT pk_audit_projections PRIMARY KEY (projection_id)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_requests (
	projection_id INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	request_id TEXT NOT NULL, 
	status TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	submitted_ns INTEGER NOT NULL, 
	arrival_ns INTEGER NOT NULL, 
	priority INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	adapter TEXT NOT NULL, 
	cache_salt TEXT NOT NULL, 
	grammar TEXT NOT NULL, 
	is_session INTEGER NOT NULL, 
	num_media INTEGER NOT NULL, 
	num_prompt_tokens INTEGER NOT NULL, 
	max_tokens INTEGER NOT NULL, 
	first_scheduled_ns INTEGER, 
	first_scheduled_step INTEGER, 
	num_cached_tokens INTEGER NOT NULL, 
	first_token_ns INTEGER, 
	last_token_ns INTEGER, 
	finished_position INTEGER, 
	finished_ns INTEGER, 
	finish_reason TEXT, 
	finish_message TEXT, 
	abort_cause TEXT, 
	num_output_tokens INTEGER NOT NULL, 
	num_finished_output_tokens INTEGER, 
	num_turns INTEGER NOT NULL, 
	num_scheduled_tokens INTEGER NOT NULL, 
	num_recomputed_tokens INTEGER NOT NULL, 
	num_preemptions INTEGER NOT NULL, 
	preempted_ns INTEGER NOT NULL, 
	num_worker_losses INTEGER NOT NULL, 
	num_stale_tokens_delivered INTEGER NOT NULL, 
	num_stale_tokens_dropped INTEGER NOT NULL, 
	num_drafted_tokens INTEGER NOT NULL, 
	num_accepted_tokens INTEGER NOT NULL, 
	max_inter_token_ns INTEGER, 
	num_in_flight_tokens INTEGER NOT NULL, 
	num_aborted_in_flight_tokens INTEGER NOT NULL, 
	is_redacted INTEGER NOT NULL, 
	CONSTRAINT pk_audit_requests PRIMARY KEY (projection_id, handle)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_events (
	projection_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	event_index INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	time_ns INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	step INTEGER, 
	num_tokens INTEGER, 
	detail TEXT NOT NULL, 
	CONSTRAINT pk_audit_events PRIMARY KEY (projection_id, position, event_index, handle)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_steps (
	projection_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	event_index INTEGER NOT NULL, 
	time_ns INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	num_entries INTEGER NOT NULL, 
	num_tokens INTEGER NOT NULL, 
	num_prefill_tokens INTEGER NOT NULL, 
	num_decode_entries INTEGER NOT NULL, 
	num_prefill_entries INTEGER NOT NULL, 
	num_chunk_entries INTEGER NOT NULL, 
	num_admitted INTEGER NOT NULL, 
	num_hit_tokens INTEGER NOT NULL, 
	num_drafts INTEGER NOT NULL, 
	num_new_blocks INTEGER NOT NULL, 
	num_evicted_blocks INTEGER NOT NULL, 
	num_owned_blocks INTEGER NOT NULL, 
	num_blocks INTEGER NOT NULL, 
	num_running INTEGER NOT NULL, 
	num_waiting INTEGER NOT NULL, 
	num_steps_in_flight INTEGER NOT NULL, 
	outcome INTEGER NOT NULL, 
	resolved_position INTEGER, 
	resolved_ns INTEGER, 
	num_output_tokens INTEGER NOT NULL, 
	num_stale_entries INTEGER NOT NULL, 
	CONSTRAINT pk_audit_steps PRIMARY KEY (projection_id, step)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_step_entries (
	projection_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	entry INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	first_position INTEGER NOT NULL, 
	num_tokens INTEGER NOT NULL, 
	num_drafts INTEGER NOT NULL, 
	kind INTEGER NOT NULL, 
	outcome INTEGER NOT NULL, 
	resolved_event INTEGER, 
	num_outputs INTEGER NOT NULL, 
	first_output_index INTEGER, 
	num_accepted INTEGER NOT NULL, 
	CONSTRAINT pk_audit_step_entries PRIMARY KEY (projection_id, step, entry)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_tokens (
	projection_id INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	output_index INTEGER NOT NULL, 
	token_id INTEGER, 
	step INTEGER NOT NULL, 
	entry INTEGER NOT NULL, 
	is_drafted INTEGER NOT NULL, 
	CONSTRAINT pk_audit_tokens PRIMARY KEY (projection_id, handle, output_index)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_preemptions (
	projection_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	event_index INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	time_ns INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	reason TEXT NOT NULL, 
	for_handle INTEGER, 
	needed_blocks INTEGER NOT NULL, 
	free_blocks INTEGER NOT NULL, 
	num_released_blocks INTEGER NOT NULL, 
	num_computed_tokens INTEGER NOT NULL, 
	num_stale_tokens INTEGER NOT NULL, 
	stale_policy TEXT NOT NULL, 
	epoch INTEGER NOT NULL, 
	drained_position INTEGER, 
	drained_ns INTEGER, 
	resumed_position INTEGER, 
	resumed_ns INTEGER, 
	resumed_step INTEGER, 
	num_hit_tokens INTEGER, 
	num_recomputed_tokens INTEGER, 
	CONSTRAINT pk_audit_preemptions PRIMARY KEY (projection_id, position, event_index)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_stale (
	projection_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	entry INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	num_tokens INTEGER NOT NULL, 
	num_placeholders INTEGER NOT NULL, 
	cause TEXT NOT NULL, 
	first_policy TEXT NOT NULL, 
	policy TEXT NOT NULL, 
	stale_position INTEGER NOT NULL, 
	stale_event INTEGER NOT NULL, 
	stale_ns INTEGER NOT NULL, 
	dropped_position INTEGER, 
	dropped_event INTEGER, 
	outcome INTEGER NOT NULL, 
	resolved_position INTEGER, 
	resolved_event INTEGER, 
	resolved_ns INTEGER, 
	num_outputs INTEGER NOT NULL, 
	CONSTRAINT pk_audit_stale PRIMARY KEY (projection_id, step, entry)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_prefix_hits (
	projection_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	entry INTEGER NOT NULL, 
	block_index INTEGER NOT NULL, 
	handle INTEGER NOT NULL, 
	first_position INTEGER NOT NULL, 
	num_tokens INTEGER NOT NULL, 
	num_blocks INTEGER NOT NULL, 
	source_handle INTEGER, 
	source_step INTEGER, 
	CONSTRAINT pk_audit_prefix_hits PRIMARY KEY (projection_id, step, entry, block_index)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_lives (
	projection_id INTEGER NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	opened_position INTEGER NOT NULL, 
	opened_ns INTEGER NOT NULL, 
	refold_version TEXT NOT NULL, 
	model TEXT NOT NULL, 
	policy TEXT NOT NULL, 
	max_num_seqs INTEGER NOT NULL, 
	max_num_batched_tokens INTEGER NOT NULL, 
	max_in_flight_steps INTEGER NOT NULL, 
	num_blocks INTEGER NOT NULL, 
	block_size INTEGER NOT NULL, 
	num_recovered_requests INTEGER NOT NULL, 
	num_steps INTEGER NOT NULL, 
	num_output_tokens INTEGER NOT NULL, 
	closed_position INTEGER, 
	closed_ns INTEGER, 
	close_reason TEXT, 
	last_ns INTEGER NOT NULL, 
	num_lost_steps INTEGER NOT NULL, 
	num_lost_tokens INTEGER NOT NULL, 
	CONSTRAINT pk_audit_lives PRIMARY KEY (projection_id, engine_epoch)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_workers (
	projection_id INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	environment TEXT NOT NULL, 
	engine_epoch INTEGER NOT NULL, 
	started_position INTEGER NOT NULL, 
	started_ns INTEGER NOT NULL, 
	lost_position INTEGER, 
	lost_event INTEGER, 
	lost_ns INTEGER, 
	lost_reason TEXT, 
	num_lost_steps INTEGER NOT NULL, 
	num_lost_tokens INTEGER NOT NULL, 
	num_lost_requests INTEGER NOT NULL, 
	CONSTRAINT pk_audit_workers PRIMARY KEY (projection_id, generation)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_minutes (
	projection_id INTEGER NOT NULL, 
	minute INTEGER NOT NULL, 
	num_submitted INTEGER NOT NULL, 
	num_finished INTEGER NOT NULL, 
	num_aborted INTEGER NOT NULL, 
	num_prompt_tokens INTEGER NOT NULL, 
	num_steps INTEGER NOT NULL, 
	num_scheduled_tokens INTEGER NOT NULL, 
	num_prefill_tokens INTEGER NOT NULL, 
	num_entries INTEGER NOT NULL, 
	num_output_tokens INTEGER NOT NULL, 
	num_stale_tokens_delivered INTEGER NOT NULL, 
	num_stale_tokens_dropped INTEGER NOT NULL, 
	num_preemptions INTEGER NOT NULL, 
	num_recomputed_tokens INTEGER NOT NULL, 
	num_hit_tokens INTEGER NOT NULL, 
	num_drafted_tokens INTEGER NOT NULL, 
	num_accepted_tokens INTEGER NOT NULL, 
	num_worker_losses INTEGER NOT NULL, 
	num_owned_blocks INTEGER NOT NULL, 
	max_owned_blocks INTEGER NOT NULL, 
	max_running INTEGER NOT NULL, 
	max_waiting INTEGER NOT NULL, 
	CONSTRAINT pk_audit_minutes PRIMARY KEY (projection_id, minute)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_tenants (
	projection_id INTEGER NOT NULL, 
	tenant TEXT NOT NULL, 
	minute INTEGER NOT NULL, 
	num_submitted INTEGER NOT NULL, 
	num_finished INTEGER NOT NULL, 
	num_scheduled_tokens INTEGER NOT NULL, 
	num_output_tokens INTEGER NOT NULL, 
	num_preemptions INTEGER NOT NULL, 
	CONSTRAINT pk_audit_tenants PRIMARY KEY (projection_id, tenant, minute)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_speculation (
	projection_id INTEGER NOT NULL, 
	draft_position INTEGER NOT NULL, 
	minute INTEGER NOT NULL, 
	num_drafted INTEGER NOT NULL, 
	num_accepted INTEGER NOT NULL, 
	CONSTRAINT pk_audit_speculation PRIMARY KEY (projection_id, draft_position, minute)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_durations (
	projection_id INTEGER NOT NULL, 
	minute INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	bucket_ns INTEGER NOT NULL, 
	num INTEGER NOT NULL, 
	CONSTRAINT pk_audit_durations PRIMARY KEY (projection_id, minute, kind, bucket_ns)
)
 WITHOUT ROWID,
 STRICT

;

CREATE TABLE audit_violations (
	projection_id INTEGER NOT NULL, 
	position INTEGER NOT NULL, 
	event_index INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	time_ns INTEGER NOT NULL, 
	rule TEXT NOT NULL, 
	handle INTEGER, 
	step INTEGER, 
	message TEXT NOT NULL, 
	CONSTRAINT pk_audit_violations PRIMARY KEY (projection_id, position, event_index, number)
)
 WITHOUT ROWID,
 STRICT

;

CREATE INDEX ix_audit_projections_stream ON audit_projections (stream);

CREATE INDEX ix_audit_requests_request_id ON audit_requests (projection_id, request_id);

CREATE INDEX ix_audit_requests_submitted_ns ON audit_requests (projection_id, submitted_ns);

CREATE INDEX ix_audit_requests_finish_reason ON audit_requests (projection_id, finish_reason);

CREATE INDEX ix_audit_requests_tenant ON audit_requests (projection_id, tenant);

CREATE INDEX ix_audit_events_handle_position ON audit_events (projection_id, handle, position);

CREATE INDEX ix_audit_events_kind_position ON audit_events (projection_id, kind, position);

CREATE INDEX ix_audit_steps_time_ns ON audit_steps (projection_id, time_ns);

CREATE INDEX ix_audit_steps_outcome_step ON audit_steps (projection_id, outcome, step);

CREATE INDEX ix_audit_step_entries_handle_step ON audit_step_entries (projection_id, handle, step);

CREATE INDEX ix_audit_preemptions_handle_position ON audit_preemptions (projection_id, handle, position);

CREATE INDEX ix_audit_preemptions_for_handle ON audit_preemptions (projection_id, for_handle);

CREATE INDEX ix_audit_preemptions_time_ns ON audit_preemptions (projection_id, time_ns);

CREATE INDEX ix_audit_stale_handle_step ON audit_stale (projection_id, handle, step);

CREATE INDEX ix_audit_prefix_hits_handle_step ON audit_prefix_hits (projection_id, handle, step);

CREATE INDEX ix_audit_prefix_hits_source_handle ON audit_prefix_hits (projection_id, source_handle);

CREATE INDEX ix_audit_workers_lost_position ON audit_workers (projection_id, lost_position);

CREATE INDEX ix_audit_tenants_minute ON audit_tenants (projection_id, minute);

CREATE INDEX ix_audit_speculation_minute ON audit_speculation (projection_id, minute);

CREATE VIEW requests AS SELECT
    p.stream,
    r.request_id,
    r.handle,
    r.status,
    r.tenant,
    r.priority,
    r.adapter,
    r.cache_salt,
    r.is_session,
    r.submitted_ns,
    r.finished_ns,
    r.finish_reason,
    r.num_prompt_tokens,
    r.num_cached_tokens,
    r.num_output_tokens,
    r.first_scheduled_ns - r.submitted_ns AS queued_ns,
    r.first_token_ns - r.submitted_ns AS time_to_first_token_ns,
    CASE WHEN r.num_output_tokens > 1 THEN (r.last_token_ns - r.first_token_ns) / (r.num_output_tokens - 1) END
        AS mean_inter_token_ns,
    r.max_inter_token_ns,
    r.finished_ns - r.submitted_ns AS total_ns,
    r.num_preemptions,
    r.preempted_ns,
    r.num_recomputed_tokens,
    r.num_worker_losses,
    r.num_stale_tokens_delivered,
    r.num_stale_tokens_dropped,
    r.num_drafted_tokens,
    r.num_accepted_tokens,
    r.num_scheduled_tokens,
    r.num_in_flight_tokens,
    r.num_turns,
    r.first_scheduled_step,
    r.position AS submitted_position,
    r.finished_position,
    r.is_redacted
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
WHERE p.is_live = 1;

CREATE VIEW request_events AS SELECT
    p.stream,
    r.request_id,
    r.handle,
    e.position,
    e.event_index,
    e.time_ns,
    e.kind,
    e.step,
    e.num_tokens,
    e.detail
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
JOIN audit_events AS e ON e.projection_id = r.projection_id AND e.handle = r.handle
WHERE p.is_live = 1
UNION ALL
SELECT
    p.stream,
    r.request_id,
    r.handle,
    s.position,
    s.event_index,
    s.time_ns,
    'StepScheduled' AS kind,
    n.step,
    n.num_tokens,
    CASE n.kind WHEN 0 THEN 'decode' WHEN 1 THEN 'prefill' ELSE 'chunk of a prefill' END AS detail
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
JOIN audit_step_entries AS n ON n.projection_id = r.projection_id AND n.handle = r.handle
JOIN audit_steps AS s ON s.projection_id = n.projection_id AND s.step = n.step
WHERE p.is_live = 1
UNION ALL
SELECT
    p.stream,
    r.request_id,
    r.handle,
    s.resolved_position AS position,
    n.resolved_event AS event_index,
    s.resolved_ns AS time_ns,
    CASE n.outcome WHEN 1 THEN 'OutputDelivered' ELSE 'StaleOutputConsumed' END AS kind,
    n.step,
    n.num_outputs AS num_tokens,
    CASE n.outcome WHEN 1 THEN '' WHEN 2 THEN 'stale, delivered' ELSE 'stale, dropped' END AS detail
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
JOIN audit_step_entries AS n ON n.projection_id = r.projection_id AND n.handle = r.handle
JOIN audit_steps AS s ON s.projection_id = n.projection_id AND s.step = n.step
WHERE p.is_live = 1 AND n.outcome IN (1, 2, 3);

CREATE VIEW events AS SELECT
    p.stream,
    e.position,
    e.event_index,
    e.time_ns,
    e.engine_epoch,
    e.kind,
    r.request_id,
    e.step,
    e.num_tokens,
    e.detail
FROM audit_projections AS p
JOIN audit_events AS e ON e.projection_id = p.projection_id
LEFT JOIN audit_requests AS r ON r.projection_id = e.projection_id AND r.handle = e.handle
WHERE p.is_live = 1;

CREATE VIEW steps AS SELECT
    p.stream,
    s.step,
    s.time_ns,
    s.resolved_ns - s.time_ns AS duration_ns,
    CASE s.outcome WHEN 0 THEN 'in flight' WHEN 1 THEN 'came back' ELSE 'lost' END AS outcome,
    s.num_entries,
    s.num_tokens,
    s.num_prefill_tokens,
    s.num_tokens - s.num_prefill_tokens AS num_decode_tokens,
    s.num_prefill_entries,
    s.num_chunk_entries,
    s.num_decode_entries,
    s.num_drafts,
    s.num_output_tokens,
    s.num_stale_entries,
    s.num_admitted,
    s.num_hit_tokens,
    s.num_running,
    s.num_waiting,
    s.num_steps_in_flight,
    s.num_new_blocks,
    s.num_evicted_blocks,
    s.num_owned_blocks,
    s.num_blocks,
    s.engine_epoch,
    s.position,
    s.resolved_position
FROM audit_projections AS p
JOIN audit_steps AS s ON s.projection_id = p.projection_id
WHERE p.is_live = 1;

CREATE VIEW step_entries AS SELECT
    p.stream,
    n.step,
    n.entry,
    r.request_id,
    n.epoch,
    CASE n.kind WHEN 0 THEN 'decode' WHEN 1 THEN 'prefill' ELSE 'chunk' END AS kind,
    n.first_position,
    n.num_tokens,
    n.num_drafts,
    n.num_accepted,
    CASE n.outcome
        WHEN 0 THEN 'in flight'
        WHEN 1 THEN 'delivered'
        WHEN 2 THEN 'stale, delivered'
        WHEN 3 THEN 'stale, dropped'
        ELSE 'lost'
    END AS outcome,
    n.num_outputs AS num_output_tokens,
    n.first_output_index
FROM audit_projections AS p
JOIN audit_step_entries AS n ON n.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = n.projection_id AND r.handle = n.handle
WHERE p.is_live = 1;

CREATE VIEW preemptions AS SELECT
    p.stream,
    x.time_ns,
    r.request_id,
    x.reason,
    w.request_id AS for_request_id,
    x.needed_blocks,
    x.free_blocks,
    x.num_released_blocks,
    x.num_computed_tokens,
    x.num_stale_tokens,
    x.stale_policy,
    x.drained_ns - x.time_ns AS drained_after_ns,
    x.resumed_ns - x.time_ns AS delay_ns,
    x.resumed_step,
    x.num_hit_tokens,
    x.num_recomputed_tokens,
    x.epoch AS ended_epoch,
    x.engine_epoch,
    x.position,
    x.event_index,
    x.drained_position,
    x.resumed_position
FROM audit_projections AS p
JOIN audit_preemptions AS x ON x.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = x.projection_id AND r.handle = x.handle
LEFT JOIN audit_requests AS w ON w.projection_id = x.projection_id AND w.handle = x.for_handle
WHERE p.is_live = 1;

CREATE VIEW stale_output AS SELECT
    p.stream,
    r.request_id,
    x.step,
    x.entry,
    x.epoch AS from_epoch,
    x.cause,
    x.policy,
    x.num_tokens,
    CASE x.outcome
        WHEN 0 THEN 'in flight'
        WHEN 2 THEN 'delivered'
        WHEN 3 THEN 'dropped'
        ELSE 'lost'
    END AS outcome,
    x.num_outputs AS num_output_tokens,
    x.stale_ns,
    x.resolved_ns,
    x.stale_position,
    x.resolved_position
FROM audit_projections AS p
JOIN audit_stale AS x ON x.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = x.projection_id AND r.handle = x.handle
WHERE p.is_live = 1;

CREATE VIEW batch_mates AS SELECT
    p.stream,
    r.request_id,
    t.output_index,
    t.step,
    t.entry,
    m.entry AS mate_entry,
    q.request_id AS mate_request_id,
    CASE m.kind WHEN 0 THEN 'decode' WHEN 1 THEN 'prefill' ELSE 'chunk' END AS mate_kind,
    m.num_tokens AS mate_num_tokens
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
JOIN audit_tokens AS t ON t.projection_id = r.projection_id AND t.handle = r.handle
JOIN audit_step_entries AS m ON m.projection_id = t.projection_id AND m.step = t.step AND m.entry <> t.entry
JOIN audit_requests AS q ON q.projection_id = m.projection_id AND q.handle = m.handle
WHERE p.is_live = 1;

CREATE VIEW counters AS WITH changes AS (
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, s.position, s.event_index, n.num_tokens AS in_flight, 0 AS stale,
        0 AS deliverable, CASE n.kind WHEN 2 THEN 0 ELSE 1 + n.num_drafts END AS placeholders, 0 AS outputs
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_step_entries AS n ON n.projection_id = r.projection_id AND n.handle = r.handle
    JOIN audit_steps AS s ON s.projection_id = n.projection_id AND s.step = n.step
    WHERE p.is_live = 1
    UNION ALL
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, s.resolved_position, n.resolved_event, -n.num_tokens,
        CASE WHEN x.step IS NULL THEN 0 ELSE -n.num_tokens END,
        CASE WHEN x.policy = 'deliver' THEN -n.num_tokens ELSE 0 END,
        CASE WHEN x.step IS NULL AND n.kind <> 2 THEN -1 - n.num_drafts ELSE 0 END,
        CASE WHEN n.outcome IN (1, 2) THEN n.num_outputs ELSE 0 END
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_step_entries AS n ON n.projection_id = r.projection_id AND n.handle = r.handle
    JOIN audit_steps AS s ON s.projection_id = n.projection_id AND s.step = n.step
    LEFT JOIN audit_stale AS x ON x.projection_id = n.projection_id AND x.step = n.step AND x.entry = n.entry
    WHERE p.is_live = 1 AND n.resolved_event IS NOT NULL
    UNION ALL
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, x.stale_position, x.stale_event, 0, x.num_tokens,
        CASE x.first_policy WHEN 'deliver' THEN x.num_tokens ELSE 0 END, -x.num_placeholders, 0
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_stale AS x ON x.projection_id = r.projection_id AND x.handle = r.handle
    WHERE p.is_live = 1
    UNION ALL
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, x.dropped_position, x.dropped_event, 0, 0, -x.num_tokens, 0, 0
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_stale AS x ON x.projection_id = r.projection_id AND x.handle = r.handle
    WHERE p.is_live = 1 AND x.dropped_position IS NOT NULL
)
SELECT DISTINCT
    stream,
    request_id,
    handle,
    position,
    event_index,
    CAST(SUM(in_flight) OVER w AS BIGINT) AS num_in_flight_tokens,
    CAST(SUM(stale) OVER w AS BIGINT) AS num_stale_output_tokens,
    CAST(SUM(deliverable) OVER w AS BIGINT) AS num_deliverable_stale_tokens,
    CAST(SUM(placeholders) OVER w AS BIGINT) AS num_output_placeholders,
    CAST(SUM(outputs) OVER w AS BIGINT) AS num_output_tokens
FROM changes
WINDOW w AS (PARTITION BY stream, request_id, handle ORDER BY position, event_index);

CREATE VIEW counters_by_minute AS SELECT
    p.stream,
    m.minute,
    m.minute * 60000000000 AS start_ns,
    m.num_submitted,
    m.num_finished,
    m.num_aborted,
    m.num_prompt_tokens,
    m.num_output_tokens,
    m.num_steps,
    m.num_entries,
    m.num_scheduled_tokens,
    m.num_prefill_tokens,
    m.num_hit_tokens,
    m.num_preemptions,
    m.num_recomputed_tokens,
    m.num_stale_tokens_delivered,
    m.num_stale_tokens_dropped,
    m.num_drafted_tokens,
    m.num_accepted_tokens,
    m.num_worker_losses,
    CASE WHEN m.num_steps > 0 THEN CAST(m.num_owned_blocks AS DOUBLE PRECISION) / m.num_steps END AS mean_owned_blocks,
    m.max_owned_blocks,
    m.max_running,
    m.max_waiting
FROM audit_projections AS p
JOIN audit_minutes AS m ON m.projection_id = p.projection_id
WHERE p.is_live = 1;

CREATE VIEW kv_occupancy AS SELECT
    p.stream,
    s.step,
    s.time_ns,
    s.num_owned_blocks,
    s.num_blocks,
    CASE WHEN s.num_blocks > 0 THEN CAST(s.num_owned_blocks AS DOUBLE PRECISION) / s.num_blocks END AS fraction,
    s.num_new_blocks,
    s.num_evicted_blocks,
    s.num_running,
    s.num_waiting
FROM audit_projections AS p
JOIN audit_steps AS s ON s.projection_id = p.projection_id
WHERE p.is_live = 1;

CREATE VIEW prefix_hits AS SELECT
    p.stream,
    r.request_id,
    h.step,
    s.time_ns,
    h.first_position,
    h.num_tokens,
    h.num_blocks,
    w.request_id AS computed_by_request_id,
    h.source_step AS computed_in_step,
    r.adapter,
    r.cache_salt,
    CASE WHEN w.handle IS NULL THEN NULL WHEN w.adapter = r.adapter AND w.cache_salt = r.cache_salt THEN 1 ELSE 0 END
        AS is_same_identity,
    s.position
FROM audit_projections AS p
JOIN audit_prefix_hits AS h ON h.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = h.projection_id AND r.handle = h.handle
JOIN audit_steps AS s ON s.projection_id = h.projection_id AND s.step = h.step
LEFT JOIN audit_requests AS w ON w.projection_id = h.projection_id AND w.handle = h.source_handle
WHERE p.is_live = 1;

CREATE VIEW speculation AS SELECT
    p.stream,
    x.draft_position,
    CAST(SUM(x.num_drafted) AS BIGINT) AS num_drafted_tokens,
    CAST(SUM(x.num_accepted) AS BIGINT) AS num_accepted_tokens,
    CAST(SUM(x.num_accepted) AS DOUBLE PRECISION) / SUM(x.num_drafted) AS acceptance
FROM audit_projections AS p
JOIN audit_speculation AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1
GROUP BY p.stream, x.draft_position;

CREATE VIEW engine_lives AS SELECT
    p.stream,
    x.engine_epoch,
    x.opened_ns,
    CASE
        WHEN x.closed_position IS NOT NULL THEN 'closed'
        WHEN EXISTS (
            SELECT 1 FROM audit_lives AS y
            WHERE y.projection_id = x.projection_id AND y.engine_epoch > x.engine_epoch
        ) THEN 'crashed'
        ELSE 'open'
    END AS fate,
    COALESCE(x.closed_ns, x.last_ns) - x.opened_ns AS lived_ns,
    x.close_reason,
    x.num_recovered_requests,
    x.num_steps,
    x.num_output_tokens,
    x.num_lost_steps,
    x.num_lost_tokens,
    x.refold_version,
    x.model,
    x.policy,
    x.num_blocks,
    x.block_size,
    x.max_num_seqs,
    x.max_num_batched_tokens,
    x.max_in_flight_steps,
    x.opened_position,
    x.closed_position
FROM audit_projections AS p
JOIN audit_lives AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1;

CREATE VIEW worker_losses AS SELECT
    p.stream,
    x.generation,
    x.lost_ns,
    x.lost_reason AS reason,
    x.lost_ns - x.started_ns AS lived_ns,
    x.num_lost_steps,
    x.num_lost_tokens,
    x.num_lost_requests,
    x.kind,
    x.environment,
    x.engine_epoch,
    x.started_position,
    x.lost_position
FROM audit_projections AS p
JOIN audit_workers AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1 AND x.lost_position IS NOT NULL;

CREATE VIEW aborts AS SELECT
    p.stream,
    r.request_id,
    r.finish_reason,
    r.abort_cause AS cause,
    r.finish_message AS message,
    r.finished_ns,
    r.finished_ns - r.submitted_ns AS after_ns,
    r.num_prompt_tokens,
    r.num_output_tokens AS num_delivered_tokens,
    r.max_tokens,
    r.num_aborted_in_flight_tokens,
    r.tenant,
    r.finished_position AS position
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
WHERE p.is_live = 1 AND r.finish_reason IN ('abort', 'error', 'capacity');

CREATE VIEW durations AS WITH ranked AS (
    SELECT
        p.stream, d.minute, d.kind, d.bucket_ns,
        SUM(d.num) OVER (PARTITION BY p.stream, d.minute, d.kind ORDER BY d.bucket_ns) AS upto,
        SUM(d.num) OVER (PARTITION BY p.stream, d.minute, d.kind) AS total
    FROM audit_projections AS p
    JOIN audit_durations AS d ON d.projection_id = p.projection_id
    WHERE p.is_live = 1
)
SELECT DISTINCT
    stream,
    minute,
    kind,
    CAST(total AS BIGINT) AS num,
    MIN(CASE WHEN upto * 100 >= total * 50 THEN bucket_ns END) OVER w AS p50_ns,
    MIN(CASE WHEN upto * 100 >= total * 95 THEN bucket_ns END) OVER w AS p95_ns,
    MIN(CASE WHEN upto * 100 >= total * 99 THEN bucket_ns END) OVER w AS p99_ns,
    MAX(bucket_ns) OVER w AS max_ns
FROM ranked
WINDOW w AS (PARTITION BY stream, minute, kind);

CREATE VIEW tenants AS SELECT
    p.stream,
    x.tenant,
    CAST(SUM(x.num_submitted) AS BIGINT) AS num_submitted,
    CAST(SUM(x.num_finished) AS BIGINT) AS num_finished,
    CAST(SUM(x.num_scheduled_tokens) AS BIGINT) AS num_scheduled_tokens,
    CAST(SUM(x.num_output_tokens) AS BIGINT) AS num_output_tokens,
    CAST(SUM(x.num_preemptions) AS BIGINT) AS num_preemptions,
    CAST(SUM(x.num_scheduled_tokens) AS DOUBLE PRECISION)
        / NULLIF(SUM(SUM(x.num_scheduled_tokens)) OVER (PARTITION BY p.stream), 0) AS share
FROM audit_projections AS p
JOIN audit_tenants AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1
GROUP BY p.stream, x.tenant;

CREATE VIEW tenants_by_minute AS SELECT
    p.stream,
    x.minute,
    x.tenant,
    x.num_submitted,
    x.num_finished,
    x.num_scheduled_tokens,
    x.num_output_tokens,
    x.num_preemptions
FROM audit_projections AS p
JOIN audit_tenants AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1;

CREATE VIEW integrity AS SELECT
    p.stream,
    CASE WHEN p.damage IS NULL THEN 'whole' ELSE 'damaged' END AS chain,
    p.damage,
    p.damage_position,
    p.position AS num_records,
    p.journal_head - p.position AS num_records_behind,
    p.num_events,
    p.num_request_events,
    p.head_hash,
    p.engine_epoch,
    p.time_ns AS last_record_ns,
    (SELECT COUNT(*) FROM audit_events AS e WHERE e.projection_id = p.projection_id AND e.kind = 'StateDigest')
        AS num_digests,
    (
        SELECT COUNT(*) FROM audit_events AS e
        WHERE e.projection_id = p.projection_id AND e.kind = 'ContentRedacted' AND e.handle > 0
    ) AS num_redacted_requests,
    (SELECT COUNT(*) FROM audit_violations AS v WHERE v.projection_id = p.projection_id) AS num_violations,
    p.version AS projection_version
FROM audit_projections AS p
WHERE p.is_live = 1;

CREATE VIEW tokens AS SELECT
    p.stream,
    r.request_id,
    r.handle,
    t.output_index,
    t.token_id,
    t.step,
    t.entry,
    s.num_entries - 1 AS num_batch_mates,
    CASE t.is_drafted WHEN 1 THEN 'drafted' ELSE 'sampled' END AS origin,
    CASE n.outcome WHEN 2 THEN 1 ELSE 0 END AS is_stale,
    n.epoch,
    s.time_ns AS scheduled_ns,
    s.resolved_ns AS delivered_ns,
    s.resolved_position AS position
FROM audit_projections AS p
CROSS JOIN audit_requests AS r
JOIN audit_tokens AS t ON t.projection_id = r.projection_id AND t.handle = r.handle
JOIN audit_step_entries AS n ON n.projection_id = t.projection_id AND n.step = t.step AND n.entry = t.entry
JOIN audit_steps AS s ON s.projection_id = t.projection_id AND s.step = t.step
WHERE p.is_live = 1 AND r.projection_id = p.projection_id;

CREATE VIEW violations AS SELECT p.stream, v.rule, v.position, r.request_id, v.step, v.message
FROM audit_projections AS p
JOIN audit_violations AS v ON v.projection_id = p.projection_id
LEFT JOIN audit_requests AS r ON r.projection_id = v.projection_id AND r.handle = v.handle
WHERE p.is_live = 1
UNION ALL
SELECT p.stream, 'output order', NULL, r.request_id, NULL, 'output indices have a gap, or one came twice'
FROM audit_projections AS p
CROSS JOIN audit_requests AS r
WHERE p.is_live = 1 AND r.projection_id = p.projection_id
    AND (
        r.num_output_tokens <> (
            SELECT COUNT(*) FROM audit_tokens AS t WHERE t.projection_id = r.projection_id AND t.handle = r.handle
        )
        OR r.num_output_tokens <> 1 + (
            SELECT MAX(t.output_index) FROM audit_tokens AS t
            WHERE t.projection_id = r.projection_id AND t.handle = r.handle
        )
    )
UNION ALL
SELECT p.stream, 'output count', r.finished_position, r.request_id, NULL, 'finished with another number of tokens than went out'
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
WHERE p.is_live = 1 AND r.num_finished_output_tokens <> r.num_output_tokens
UNION ALL
SELECT p.stream, 'accounting', s.position, NULL, s.step, 'a step that came back has entries that did not, or lacks some'
FROM audit_projections AS p
CROSS JOIN audit_steps AS s
WHERE p.is_live = 1 AND s.projection_id = p.projection_id
    AND (s.num_entries, s.num_tokens, 0) <> (
        SELECT
            COUNT(*), COALESCE(SUM(n.num_tokens), 0),
            COALESCE(SUM(CASE WHEN s.outcome <> 0 AND n.outcome = 0 THEN 1 ELSE 0 END), 0)
        FROM audit_step_entries AS n
        WHERE n.projection_id = s.projection_id AND n.step = s.step
    )
UNION ALL
SELECT p.stream, 'step order', s.position, NULL, s.step, 'still in flight, and a later step came back'
FROM audit_projections AS p
JOIN audit_steps AS s ON s.projection_id = p.projection_id AND s.outcome = 0
WHERE p.is_live = 1 AND EXISTS (
    SELECT 1 FROM audit_steps AS l WHERE l.projection_id = s.projection_id AND l.outcome = 1 AND l.step > s.step
)
UNION ALL
SELECT p.stream, 'limits', s.position, NULL, s.step, 'more tokens, requests or blocks than the engine may use'
FROM audit_projections AS p
JOIN audit_steps AS s ON s.projection_id = p.projection_id
JOIN audit_lives AS x ON x.projection_id = s.projection_id AND x.engine_epoch = s.engine_epoch
WHERE p.is_live = 1
    AND (
        s.num_tokens > x.max_num_batched_tokens OR s.num_running > x.max_num_seqs
        OR s.num_owned_blocks > x.num_blocks OR s.num_steps_in_flight > x.max_in_flight_steps
    )
UNION ALL
SELECT p.stream, 'prefix cache', s.position, r.request_id, h.step, 'shares blocks of another adapter or cache salt'
FROM audit_projections AS p
CROSS JOIN audit_prefix_hits AS h
JOIN audit_requests AS r ON r.projection_id = h.projection_id AND r.handle = h.handle
JOIN audit_requests AS w ON w.projection_id = h.projection_id AND w.handle = h.source_handle
JOIN audit_steps AS s ON s.projection_id = h.projection_id AND s.step = h.step
WHERE p.is_live = 1 AND h.projection_id = p.projection_id
    AND (w.adapter <> r.adapter OR w.cache_salt <> r.cache_salt)
UNION ALL
SELECT p.stream, 'stale output', x.resolved_position, r.request_id, x.step, 'delivered, though its policy was to drop it'
FROM audit_projections AS p
JOIN audit_stale AS x ON x.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = x.projection_id AND r.handle = x.handle
WHERE p.is_live = 1 AND x.outcome = 2 AND x.policy <> 'deliver'
UNION ALL
SELECT p.stream, 'damage', p.damage_position, NULL, NULL, p.damage
FROM audit_projections AS p
WHERE p.is_live = 1 AND p.damage IS NOT NULL;

CREATE TABLE audit_views (
	name TEXT NOT NULL, 
	question TEXT NOT NULL, 
	CONSTRAINT pk_audit_views PRIMARY KEY (name)
)
 WITHOUT ROWID,
 STRICT

;

ANALYZE audit_projections;

INSERT INTO refold_schema (version_num) VALUES ('0006');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_durations', 'audit_durations', '400000 400000 200 50 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_events', 'audit_events', '80000 80000 4 2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_events', 'ix_audit_events_handle_position', '80000 80000 4 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_events', 'ix_audit_events_kind_position', '80000 80000 8000 2');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_minutes', 'audit_minutes', '2000 2000 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_preemptions', 'audit_preemptions', '5000 5000 2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_preemptions', 'ix_audit_preemptions_for_handle', '5000 5000 3');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_preemptions', 'ix_audit_preemptions_handle_position', '5000 5000 3 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_preemptions', 'ix_audit_preemptions_time_ns', '5000 5000 2');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_prefix_hits', 'audit_prefix_hits', '20000 20000 10 2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_prefix_hits', 'ix_audit_prefix_hits_handle_step', '20000 20000 2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_prefix_hits', 'ix_audit_prefix_hits_source_handle', '20000 20000 20');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_projections', 'audit_projections', '2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_projections', 'ix_audit_projections_stream', '2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_requests', 'audit_requests', '20000 20000 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_requests', 'ix_audit_requests_finish_reason', '20000 20000 4000');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_requests', 'ix_audit_requests_request_id', '20000 20000 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_requests', 'ix_audit_requests_submitted_ns', '20000 20000 2');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_requests', 'ix_audit_requests_tenant', '20000 20000 2000');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_stale', 'audit_stale', '8000 8000 2 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_stale', 'ix_audit_stale_handle_step', '8000 8000 4 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_step_entries', 'audit_step_entries', '1000000 1000000 50 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_step_entries', 'ix_audit_step_entries_handle_step', '1000000 1000000 50 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_steps', 'audit_steps', '20000 20000 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_steps', 'ix_audit_steps_outcome_step', '20000 20000 7000 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_steps', 'ix_audit_steps_time_ns', '20000 20000 2');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_tenants', 'audit_tenants', '8000 8000 2000 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_tenants', 'ix_audit_tenants_minute', '8000 8000 4');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_tokens', 'audit_tokens', '1000000 1000000 50 1');

INSERT INTO sqlite_stat1 (tbl, idx, stat) VALUES ('audit_violations', 'audit_violations', '2 2 1 1 1');

INSERT INTO audit_views (name, question) VALUES ('aborts', 'Which requests ended before their time, why, and what had their clients got by then?');

INSERT INTO audit_views (name, question) VALUES ('batch_mates', 'With whom did a token share the batch that it was computed in?');

INSERT INTO audit_views (name, question) VALUES ('counters', 'How did the scheduler''s counters of a request move, event by event? (Summed up in SQL, not by the engine''s code.)');

INSERT INTO audit_views (name, question) VALUES ('counters_by_minute', 'How much of everything was there in each minute?');

INSERT INTO audit_views (name, question) VALUES ('durations', 'How long did things take: the middle, the slowest twentieth and the slowest hundredth, minute by minute?');

INSERT INTO audit_views (name, question) VALUES ('engine_lives', 'When did an engine open the journal, how did its life end, and what was lost with it?');

INSERT INTO audit_views (name, question) VALUES ('events', 'Which rare events were there (all but the steps and their outputs), of any request or of the engine?');

INSERT INTO audit_views (name, question) VALUES ('integrity', 'How far does the read model go, is what it was made of whole, and what was checked?');

INSERT INTO audit_views (name, question) VALUES ('kv_occupancy', 'How full was the pool of KV blocks, step by step?');

INSERT INTO audit_views (name, question) VALUES ('preemptions', 'Who was preempted, for whom and why, what did it cost, and how long did it delay the request?');

INSERT INTO audit_views (name, question) VALUES ('prefix_hits', 'Which tokens were not computed again because the prefix cache had them, and whose work was that?');

INSERT INTO audit_views (name, question) VALUES ('request_events', 'What happened to a request, event by event?');

INSERT INTO audit_views (name, question) VALUES ('requests', 'Which requests were there, how long did each wait for what, and how did it end?');

INSERT INTO audit_views (name, question) VALUES ('speculation', 'How many drafts were accepted, by their place in the run of drafts?');

INSERT INTO audit_views (name, question) VALUES ('stale_output', 'Which work in flight turned stale, of which epoch and why, and was it delivered or dropped?');

INSERT INTO audit_views (name, question) VALUES ('step_entries', 'Who was in the batch of a step, with what, and what came of it?');

INSERT INTO audit_views (name, question) VALUES ('steps', 'What did each step do: how many requests and tokens, prefill or decode, how full was the pool, how long did it take?');

INSERT INTO audit_views (name, question) VALUES ('tenants', 'Who got how much of the engine?');

INSERT INTO audit_views (name, question) VALUES ('tenants_by_minute', 'Who got how much of the engine in each minute?');

INSERT INTO audit_views (name, question) VALUES ('tokens', 'Where does each token of an output come from: which step, which place in its batch, drafted or sampled?');

INSERT INTO audit_views (name, question) VALUES ('violations', 'What must not be? This view must be empty.');

INSERT INTO audit_views (name, question) VALUES ('worker_losses', 'When was a worker lost, why, and what went with it?');

