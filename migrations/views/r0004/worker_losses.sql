SELECT
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
WHERE p.is_live = 1 AND x.lost_position IS NOT NULL
