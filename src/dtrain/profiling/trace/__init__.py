"""Read, merge and diagnose profiler traces."""
