"""Where metrics go: sinks are functions ``(step, numbers)``, put together with ``tee``. None of them can stop training."""

from dtrain.observe.sinks.bar import progress_bar
from dtrain.observe.sinks.csv_rows import csv_file
from dtrain.observe.sinks.guard import DroppedSink, dropped_sinks, guarded
from dtrain.observe.sinks.json_lines import jsonl, read_jsonl
from dtrain.observe.sinks.kept import InMemory, in_memory
from dtrain.observe.sinks.ml_flow import mlflow
from dtrain.observe.sinks.sink import Sink, close_sink, tee
from dtrain.observe.sinks.tensor_board import tensorboard
from dtrain.observe.sinks.text import console, text_file
from dtrain.observe.sinks.weights_and_biases import wandb

__all__ = [
    "DroppedSink",
    "InMemory",
    "Sink",
    "close_sink",
    "console",
    "csv_file",
    "dropped_sinks",
    "guarded",
    "in_memory",
    "jsonl",
    "mlflow",
    "progress_bar",
    "read_jsonl",
    "tee",
    "tensorboard",
    "text_file",
    "wandb",
]
