SELECT
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
WHERE p.is_live = 1
