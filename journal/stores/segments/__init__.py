"""The store of segment files; docs/reference/segments.md describes them byte by byte."""
