SELECT
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
WHERE p.is_live = 1 AND n.outcome IN (1, 2, 3)
