SELECT
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
WHERE p.is_live = 1
