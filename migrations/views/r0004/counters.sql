WITH changes AS (
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, s.position, s.event_index, n.num_tokens AS in_flight, 0 AS stale,
        0 AS deliverable, CASE n.kind WHEN 2 THEN 0 ELSE 1 + n.num_drafts END AS placeholders, 0 AS outputs
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_step_entries AS n ON n.projection_id = r.projection_id AND n.handle = r.handle
    JOIN audit_steps AS s ON s.projection_id = n.projection_id AND s.step = n.step
    WHERE p.is_live = 1
    UNION ALL
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, s.resolved_position, n.resolved_event, -n.num_tokens,
        CASE WHEN x.step IS NULL THEN 0 ELSE -n.num_tokens END,
        CASE WHEN x.policy = 'deliver' THEN -n.num_tokens ELSE 0 END,
        CASE WHEN x.step IS NULL AND n.kind <> 2 THEN -1 - n.num_drafts ELSE 0 END,
        CASE WHEN n.outcome IN (1, 2) THEN n.num_outputs ELSE 0 END
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_step_entries AS n ON n.projection_id = r.projection_id AND n.handle = r.handle
    JOIN audit_steps AS s ON s.projection_id = n.projection_id AND s.step = n.step
    LEFT JOIN audit_stale AS x ON x.projection_id = n.projection_id AND x.step = n.step AND x.entry = n.entry
    WHERE p.is_live = 1 AND n.resolved_event IS NOT NULL
    UNION ALL
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, x.stale_position, x.stale_event, 0, x.num_tokens,
        CASE x.first_policy WHEN 'deliver' THEN x.num_tokens ELSE 0 END, -x.num_placeholders, 0
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_stale AS x ON x.projection_id = r.projection_id AND x.handle = r.handle
    WHERE p.is_live = 1
    UNION ALL
    SELECT
        p.projection_id, p.stream, r.request_id, r.handle, x.dropped_position, x.dropped_event, 0, 0, -x.num_tokens, 0, 0
    FROM audit_projections AS p
    JOIN audit_requests AS r ON r.projection_id = p.projection_id
    JOIN audit_stale AS x ON x.projection_id = r.projection_id AND x.handle = r.handle
    WHERE p.is_live = 1 AND x.dropped_position IS NOT NULL
)
SELECT DISTINCT
    stream,
    request_id,
    handle,
    position,
    event_index,
    CAST(SUM(in_flight) OVER w AS BIGINT) AS num_in_flight_tokens,
    CAST(SUM(stale) OVER w AS BIGINT) AS num_stale_output_tokens,
    CAST(SUM(deliverable) OVER w AS BIGINT) AS num_deliverable_stale_tokens,
    CAST(SUM(placeholders) OVER w AS BIGINT) AS num_output_placeholders,
    CAST(SUM(outputs) OVER w AS BIGINT) AS num_output_tokens
FROM changes
WINDOW w AS (PARTITION BY stream, request_id, handle ORDER BY position, event_index)
