"""The profiler of torch around some steps of a loop, and what it leaves in a folder; ``report.trace`` reads it again."""
