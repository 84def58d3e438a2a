"""A package, unlike other folders of tests: ``benchmarks/checkpoint.py`` is on the path as well, and would hide it."""
