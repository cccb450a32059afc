WITH ranked AS (
    SELECT
        p.stream, d.minute, d.kind, d.bucket_ns,
        SUM(d.num) OVER (PARTITION BY p.stream, d.minute, d.kind ORDER BY d.bucket_ns) AS upto,
        SUM(d.num) OVER (PARTITION BY p.stream, d.minute, d.kind) AS total
    FROM audit_projections AS p
    JOIN audit_durations AS d ON d.projection_id = p.projection_id
    WHERE p.is_live = 1
)
SELECT DISTINCT
    stream,
    minute,
    kind,
    CAST(total AS BIGINT) AS num,
    MIN(CASE WHEN upto * 100 >= total * 50 THEN bucket_ns END) OVER w AS p50_ns,
    MIN(CASE WHEN upto * 100 >= total * 95 THEN bucket_ns END) OVER w AS p95_ns,
    MIN(CASE WHEN upto * 100 >= total * 99 THEN bucket_ns END) OVER w AS p99_ns,
    MAX(bucket_ns) OVER w AS max_ns
FROM ranked
WINDOW w AS (PARTITION BY stream, minute, kind)
