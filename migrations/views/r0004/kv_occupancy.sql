SELECT
    p.stream,
    s.step,
    s.time_ns,
    s.num_owned_blocks,
    s.num_blocks,
    CASE WHEN s.num_blocks > 0 THEN CAST(s.num_owned_blocks AS DOUBLE PRECISION) / s.num_blocks END AS fraction,
    s.num_new_blocks,
    s.num_evicted_blocks,
    s.num_running,
    s.num_waiting
FROM audit_projections AS p
JOIN audit_steps AS s ON s.projection_id = p.projection_id
WHERE p.is_live = 1
