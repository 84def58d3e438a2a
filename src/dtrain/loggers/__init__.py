"""Loggers: functions ``(step, numbers)`` that write metrics to files, the terminal or a tracking server.

    log = dt.loggers.multi(
        dt.loggers.console(), dt.loggers.jsonl("metrics.jsonl"), dt.loggers.wandb("gpt", path="runs/gpt")
    )
    for batch in loader:
        state, metrics = step(state, batch)
        log(state.clock.step, dt.reduce_metrics(metrics))
    files = dt.loggers.media_files("media")
    dt.loggers.log_text(files, state.step, {"answer": "4"})

A logger that fails is dropped with one warning. Training continues.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.loggers.logger import FailedLogger as FailedLogger
    from dtrain.loggers.logger import Logger as Logger
    from dtrain.loggers.logger import close as close
    from dtrain.loggers.logger import failed_loggers as failed_loggers
    from dtrain.loggers.logger import fault_tolerant as fault_tolerant
    from dtrain.loggers.logger import multi as multi
    from dtrain.loggers.media import log_images as log_images
    from dtrain.loggers.media import log_table as log_table
    from dtrain.loggers.media import log_text as log_text
    from dtrain.loggers.media import media_files as media_files
    from dtrain.loggers.records import csv_file as csv_file
    from dtrain.loggers.records import in_memory as in_memory
    from dtrain.loggers.records import jsonl as jsonl
    from dtrain.loggers.records import read_jsonl as read_jsonl
    from dtrain.loggers.text import console as console
    from dtrain.loggers.text import progress_bar as progress_bar
    from dtrain.loggers.text import text_file as text_file
    from dtrain.loggers.trackers import mlflow as mlflow
    from dtrain.loggers.trackers import tensorboard as tensorboard
    from dtrain.loggers.trackers import wandb as wandb

__getattr__, __dir__ = attach(__name__, __file__)
