WITH ranked AS (
    SELECT
        p.stream, d.minute, d.kind, d.bucket_ns, d.num,
        SUM(d.num) OVER (PARTITION BY p.stream, d.minute, d.kind ORDER BY d.bucket_ns) AS upto,
        SUM(d.num) OVER (PARTITION BY p.stream, d.minute, d.kind) AS total
    FROM audit_projections AS p
    JOIN audit_durations AS d ON d.projection_id = p.projection_id
    WHERE p.is_live = 1
)
SELECT
    stream,
    minute,
    kind,
    CAST(MAX(total) AS BIGINT) AS num,
    MIN(CASE WHEN upto * 100 >= total * 50 THEN bucket_ns END) AS p50_ns,
    MIN(CASE WHEN upto * 100 >= total * 95 THEN bucket_ns END) AS p95_ns,
    MIN(CASE WHEN upto * 100 >= total * 99 THEN bucket_ns END) AS p99_ns,
    MAX(bucket_ns) AS max_ns
FROM ranked
GROUP BY stream, minute, kind
