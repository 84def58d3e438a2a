"""Start ranks, supervise them, restart them, and report the root cause of a failure. Imports no torch."""
