"""``tensorboard``: metrics into event files, as TensorBoard reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.loggers.arguments import Ranks, flatten_settings, import_optional, rank_path, redact_settings, require_package
from dtrain.loggers.background import BackgroundLogger, MetricRecord, check_timeout
from dtrain.loggers.logger import Logger, null_logger, report_failure
from dtrain.loggers.sanitize import NumericFilter


def tensorboard(path: str | Path, *, settings: Any = None, ranks: Ranks = 0, timeout_s: float = 60.0) -> Logger:
    """A sink that writes TensorBoard's event files into ``path``: each metric a scalar over the loop's steps.

    Written in a thread of its own. A resumed run takes back the steps that it repeats, as TensorBoard's own reader has it.
    Values that are no numbers are left out, with one warning a name; non-finite numbers are written.

    Args:
        path: created where missing; ``{rank}`` and ``{time}`` as in ``jsonl``.
        settings: the run's, as ``open_run`` takes them, written once for a folder, as a text; what looks secret is redacted.
        ranks: 0, or "all", which needs ``{rank}`` in the folder.
        timeout_s: a write that takes longer drops the sink, with one warning.

    Raises:
        ConfigError: the package tensorboard is not installed; as ``jsonl`` has them; a patience that is no number above 0.
    """
    require_package("tensorboard")
    check_timeout(timeout_s, "tensorboard")
    said, here = redact_settings(settings, "tensorboard"), rank_path(path, ranks, "tensorboard")
    if here is None:
        return null_logger
    try:
        make = import_optional("torch.utils.tensorboard").SummaryWriter
    except Exception as error:  # noqa: BLE001 - it is installed, and does not work here
        report_failure("tensorboard", None, error)
        return null_logger
    name = f"tensorboard {here}"
    return BackgroundLogger(name, lambda: _EventFileWriter(here, make, said), convert=NumericFilter(name), timeout_s=timeout_s)


class _EventFileWriter:
    def __init__(self, folder: Path, make: Any, settings: Mapping[str, Any]) -> None:
        self._folder, self._make, self._settings = folder, make, settings
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
        # What earlier files have of this step and later ones does not count any more.
        self._writer = self._make(log_dir=str(self._folder), purge_step=step if resumed else None)
        if self._settings and not resumed:
            rows = "\n".join(f"    {name}: {json.dumps(value)}" for name, value in flatten_settings(self._settings).items())
            self._writer.add_text("settings", rows)  # indented, which is code in its markdown

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
