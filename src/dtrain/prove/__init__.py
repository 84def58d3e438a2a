"""Run one script in several ways, and compare the runs.

    report = dt.prove.prove("train.py", ["--steps", "20"], steps=4)
    print(report)

``dtrain prove`` is the same as a command.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.prove.proof import prove as prove
    from dtrain.prove.report import Finding as Finding
    from dtrain.prove.report import ProveReport as ProveReport
    from dtrain.prove.report import RunRow as RunRow

__getattr__, __dir__ = attach(__name__, __file__)
