SELECT
    p.stream,
    n.step,
    n.entry,
    r.request_id,
    n.epoch,
    CASE n.kind WHEN 0 THEN 'decode' WHEN 1 THEN 'prefill' ELSE 'chunk' END AS kind,
    n.first_position,
    n.num_tokens,
    n.num_drafts,
    n.num_accepted,
    CASE n.outcome
        WHEN 0 THEN 'in flight'
        WHEN 1 THEN 'delivered'
        WHEN 2 THEN 'stale, delivered'
        WHEN 3 THEN 'stale, dropped'
        ELSE 'lost'
    END AS outcome,
    n.num_outputs AS num_output_tokens,
    n.first_output_index
FROM audit_projections AS p
JOIN audit_step_entries AS n ON n.projection_id = p.projection_id
JOIN audit_requests AS r ON r.projection_id = n.projection_id AND r.handle = n.handle
WHERE p.is_live = 1
