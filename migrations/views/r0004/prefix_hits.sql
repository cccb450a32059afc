SELECT
    p.stream,
    r.request_id,
    h.step,
    s.time_ns,
    h.first_position,
    h.num_tokens,
    h.num_blocks,
    w.request_id AS computed_by_request_id,
    h.source_step AS computed_in_step,
    r.adapter,
    r.cache_salt,
    CASE WHEN w.handle IS NULL THEN NULL WHEN w.adapter = r.adapter AND w.cache_salt = r.cache_salt THEN 1 ELSE 0 END
        AS is_same_identity,
    s.position
FROM audit_projections AS p
JOIN audit_prefix_hits AS h ON h.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = h.projection_id AND r.handle = h.handle
JOIN audit_steps AS s ON s.projection_id = h.projection_id AND s.step = h.step
LEFT JOIN audit_requests AS w ON w.projection_id = h.projection_id AND w.handle = h.source_handle
WHERE p.is_live = 1
