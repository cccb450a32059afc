SELECT
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
WHERE p.is_live = 1
