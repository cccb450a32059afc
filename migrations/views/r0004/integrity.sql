SELECT
    p.stream,
    CASE WHEN p.damage IS NULL THEN 'whole' ELSE 'damaged' END AS chain,
    p.damage,
    p.damage_position,
    p.position AS num_records,
    p.journal_head - p.position AS num_records_behind,
    p.num_events,
    p.num_request_events,
    p.head_hash,
    p.engine_epoch,
    p.time_ns AS last_record_ns,
    (SELECT COUNT(*) FROM audit_events AS e WHERE e.projection_id = p.projection_id AND e.kind = 'StateDigest')
        AS num_digests,
    (
        SELECT COUNT(*) FROM audit_events AS e
        WHERE e.projection_id = p.projection_id AND e.kind = 'ContentRedacted' AND e.handle > 0
    ) AS num_redacted_requests,
    (SELECT COUNT(*) FROM audit_violations AS v WHERE v.projection_id = p.projection_id) AS num_violations,
    p.version AS projection_version
FROM audit_projections AS p
WHERE p.is_live = 1
