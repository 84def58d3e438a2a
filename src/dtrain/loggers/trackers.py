"""Log metrics to Weights & Biases."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.loggers.logger import BackgroundLogger, Logger, MetricRecord, null_logger, report_failure
from dtrain.loggers.logger_options import (
    Ranks,
    flatten_settings,
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


# limits of the MLflow REST API: metrics and parameters per request, characters per parameter
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = 1000, 100, 5000


def mlflow(
    experiment: str,
    *,
    path: str | Path,
    tracking_uri: str | None = None,
    name: str | None = None,
    settings: Any = None,
    ranks: Ranks = 0,
    timeout_s: float = 60.0,
) -> Logger:
    """Log metrics and settings to a run of MLflow: metrics by step of the loop, settings once as parameters.

    The run id is stored in ``<path>/mlflow-run-id``, so a resumed run continues the same MLflow run if the store still has the
    run. All requests run in a background thread: a server that fails or hangs causes one warning, and training continues.
    Values other than numbers are skipped with one warning per name. Characters that MLflow rejects become ``_``.

    Args:
        experiment: name of the experiment, created if missing.
        path: folder of the run id.
        tracking_uri: ``"http://host:5000"`` or ``"sqlite:////path/mlflow.db"``; None uses MLflow's own default, such as
            ``MLFLOW_TRACKING_URI``.
        name: name of the run; None lets MLflow choose a name.
        settings: settings of the run, as in ``open_run``; secrets are redacted.
        ranks: 0, or "all" for one run per rank, with ``{rank}`` in the path.
        timeout_s: seconds per request; a longer request drops the logger with one warning.

    Example:
        import dtrain as dt

        log = dt.loggers.mlflow("gpt", path="runs/gpt", tracking_uri="http://host:5000", settings=vars(args))
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: the package mlflow is not installed, ``experiment`` is empty, or ``path`` is on a server.
    """
    require_package("mlflow")
    if not isinstance(experiment, str) or not experiment:
        raise ConfigError(
            f"mlflow: experiment must be the name of an experiment, got {experiment!r}. Pass experiment='gpt', for example."
        )
    check_number("mlflow", "timeout_s", timeout_s, above=0)
    params, folder = redact_settings(settings, "mlflow"), rank_path(path, ranks, "mlflow")
    if folder is None:
        return null_logger
    try:
        client, entities = import_optional("mlflow.tracking").MlflowClient, import_optional("mlflow.entities")
    except Exception as error:  # noqa: BLE001 - an installed package may fail to import
        report_failure("mlflow", None, error)
        return null_logger
    names, numbers = UniqueNames("mlflow", mlflow_name), NumericFilter("mlflow")
    return BackgroundLogger(
        "mlflow",
        lambda: _MlflowRun(client(tracking_uri=tracking_uri), entities, folder / "mlflow-run-id", experiment, name, params),
        convert=lambda record: {names(each): value for each, value in numbers(record).items()},
        timeout_s=timeout_s,
        close_timeout_s=_CLOSE_TIMEOUT_S,
    )


class _MlflowRun:
    def __init__(
        self, client: Any, entities: Any, file: Path, experiment: str, name: str | None, settings: Mapping[str, Any]
    ) -> None:
        self._client, self._entities = client, entities
        stored_id = read_run_id(file)
        if stored_id is not None and self._exists(stored_id):
            self._id = stored_id
            client.update_run(stored_id, status="RUNNING")
        else:
            self._id = client.create_run(self._get_or_create_experiment(experiment), run_name=name).info.run_id
            write_run_id(file, self._id)
            self._log_params(settings)

    def _exists(self, run_id: str) -> bool:
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except Exception as error:
            # The store may differ from the store of the earlier attempt.
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _get_or_create_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                # Another process may have created the experiment in the meantime.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _log_params(self, settings: Mapping[str, Any]) -> None:
        names = UniqueNames("mlflow", mlflow_name)
        params = [
            self._entities.Param(names(name), (value if isinstance(value, str) else json.dumps(value))[:_MAX_PARAM_LENGTH])
            for name, value in flatten_settings(settings).items()
        ]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MAX_PARAMS])

    def write(self, records: Sequence[MetricRecord]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(record.time * 1000), record.step)
            for record in records
            for name, value in record.numbers.items()
        ]
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_METRICS])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


# MLflow allows 250 characters. The margin is for an appended number.
_MAX_NAME_LENGTH = 240


def mlflow_name(name: str) -> str:
    """Replace all characters except letters, digits and ``_-. :/``, and normalize the path."""
    text = re.sub(r"[^\w\-. :/]", "_", name)
    text = "/".join(part if part.strip(".") else "_" * len(part) for part in text.split("/") if part)
    return text[:_MAX_NAME_LENGTH].rstrip("/") or "_"


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
