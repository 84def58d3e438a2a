"""Traces of the profiler, read: shares of time, a timeline of memory, one trace of all ranks, a verdict. Imports no torch."""
