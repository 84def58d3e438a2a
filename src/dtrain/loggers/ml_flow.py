"""``mlflow``: metrics to an MLflow server, or to a store in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError
from dtrain.loggers.arguments import (
    Ranks,
    flatten_settings,
    import_optional,
    rank_path,
    read_run_id,
    redact_settings,
    require_package,
    write_run_id,
)
from dtrain.loggers.background import BackgroundLogger, MetricRecord, check_timeout
from dtrain.loggers.logger import Logger, null_logger, report_failure
from dtrain.loggers.sanitize import NumericFilter, UniqueNames, mlflow_name

RUN_ID_FILE = "mlflow-run-id"
_CLOSE_TIMEOUT_S = 30.0  # a store in a file may still have its tables to make
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM_LENGTH = (
    1000,
    100,
    5000,
)  # in one request, and characters of a setting: what every server takes


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
    """A sink that logs to a run of MLflow: metrics over the loop's steps, settings once, as parameters.

    The run's id stays in ``folder/mlflow-run-id``, so a resumed run goes on with the same run, if the store still has it. All
    of it happens in a thread of its own: a server that fails or hangs is one warning, and training goes on. Values that are
    no numbers are left out, with one warning a name; characters that MLflow does not take become ``_``.

    Args:
        experiment: created where missing.
        path: where the id is kept.
        tracking_uri: ``"http://host:5000"``, ``"sqlite:////path/mlflow.db"``; None for what MLflow itself takes, such as
            ``MLFLOW_TRACKING_URI``.
        name: of the run; None for one that MLflow makes up.
        settings: the run's, as ``open_run`` takes them; what looks secret is redacted.
        ranks: 0, or "all", which needs ``{rank}`` in the folder: a run for each rank.
        timeout_s: a call that takes longer drops the sink, with one warning.

    Raises:
        ConfigError: the package mlflow is not installed; no experiment; a folder on a server.
    """
    require_package("mlflow")
    if not isinstance(experiment, str) or not experiment:
        raise ConfigError(f"mlflow: needs the name of an experiment, got {experiment!r}")
    check_timeout(timeout_s, "mlflow")
    said, here = redact_settings(settings, "mlflow"), rank_path(path, ranks, "mlflow")
    if here is None:
        return null_logger
    try:
        client, entities = import_optional("mlflow.tracking").MlflowClient, import_optional("mlflow.entities")
    except Exception as error:  # noqa: BLE001 - it is installed, and does not work here
        report_failure("mlflow", None, error)
        return null_logger
    names, numbers = UniqueNames("mlflow", mlflow_name), NumericFilter("mlflow")
    return BackgroundLogger(
        "mlflow",
        lambda: _MlflowRun(client(tracking_uri=tracking_uri), entities, here / RUN_ID_FILE, experiment, name, said),
        convert=lambda record: {names(each): value for each, value in numbers(record).items()},
        timeout_s=timeout_s,
        close_timeout_s=_CLOSE_TIMEOUT_S,
    )


class _MlflowRun:
    def __init__(
        self, client: Any, entities: Any, file: Path, experiment: str, name: str | None, settings: Mapping[str, Any]
    ) -> None:
        self._client, self._entities = client, entities
        kept = read_run_id(file)
        if kept is not None and self._exists(kept):
            self._id = kept
            client.update_run(kept, status="RUNNING")
        else:
            self._id = client.create_run(self._get_or_create_experiment(experiment), run_name=name).info.run_id
            write_run_id(file, self._id)
            self._log_params(settings)

    def _exists(self, run_id: str) -> bool:
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except Exception as error:
            if getattr(error, "error_code", None) == "RESOURCE_DOES_NOT_EXIST":  # another store than last time
                return False
            raise

    def _get_or_create_experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                found = self._client.get_experiment_by_name(name)  # another run was faster
                if found is None:
                    raise
        return str(found.experiment_id)

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
