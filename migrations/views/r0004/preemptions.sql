SELECT
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
WHERE p.is_live = 1
