"""Run a training script in several ways and compare the runs: ``dtrain prove`` and ``dt.testing.prove``.

    report = dt.testing.prove("loop.py", ["--width", "32"])
    assert report.passed, report.text()

A run is a few steps of the script on some ranks, with a ``RankRecorder`` that the primitives report to. The records of two runs
are joined to facts that do not depend on the layout, compared in program order, and the first difference gets its likely cause.
"""
