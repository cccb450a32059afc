SELECT
    p.stream,
    x.minute,
    x.tenant,
    x.num_submitted,
    x.num_finished,
    x.num_scheduled_tokens,
    x.num_output_tokens,
    x.num_preemptions
FROM audit_projections AS p
JOIN audit_tenants AS x ON x.projection_id = p.projection_id
WHERE p.is_live = 1
