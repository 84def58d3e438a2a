"""Log metrics to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.loggers.background import BackgroundLogger, MetricRecord
from dtrain.loggers.logger import Logger, null_logger, report_failure
from dtrain.loggers.logger_options import (
    Ranks,
    import_optional,
    rank_path,
    read_run_id,
    redact_settings,
    require_package,
    write_run_id,
)
from dtrain.loggers.sanitize import NumericFilter, UniqueNames

RUN_ID_FILE = "wandb-run-id"
# W&B uploads at the end.
_CLOSE_TIMEOUT_S = 30.0
_RESERVED_NAMES = ("step", "_step", "_runtime", "_timestamp", "_wandb")


def wandb(
    project: str,
    *,
    path: str | Path,
    offline: bool = False,
    settings: Any = None,
    init: Mapping[str, Any] | None = None,
    ranks: Ranks = 0,
    timeout_s: float = 120.0,
) -> Logger:
    """Log metrics to a run of Weights & Biases, with the step of the loop as the horizontal axis.

    The run id is stored in ``<path>/wandb-run-id``, so a resumed run continues the same W&B run. The step is a metric,
    ``step``, which is the axis of all charts: W&B's own step counter must not decrease and would drop the steps repeated after
    a resume.

    All calls run in a background thread: a missing network, a missing login or a server that hangs causes one warning, and
    training continues. Values other than numbers are skipped with one warning per name. A metric named ``step`` is written as
    ``metric/step``.

    Args:
        project: name of the project, created if missing.
        path: folder for the files of W&B and the run id.
        offline: if True, files below ``<path>/wandb`` are written only; ``wandb sync`` uploads the files.
        settings: settings of the run, as in ``open_run``, stored as the W&B config; secrets are redacted.
        init: further arguments of ``wandb.init``, such as ``{"entity": "us", "name": "first", "tags": ["gpt"]}``.
        ranks: 0, or "all" for one run per rank, with ``{rank}`` in the path.
        timeout_s: seconds per call; a longer call drops the logger with one warning.

    Example:
        import dtrain as dt

        log = dt.loggers.wandb("gpt", path="runs/gpt", settings=vars(args), init={"tags": ["baseline"]})
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: the package wandb is not installed, ``project`` is empty, or ``path`` is on a server.
    """
    require_package("wandb")
    if not isinstance(project, str) or not project:
        raise ConfigError(f"wandb: project must be the name of a project, got {project!r}. Pass project='gpt', for example.")
    check_number("wandb", "timeout_s", timeout_s, above=0)
    config, folder = redact_settings(settings, "wandb"), rank_path(path, ranks, "wandb")
    if folder is None:
        return null_logger
    try:
        package = import_optional("wandb")
    except Exception as error:  # noqa: BLE001 - an installed package may fail to import
        report_failure("wandb", None, error)
        return null_logger
    options = {"project": project, "mode": "offline" if offline else "online", "config": config, **(init or {})}
    names, numbers = UniqueNames("wandb", reserved=_RESERVED_NAMES), NumericFilter("wandb")
    return BackgroundLogger(
        "wandb",
        lambda: _WandbRun(package, folder / RUN_ID_FILE, options, timeout_s),
        convert=lambda record: {names(name): value for name, value in numbers(record).items()},
        timeout_s=timeout_s,
        close_timeout_s=_CLOSE_TIMEOUT_S,
    )


class _WandbRun:
    def __init__(self, package: Any, file: Path, options: Mapping[str, Any], timeout_s: float) -> None:
        run_id = read_run_id(file)
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            # Write the id before the first request, so that a kill does not lead to two runs.
            write_run_id(file, run_id)
        # W&B's console capture would replace sys.stdout from a thread. The launcher keeps all output.
        quiet = package.Settings(console="off", login_timeout=timeout_s)
        storage.make_folders(file.parent)
        self._run = package.init(**{"dir": str(file.parent), "id": run_id, "resume": "allow", "settings": quiet, **options})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            self._run.log({"step": record.step, **record.numbers})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
