SELECT
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
WHERE p.is_live = 1
