SELECT p.stream, v.rule, v.position, r.request_id, v.step, v.message
FROM audit_projections AS p
JOIN audit_violations AS v ON v.projection_id = p.projection_id
LEFT JOIN audit_requests AS r ON r.projection_id = v.projection_id AND r.handle = v.handle
WHERE p.is_live = 1
UNION ALL
SELECT p.stream, 'output order', NULL, r.request_id, NULL, 'output indices have a gap, or one came twice'
FROM audit_projections AS p
CROSS JOIN audit_requests AS r
WHERE p.is_live = 1 AND r.projection_id = p.projection_id
    AND (
        r.num_output_tokens <> (
            SELECT COUNT(*) FROM audit_tokens AS t WHERE t.projection_id = r.projection_id AND t.handle = r.handle
        )
        OR r.num_output_tokens <> 1 + (
            SELECT MAX(t.output_index) FROM audit_tokens AS t
            WHERE t.projection_id = r.projection_id AND t.handle = r.handle
        )
    )
UNION ALL
SELECT p.stream, 'output count', r.finished_position, r.request_id, NULL, 'finished with another number of tokens than went out'
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
WHERE p.is_live = 1 AND r.num_finished_output_tokens <> r.num_output_tokens
UNION ALL
SELECT p.stream, 'accounting', s.position, NULL, s.step, 'a step that came back has entries that did not, or lacks some'
FROM audit_projections AS p
CROSS JOIN audit_steps AS s
WHERE p.is_live = 1 AND s.projection_id = p.projection_id
    AND (s.num_entries, s.num_tokens, 0) <> (
        SELECT
            COUNT(*), COALESCE(SUM(n.num_tokens), 0),
            COALESCE(SUM(CASE WHEN s.outcome <> 0 AND n.outcome = 0 THEN 1 ELSE 0 END), 0)
        FROM audit_step_entries AS n
        WHERE n.projection_id = s.projection_id AND n.step = s.step
    )
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
CROSS JOIN audit_prefix_hits AS h
JOIN audit_requests AS r ON r.projection_id = h.projection_id AND r.handle = h.handle
JOIN audit_requests AS w ON w.projection_id = h.projection_id AND w.handle = h.source_handle
JOIN audit_steps AS s ON s.projection_id = h.projection_id AND s.step = h.step
WHERE p.is_live = 1 AND h.projection_id = p.projection_id
    AND (w.adapter <> r.adapter OR w.cache_salt <> r.cache_salt)
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
