"""``wandb``: metrics to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.loggers.arguments import (
    Ranks,
    import_optional,
    rank_path,
    read_run_id,
    redact_settings,
    require_package,
    write_run_id,
)
from dtrain.loggers.background import BackgroundLogger, MetricRecord, check_timeout
from dtrain.loggers.logger import Logger, null_logger, report_failure
from dtrain.loggers.sanitize import NumericFilter, UniqueNames

RUN_ID_FILE = "wandb-run-id"
_CLOSE_TIMEOUT_S = 30.0  # it uploads
_RESERVED_NAMES = ("step", "_step", "_runtime", "_timestamp", "_wandb")


def wandb(
    project: str,
    *,
    path: str | Path,
    mode: Literal["online", "offline"] = "online",
    settings: Any = None,
    init: Mapping[str, Any] | None = None,
    ranks: Ranks = 0,
    timeout_s: float = 120.0,
) -> Logger:
    """A sink that logs to a run of Weights & Biases, whose axis is the loop's step.

    The run's id stays in ``folder/wandb-run-id``, so a resumed run goes on with the same run. Its steps are a metric, ``step``,
    which all others are drawn over: W&B's own count must not go back, and would lose what is repeated after a resume.

    All of it happens in a thread of its own: no network, no login or a server that hangs is one warning, and training goes on.
    Values that are no numbers are left out, with one warning a name; a metric named ``step`` is ``metric/step``.

    Args:
        project: created where missing.
        path: where W&B keeps its files, and the id.
        mode: "offline" writes files only, below ``folder/wandb``; ``wandb sync`` uploads them.
        settings: the run's, as ``open_run`` takes them; they become its config, and what looks secret is redacted.
        init: further arguments of ``wandb.init``, such as ``{"entity": "us", "name": "first", "tags": ["gpt"]}``.
        ranks: 0, or "all", which needs ``{rank}`` in the folder: a run for each rank.
        timeout_s: a call that takes longer drops the sink, with one warning.

    Raises:
        ConfigError: the package wandb is not installed; no project; another mode; a folder on a server.
    """
    require_package("wandb")
    if not isinstance(project, str) or not project:
        raise ConfigError(f"wandb: needs the name of a project, got {project!r}")
    if mode not in ("online", "offline"):
        raise ConfigError(f"wandb: mode must be 'online' or 'offline', got {mode!r}")
    check_timeout(timeout_s, "wandb")
    said, here = redact_settings(settings, "wandb"), rank_path(path, ranks, "wandb")
    if here is None:
        return null_logger
    try:
        package = import_optional("wandb")
    except Exception as error:  # noqa: BLE001 - it is installed, and does not work here
        report_failure("wandb", None, error)
        return null_logger
    asked = {"project": project, "mode": mode, "config": said, **(init or {})}
    names, numbers = UniqueNames("wandb", reserved=_RESERVED_NAMES), NumericFilter("wandb")
    return BackgroundLogger(
        "wandb",
        lambda: _WandbRun(package, here / RUN_ID_FILE, asked, timeout_s),
        convert=lambda record: {names(name): value for name, value in numbers(record).items()},
        timeout_s=timeout_s,
        close_timeout_s=_CLOSE_TIMEOUT_S,
    )


class _WandbRun:
    def __init__(self, package: Any, file: Path, asked: Mapping[str, Any], patience_s: float) -> None:
        run_id = read_run_id(file)
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            write_run_id(file, run_id)  # first: a kill in between must not make two runs
        # Its copy of what is printed would replace sys.stdout, from a thread; the launcher keeps all output anyway.
        quiet = package.Settings(console="off", login_timeout=patience_s)
        storage.make_folders(file.parent)
        self._run = package.init(**{"dir": str(file.parent), "id": run_id, "resume": "allow", "settings": quiet, **asked})
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            self._run.log({"step": record.step, **record.numbers})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
