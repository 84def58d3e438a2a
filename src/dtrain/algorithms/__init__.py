"""Algorithms: one file per method, each with its plain tensor helper and the ``Transform`` factory."""
