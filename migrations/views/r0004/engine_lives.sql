SELECT
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
WHERE p.is_live = 1
