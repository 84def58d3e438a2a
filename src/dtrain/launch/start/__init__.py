"""How a rank becomes a process: an interpreter of its own (``plain``), or a fork of one that has loaded torch (``preloaded``).

``rank``, ``preload`` and ``store`` are programs: what runs in those processes.
"""
