SELECT
    p.stream,
    x.tenant,
    CAST(SUM(x.num_submitted) AS BIGINT) AS num_submitted,
    CAST(SUM(x.num_finished) AS BIGINT) AS num_finished,
    CAST(SUM(x.num_scheduled_tokens) AS BIGINT) AS num_scheduled_tokens,
    CAST(SUM(x.num_output_tokens) AS BIGINT) AS num_output_tokens,
    CAST(SUM(x.num_preemptions) AS BIGINT) AS num_preemptions,
    CAST(SUM(x.num_scheduled_tokens) AS DOUBLE PRECISION)
        / NULLIF(SUM(SUM(x.num_scheduled_tokens)) OVER (PARTITION BY p.stream), 0) AS share
FROM audit_projections AS p
JOIN audit_tenants AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1
GROUP BY p.stream, x.tenant
