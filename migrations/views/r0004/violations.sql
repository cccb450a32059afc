SELECT p.stream, v.rule, v.position, r.request_id, v.step, v.message
FROM audit_projections AS p
JOIN audit_violations AS v ON v.projection_id = p.projection_id
LEFT JOIN audit_requests AS r ON r.projection_id = v.projection_id AND r.handle = v.handle
WHERE p.is_live = 1
UNION ALL
SELECT p.stream, 'output order', NULL, r.request_id, NULL, 'output indices have a gap, or one came twice'
FROM audit_projections AS p
JOIN (
    SELECT projection_id, handle, COUNT(*) AS num, MAX(output_index) AS last FROM audit_tokens
    GROUP BY projection_id, handle
) AS t ON t.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = t.projection_id AND r.handle = t.handle
WHERE p.is_live = 1 AND (t.num <> t.last + 1 OR t.num <> r.num_output_tokens)
UNION ALL
SELECT p.stream, 'output count', r.finished_position, r.request_id, NULL, 'finished with another number of tokens than went out'
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
WHERE p.is_live = 1 AND r.num_finished_output_tokens <> r.num_output_tokens
UNION ALL
SELECT p.stream, 'accounting', s.position, NULL, s.step, 'a step that came back has entries that did not, or lacks some'
FROM audit_projections AS p
JOIN (
    SELECT
        projection_id, step, COUNT(*) AS num, SUM(num_tokens) AS tokens,
        SUM(CASE WHEN outcome = 0 THEN 1 ELSE 0 END) AS waiting
    FROM audit_step_entries
    GROUP BY projection_id, step
) AS t ON t.projection_id = p.projection_id
JOIN audit_steps AS s ON s.projection_id = t.projection_id AND s.step = t.step
WHERE p.is_live = 1
    AND (t.num <> s.num_entries OR t.tokens <> s.num_tokens OR (s.outcome <> 0 AND t.waiting > 0))
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
JOIN audit_prefix_hits AS h ON h.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = h.projection_id AND r.handle = h.handle
JOIN audit_requests AS w ON w.projection_id = h.projection_id AND w.handle = h.source_handle
JOIN audit_steps AS s ON s.projection_id = h.projection_id AND s.step = h.step
WHERE p.is_live = 1 AND (w.adapter <> r.adapter OR w.cache_salt <> r.cache_salt)
UNION ALL
SELECT p.stream, 'stale output', x.resolved_position, r.request_id, x.step, 'delivered, though its policy was to drop it'
FROM audit_projections AS p
JOIN audit_stale AS x ON x.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = x.projection_id AND r.handle = x.handle
WHERE p.is_live = 1 AND x.outcome = 2 AND x.policy <> 'deliver'
UNION ALL
SELECT p.stream, 'damage', p.damage_position, NULL, NULL, p.damage
FROM audit_projections AS p
WHERE p.is_live = 1 AND p.damage IS NOT NULL
