"""Start ranks, supervise them, restart them, and report the root cause of a failure. Imports no torch.

    for document in documents:
        tokens += tokenize(document)
        dt.launch.heartbeat("tokenize")

    print(dt.launch.explain_hang("runs/gpt"))

``dt.spawn`` and ``dtrain launch`` start ranks. A watchdog reports a rank without a heartbeat or a step.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.launch.hang_report import explain_hang as explain_hang
    from dtrain.launch.heartbeats import heartbeat as heartbeat

__getattr__, __dir__ = attach(__name__, __file__)
