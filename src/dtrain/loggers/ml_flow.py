"""Log metrics to an MLflow server or to a local MLflow store."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.loggers.background import BackgroundLogger, MetricRecord
from dtrain.loggers.logger import Logger, null_logger, report_failure
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

RUN_ID_FILE = "mlflow-run-id"
# A local store may still have to create tables.
_CLOSE_TIMEOUT_S = 30.0
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
        lambda: _MlflowRun(client(tracking_uri=tracking_uri), entities, folder / RUN_ID_FILE, experiment, name, params),
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
