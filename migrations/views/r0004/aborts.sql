SELECT
    p.stream,
    r.request_id,
    r.finish_reason,
    r.abort_cause AS cause,
    r.finish_message AS message,
    r.finished_ns,
    r.finished_ns - r.submitted_ns AS after_ns,
    r.num_prompt_tokens,
    r.num_output_tokens AS num_delivered_tokens,
    r.max_tokens,
    r.num_aborted_in_flight_tokens,
    r.tenant,
    r.finished_position AS position
FROM audit_projections AS p
JOIN audit_requests AS r ON r.projection_id = p.projection_id
WHERE p.is_live = 1 AND r.finish_reason IN ('abort', 'error', 'capacity')
