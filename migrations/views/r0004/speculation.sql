SELECT
    p.stream,
    x.draft_position,
    CAST(SUM(x.num_drafted) AS BIGINT) AS num_drafted_tokens,
    CAST(SUM(x.num_accepted) AS BIGINT) AS num_accepted_tokens,
    CAST(SUM(x.num_accepted) AS DOUBLE PRECISION) / SUM(x.num_drafted) AS acceptance
FROM audit_projections AS p
JOIN audit_speculation AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1
GROUP BY p.stream, x.draft_position
