SELECT
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
WHERE p.is_live = 1 AND r.projection_id = p.projection_id
