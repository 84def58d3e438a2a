"""Keep the records of a run in one folder: settings, metrics, a ledger of each rank.

    with dt.init_dist():
        run = dt.open_run("runs/gpt", settings=vars(args))
        ...
        dt.run.upload_run(run, "s3://bucket/gpt")

``dtrain report`` reads such a folder.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.run.run_dir import Run as Run
    from dtrain.run.run_dir import upload_run as upload_run

__getattr__, __dir__ = attach(__name__, __file__)
