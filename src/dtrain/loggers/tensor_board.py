"""Write metrics to TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.arguments import check_number
from dtrain.loggers.background import BackgroundLogger, MetricRecord
from dtrain.loggers.logger import Logger, null_logger, report_failure
from dtrain.loggers.logger_options import Ranks, flatten_settings, import_optional, rank_path, redact_settings, require_package
from dtrain.loggers.sanitize import NumericFilter


def tensorboard(path: str | Path, *, settings: Any = None, ranks: Ranks = 0, timeout_s: float = 60.0) -> Logger:
    """Write TensorBoard event files into ``path``: one scalar per metric, by step of the loop.

    A background thread writes. TensorBoard's reader hides the earlier values of steps that a resumed run repeats. Values other
    than numbers are skipped with one warning per name. Non-finite numbers are written.

    Args:
        path: folder, created if missing; ``{rank}`` and ``{time}`` as in ``jsonl``.
        settings: settings of the run, as in ``open_run``, written once per folder as a text; secrets are redacted.
        ranks: 0, or "all" with ``{rank}`` in the path.
        timeout_s: seconds per write; a longer write drops the logger with one warning.

    Example:
        import dtrain as dt

        log = dt.loggers.tensorboard("runs/gpt/tensorboard", settings={"lr": 3e-4})
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: the package tensorboard is not installed, ``timeout_s`` is not a number above 0, or ``path`` is invalid
            (see ``jsonl``).
    """
    require_package("tensorboard")
    check_number("tensorboard", "timeout_s", timeout_s, above=0)
    plain_settings, folder = redact_settings(settings, "tensorboard"), rank_path(path, ranks, "tensorboard")
    if folder is None:
        return null_logger
    try:
        make_writer = import_optional("torch.utils.tensorboard").SummaryWriter
    except Exception as error:  # noqa: BLE001 - an installed package may fail to import
        report_failure("tensorboard", None, error)
        return null_logger
    name = f"tensorboard {folder}"
    return BackgroundLogger(
        name,
        lambda: _EventFileWriter(folder, make_writer, plain_settings),
        convert=NumericFilter(name),
        timeout_s=timeout_s,
    )


class _EventFileWriter:
    def __init__(self, folder: Path, make_writer: Any, settings: Mapping[str, Any]) -> None:
        self._folder, self._make_writer, self._settings = folder, make_writer, settings
        self._writer: Any = None

    def write(self, records: Sequence[MetricRecord]) -> None:
        if self._writer is None:
            self._open(records[0].step)
        for record in records:
            for name, value in record.numbers.items():
                self._writer.add_scalar(name, value, record.step, record.time)
        self._writer.flush()

    def _open(self, step: int) -> None:
        storage.make_folders(self._folder)
        resumed = any(name.startswith("events.out.tfevents") for name in storage.list_names(self._folder))
        # purge_step hides this step and later steps in earlier files.
        self._writer = self._make_writer(log_dir=str(self._folder), purge_step=step if resumed else None)
        if self._settings and not resumed:
            # TensorBoard renders markdown, in which indented lines are code.
            rows = "\n".join(f"    {name}: {json.dumps(value)}" for name, value in flatten_settings(self._settings).items())
            self._writer.add_text("settings", rows)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
